"""From a mapping of unknown quality to a RunConfig, or to one ConfigError that names every problem."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from hybrid.config.tree import RunConfig, Section
from hybrid.errors import ConfigError

Path = tuple[str, ...]
SHOWN = 200  # characters of a key or value in a message

# Names that other trainers use for our settings; only for hints.
_ELSEWHERE = {
    "learningRate": "optimizer.lr",
    "maxLr": "optimizer.lr",
    "gradClip": "optimizer.maxNorm",
    "gradientClipping": "optimizer.maxNorm",
    "scheduler": "schedule",
    "warmup": "schedule.warmupSteps",
    "blockSize": "data.sequenceLength",
    "seqLen": "data.sequenceLength",
    "accumSteps": "data.microbatchSize",
    "numLayers": "model.layers",
    "hiddenSize": "model.width",
    "numHeads": "model.heads",
    "maxSteps": "run.steps",
    "maxIters": "run.steps",
    "checkpointEvery": "checkpoint.every",
    "evalInterval": "evaluation.every",
    "evalEvery": "evaluation.every",
    "device": "backend.name",
}


def parse_config(values: Mapping[str, Any], origins: Mapping[Path, str] | None = None) -> RunConfig:
    """The typed configuration of camelCase `values`.

    `origins` says for dotted paths which file or option they came from; errors repeat it. Raises ConfigError with a
    line for each unknown key (and the nearest known one) and for each value that is not what the key expects.
    """
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        found: dict[Path, list[dict[str, Any]]] = {}
        for problem in error.errors():
            path = _key_path(problem["loc"])
            found.setdefault(path, []).append(dict(problem))
        lines = [_describe(path, problems, origins or {}) for path, problems in found.items()]
        raise ConfigError("\n".join(lines)) from None


def known_keys(section: type[Section] = RunConfig, prefix: Path = ()) -> Iterator[Path]:
    """Paths of all settings, in the order of the tree."""
    for name, field in section.model_fields.items():
        path = (*prefix, field.alias or name)
        child = _child(section, path[-1])
        if child is None:
            yield path
        else:
            yield from known_keys(child, path)


def nearest(word: str, candidates: list[str]) -> str | None:
    """The candidate that `word` probably meant, ignoring case, dashes and underscores; None if nothing is near."""
    plain = {_plain(candidate): candidate for candidate in reversed(candidates)}
    close = difflib.get_close_matches(_plain(word), list(plain), n=1, cutoff=0.6)
    return plain[close[0]] if close else None


def _plain(word: str) -> str:
    return word.replace("_", "").replace("-", "").lower()


def _child(section: type[Section], key: str) -> type[Section] | None:
    for name, field in section.model_fields.items():
        if (field.alias or name) == key:
            kind = field.annotation
            return kind if isinstance(kind, type) and issubclass(kind, Section) else None
    return None


def _key_path(location: tuple[int | str, ...]) -> Path:
    """Cut what pydantic adds behind a setting: union members and positions in a list."""
    section: type[Section] | None = RunConfig
    path: list[str] = []
    for part in location:
        if section is None:
            break
        path.append(str(part))
        section = _child(section, str(part))
    return tuple(path)


def _describe(path: Path, problems: list[dict[str, Any]], origins: Mapping[Path, str]) -> str:
    name = _cut(".".join(path))
    origin = next((origins[path[:n]] for n in range(len(path), 0, -1) if path[:n] in origins), None)
    where = f" ({_cut(origin)})" if origin else ""
    if problems[0]["type"] == "extra_forbidden":
        return f"unknown configuration key {name} = {_show(problems[0]['input'])}{where}: {_hint(path)}"
    name, problems = _entry(name, len(path), problems)
    expected = " or ".join(dict.fromkeys(_expected(problem) for problem in problems))
    value = problems[0]["input"]
    line = f"configuration key {name} = {_show(value)}{where}: expected {expected}"
    if problems[0]["type"] == "literal_error" and isinstance(value, str):
        allowed = problems[0]["ctx"]["expected"].replace(" or ", ", ").replace("'", "").split(", ")
        near = nearest(value, allowed)
        line += f"; did you mean {near!r}?" if near else ""
        instead = _MEANT.get(name, {}).get(value.lower())
        line += f"; for that, {instead}" if instead else ""
    return line


def _entry(name: str, depth: int, problems: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """The name and the problems of the entry that is wrong, where the value is a list; pydantic also tells what is
    wrong with the list without that entry, or would be if it were no list."""
    entries = [(part, problem) for problem in problems for part in problem["loc"][depth:] if isinstance(part, int)]
    if entries:
        first = min(index for index, _ in entries)
        return f"{name}[{first}]", [problem for index, problem in entries if index == first]
    if isinstance(problems[0]["input"], (list, tuple)):
        problems = [problem for problem in problems if problem["type"] in ("too_short", "too_long")] or problems
    return name, problems


def _hint(path: Path) -> str:
    """What the unknown key was meant to be: a key of the same section, else one of the same name elsewhere."""
    section: type[Section] | None = RunConfig
    for part in path[:-1]:
        section = _child(section, part) if section else None
    siblings = [field.alias or name for name, field in section.model_fields.items()] if section else []
    near = nearest(path[-1], siblings)
    if near:
        return f"did you mean {'.'.join((*path[:-1], near))}?"
    elsewhere = _ELSEWHERE | {known[-1]: ".".join(known) for known in reversed(list(known_keys()))}
    near = nearest(path[-1], list(elsewhere))
    if near:
        return f"did you mean {elsewhere[near]}?"
    place = ".".join(path[:-1]) or "the top level"
    return f"known keys of {place}: {', '.join(siblings)}"


_MEANT = {
    "backend.name": {
        "cuda": "backend.name = 'torch' and backend.device = 'cuda'",
        "cpu": "backend.name = 'torch' and backend.device = 'cpu', or 'reference'",
        "gpu": "backend.name = 'webgpu'",
        "wgpu": "backend.name = 'webgpu'",
        "numpy": "backend.name = 'reference'",
    },
}

_EXPECTED = {
    "model_type": "a table of settings",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "tuple_type": "a list",
    "finite_number": "a finite number",
    # Only names have a pattern.
    "string_pattern_mismatch": "letters, digits, '.', '_' and '-', and one of the first two in front",
}


def _expected(problem: dict[str, Any]) -> str:
    kind = problem["type"]
    if kind in _EXPECTED:
        return _EXPECTED[kind]
    if kind in ("too_short", "string_too_short"):
        return "a text that is not empty" if isinstance(problem["input"], str) else "a list of at least one entry"
    if kind == "greater_than_equal":
        return f"at least {problem['ctx']['ge']:g}"
    if kind == "less_than_equal":
        return f"at most {problem['ctx']['le']:,}"
    if kind == "too_long":
        return f"a list of at most {problem['ctx']['max_length']:,} entries, not {problem['ctx']['actual_length']:,}"
    message: str = problem["msg"]
    return message.removeprefix("Input should be ").removeprefix("Value error, ")


def _show(value: Any) -> str:
    try:
        return _cut(json.dumps(value, ensure_ascii=False, default=str))  # TOML has dates
    except (TypeError, ValueError):
        return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"
