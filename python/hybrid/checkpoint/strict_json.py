"""JSON read without mercy: UTF-8 only, no duplicate keys, no NaN or Infinity, no lone surrogates, bounded numbers and
depth.

An ordinary parser keeps the last of two equal keys and says nothing, so two readers may see two different files.
"""

from __future__ import annotations

import json
from typing import Any, Literal, NoReturn

# Longest integer literal read: stable JSON writes numbers below 1e21 without an exponent. Nothing of ours needs more,
# and converting very long ones takes quadratic time.
_MAX_INTEGER_DIGITS = 21

Kind = Literal["utf8", "syntax", "duplicate"]


class StrictJsonError(ValueError):
    """`kind` says what was wrong: not UTF-8, not JSON, or a key that appears twice in one object (`key`)."""

    def __init__(self, kind: Kind, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.key = key


def parse(data: bytes, *, doubles: bool = False) -> Any:
    """The value of the JSON text in `data`. Integers stay integers, other numbers become floats.

    doubles: numbers mean float64, as in JavaScript: integers beyond 2^53 become floats too. Errors: StrictJsonError.
    """
    try:
        text = data.decode("utf-8", errors="strict")
    except UnicodeDecodeError as error:
        raise StrictJsonError("utf8", f"not UTF-8 at byte {error.start}") from None
    try:
        return json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_int=_double if doubles else _integer,
            parse_float=_float,
        )
    except StrictJsonError:
        raise
    except RecursionError:
        raise StrictJsonError("syntax", "nested too deeply") from None
    except json.JSONDecodeError as error:
        raise StrictJsonError("syntax", f"not JSON: {error.msg} at character {error.pos}") from None


def has_lone_surrogate(text: str) -> bool:
    """Whether `text` holds half of a surrogate pair: a `\\ud800` escape yields one, and it has no UTF-8 form."""
    if text.isascii():
        return False
    return any("\ud800" <= character <= "\udfff" for character in text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise StrictJsonError("duplicate", f"the key {key!r} appears twice in one object", key)
        if has_lone_surrogate(key):
            raise StrictJsonError("syntax", f"the key {key!r} holds a lone surrogate")
        result[key] = value
    return result


def _constant(text: str) -> NoReturn:
    raise StrictJsonError("syntax", f"{text} is not a JSON number")


def _integer(text: str) -> int | float:
    if len(text) > _MAX_INTEGER_DIGITS + (text[0] == "-"):
        raise StrictJsonError("syntax", f"an integer of {len(text)} digits is out of range")
    return -0.0 if text == "-0" else int(text)


def _double(text: str) -> int | float:
    value = _integer(text)
    return value if abs(value) < 2**53 else float(value)


def _float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise StrictJsonError("syntax", f"the number {text[:40]} is out of range")
    return value
