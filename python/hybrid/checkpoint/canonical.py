"""The one text of a JSON document: stable JSON's order, numbers and escapes, with two spaces of indentation and a
newline at the end. In JavaScript it is `JSON.stringify(sorted, null, 2) + "\\n"`.

A document that must have this text has no byte that could change unnoticed, white space included.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from hybrid.checkpoint import strict_json
from hybrid.contracts.stable_json import stable_json
from hybrid.errors import ConfigError, HybridError

MAX_DEPTH: Final = 64
_MAX_SAFE_INTEGER: Final = 2**53 - 1


def plain(value: object, path: str) -> Any:
    """`value` as reading it back would give it.

    Tuples become lists, NumPy scalars Python's, integral floats integers, and NaN and infinities None.
    Errors: HybridError naming the path for what JSON cannot carry exactly: other types, and integers beyond 2^53.
    """
    value = _python(value)
    for where, part in _walk(value, path):
        if type(part) is int and abs(part) > _MAX_SAFE_INTEGER:
            raise HybridError(f"{where} is {part}: JSON carries integers exactly only up to {_MAX_SAFE_INTEGER}")
    try:
        text = stable_json(value)
    except (TypeError, ConfigError) as error:
        raise HybridError(f"{path} cannot be saved: {error}") from error
    return strict_json.parse(text.encode("utf-8"), doubles=True)


def render(value: object) -> bytes:
    """The text of `value` as UTF-8. Errors: as `stable_json`; HybridError for more than MAX_DEPTH levels."""
    for _ in _walk(value, "$"):
        pass
    return ("".join(_pieces(strict_json.parse(stable_json(value).encode("utf-8"), doubles=True), "\n")) + "\n").encode(
        "utf-8"
    )


def parse(data: bytes) -> Any:
    """The value of a document that has its one text. Errors: ValueError saying what is wrong."""
    value = strict_json.parse(data, doubles=True)
    try:
        text = render(value)
    except HybridError as error:
        raise ValueError(str(error)) from error
    if text != data:
        shared = min(len(text), len(data))
        position = next((i for i in range(shared) if text[i] != data[i]), shared)
        raise ValueError(f"not in canonical form at byte {position}: it was edited or damaged")
    return value


def _python(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _python(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_python(item) for item in value]
    return value


def _walk(value: object, path: str) -> Iterator[tuple[str, object]]:
    pending: list[tuple[str, object, int]] = [(path, value, 0)]
    while pending:
        where, part, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise HybridError(f"{where[:200]} is nested more than {MAX_DEPTH} levels deep")
        yield where, part
        if isinstance(part, dict):
            pending.extend((f"{where}.{key}", item, depth + 1) for key, item in part.items())
        elif isinstance(part, (list, tuple)):
            pending.extend((f"{where}[{index}]", item, depth + 1) for index, item in enumerate(part))


def _pieces(value: Any, newline: str) -> Iterator[str]:
    inner = newline + "  "
    if isinstance(value, dict) and value:
        for index, (key, item) in enumerate(value.items()):
            yield f"{',' if index else '{'}{inner}{stable_json(key)}: "
            yield from _pieces(item, inner)
        yield newline + "}"
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield f"{',' if index else '['}{inner}"
            yield from _pieces(item, inner)
        yield newline + "]"
    else:
        yield stable_json(value)
