"""Where settings come from: preset < file < `--set` < command-line flags, the later one wins key by key."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from hybrid.config.problems import nearest, parse_config
from hybrid.config.tree import RunConfig
from hybrid.errors import ConfigError

DEFAULT_PRESET = "stdlib-tiny"
MOST_LEVELS = 32  # of nesting; the tree itself has four

Settings = dict[str, Any]


def load_config(
    file: Path | None = None,
    preset: str | None = None,
    assignments: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
    base: Mapping[str, Any] | None = None,
) -> RunConfig:
    """The configuration of a run.

    file: TOML or JSON; its top-level key `preset` names what it starts from. preset: takes precedence over that key;
    without either, `stdlib-tiny`. assignments: texts `key.path=value`. flags: dotted key to value. base: all settings
    of a saved run, used in place of a preset. Raises ConfigError.
    """
    layers: list[tuple[str, Settings]] = []
    from_file = read_file(file) if file is not None else {}
    named = from_file.pop("preset", None)
    if base is not None and preset is None and file is None:
        layers.append(("the saved run", dict(base)))
    else:
        name = preset if preset is not None else DEFAULT_PRESET if named is None else named
        if not isinstance(name, str):
            raise ConfigError(
                f"configuration key preset = {name!r} ({file}): expected one of {', '.join(preset_names())}"
            )
        layers.append((f"preset {name}", read_preset(name)))
    if file is not None:
        layers.append(("file name", _nested(["run", "name"], plain_name(file.stem))))
        layers.append((str(file), from_file))
    layers += [(f"--set {text}", parse_assignment(text)) for text in assignments]
    layers += [("command line", _nested(key.split("."), value)) for key, value in (flags or {}).items()]
    values: Settings = {}
    origins: dict[tuple[str, ...], str] = {}
    for origin, layer in layers:
        values = merge(values, layer)
        origins |= dict.fromkeys(_leaves(layer), origin)
    return parse_config(values, origins)


def to_settings(config: RunConfig) -> Settings:
    """The configuration as plain camelCase JSON values, every key present; `parse_config` reads it back."""
    settings: Settings = config.model_dump(mode="json", by_alias=True)
    return settings


def preset_names() -> list[str]:
    """Names of the shipped presets, the default first."""
    folder = resources.files("hybrid.config") / "presets"
    names = [entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")]
    return sorted(names, key=lambda name: (name != DEFAULT_PRESET, name))


def read_preset(name: str) -> Settings:
    """The settings of a preset; ConfigError with the nearest name if there is none of that name."""
    names = preset_names()
    if name not in names:
        near = nearest(name, names)
        hint = f"did you mean {near!r}? " if near else ""
        raise ConfigError(f"unknown preset {name!r}: {hint}There are: {', '.join(names)}")
    text = (resources.files("hybrid.config") / "presets" / f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def read_file(path: Path) -> Settings:
    """The settings of a .toml or .json file. ConfigError if it is missing, another kind, malformed or not a table."""
    if path.suffix not in (".toml", ".json"):
        raise ConfigError(f"configuration file {path}: expected a name ending in .toml or .json, got {path.suffix!r}")
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows begin a file with a byte order mark
    except FileNotFoundError:
        raise ConfigError(f"configuration file {path}: there is no such file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"configuration file {path}: cannot be read: {error}") from None
    try:
        settings = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:  # also an integer of too many digits, and brackets without end
        raise ConfigError(f"configuration file {path}: not valid {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"configuration file {path}: expected an object of sections, got {type(settings).__name__}")
    _check_depth(settings, f"configuration file {path}")
    return settings


def parse_assignment(text: str) -> Settings:
    """`key.path=value` as nested settings. The value is TOML; bare words are strings, and a bare `null` is null."""
    key, separator, value = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not separator or not all(parts):
        raise ConfigError(f"--set {text!r}: expected KEY=VALUE, such as --set model.width=256")
    settings = _nested(parts, _parse_value(text, value.strip()))
    _check_depth(settings, f"--set {text[:60]!r}")
    return settings


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> Settings:
    """`over` on top of `under`, table by table; lists and values are replaced whole."""
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _parse_value(text: str, value: str) -> Any:
    if value == "null":
        return None
    try:
        parsed = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError) as error:
        if value[:1] in tuple("\"'[{"):
            raise ConfigError(f"--set {text!r}: the value is not valid TOML: {error}") from None
        return value
    return parsed["value"] if len(parsed) == 1 else value


def _object(pairs: list[tuple[str, Any]]) -> Settings:
    """Of two equal keys JSON would keep the last and say nothing; TOML refuses them by itself."""
    settings = dict(pairs)
    if len(settings) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} appears twice in one object")
    return settings


def _check_depth(settings: Settings, where: str) -> None:
    """ConfigError for tables within tables within tables: what follows walks them one inside the other."""
    level: list[Any] = [settings]
    for _ in range(MOST_LEVELS):
        inner = [part.values() if isinstance(part, dict) else part for part in level]
        level = [part for parts in inner for part in parts if isinstance(part, (dict, list))]
        if not level:
            return
    raise ConfigError(f"{where}: nested more than {MOST_LEVELS} levels deep")


def plain_name(stem: str) -> str:
    """A file's name as the name of a run."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).lstrip("-._") or "run"


def _nested(parts: list[str], value: Any) -> Settings:
    for part in reversed(parts):
        value = {part: value}
    settings: Settings = value
    return settings


def _leaves(settings: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterable[tuple[str, ...]]:
    for key, value in settings.items():
        path = (*prefix, key)
        if isinstance(value, dict):
            yield from _leaves(value, path)
        yield path
