"""Stable JSON: one text for one value, in every language, so that its sha256 can stand for the value.

The text is what JavaScript's JSON.stringify gives for a copy whose objects list their members in sorted order:
integer-like keys first, by number, then the others by UTF-16 code units. Numbers are float64 in ECMAScript notation;
NaN and infinities are null, -0 is 0. No spaces. Lone surrogates are escaped, so the text always has a UTF-8 form.
"""

from __future__ import annotations

import re
from hashlib import sha256
from math import isfinite
from typing import Any

from hybrid.errors import ConfigError

# Array indices in ECMAScript: canonical decimal integers up to 2^32 - 2. Objects list these before all other keys.
_INDEX = re.compile(r"(?:0|[1-9][0-9]{0,9})\Z", re.ASCII)
_LARGEST_INDEX = 2**32 - 2

_ESCAPED = re.compile('[\x00-\x1f"\\\\\ud800-\udfff]')
_SHORT_ESCAPES = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


def stable_json(value: Any) -> str:
    """The stable JSON of None, bool, int, float, str, list, tuple or dict (str keys), nested.

    Errors: TypeError with the path of a value of another type; ConfigError for a key `__proto__` (some JavaScript
    helpers drop it, so two different values would share a hash) or for two keys that spell the same text with paired
    surrogates.
    """
    parts: list[str] = []
    _write(value, "$", parts)
    return "".join(parts)


def stable_hash(value: Any) -> str:
    """sha256 of the UTF-8 of `stable_json(value)`, as 64 hex digits."""
    return sha256(stable_json(value).encode("utf-8")).hexdigest()


def number_text(number: float) -> str:
    """ECMAScript's Number::toString of a finite number: the shortest digits that round-trip, in its notation."""
    if number == 0:
        return "0"
    sign = "-" if number < 0 else ""
    # repr gives the same shortest digits; only the notation differs. value = 0.DIGITS * 10^point
    mantissa, _, exponent = repr(abs(float(number))).partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    point = len(whole) + int(exponent or 0) - (len(whole + fraction) - len(digits))
    digits = digits.rstrip("0")
    count = len(digits)
    if count <= point <= 21:
        return sign + digits + "0" * (point - count)
    if 0 < point <= 21:
        return f"{sign}{digits[:point]}.{digits[point:]}"
    if -6 < point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    power = point - 1
    tail = f".{digits[1:]}" if count > 1 else ""
    return f"{sign}{digits[0]}{tail}e{'+' if power > 0 else '-'}{abs(power)}"


def _write(value: Any, path: str, parts: list[str]) -> None:
    if value is None:
        parts.append("null")
    elif isinstance(value, bool):
        parts.append("true" if value else "false")
    elif isinstance(value, str):
        parts.append(_quote(_pair_surrogates(value)))
    elif isinstance(value, (int, float)):
        number = _as_double(value)
        parts.append(number_text(number) if isfinite(number) else "null")
    elif isinstance(value, (list, tuple)):
        parts.append("[")
        for index, item in enumerate(value):
            if index:
                parts.append(",")
            _write(item, f"{path}[{index}]", parts)
        parts.append("]")
    elif isinstance(value, dict):
        parts.append("{")
        for index, (key, item) in enumerate(_sorted_members(value, path)):
            parts.append(f"{',' if index else ''}{_quote(key)}:")
            _write(item, f"{path}.{key}", parts)
        parts.append("}")
    else:
        raise TypeError(
            f"{path} is a {type(value).__name__}: stable JSON takes None, bool, int, float, str, list, dict"
        )


def _sorted_members(members: dict[Any, Any], path: str) -> list[tuple[str, Any]]:
    paired: dict[str, Any] = {}
    for key, item in members.items():
        if not isinstance(key, str):
            raise TypeError(f"{path} has the key {key!r}: stable JSON takes only str keys")
        if key == "__proto__":
            raise ConfigError(f"{path} has a key '__proto__', which runtimes hash differently: give it another name")
        paired[_pair_surrogates(key)] = item
    if len(paired) != len(members):
        raise ConfigError(f"{path} has two keys that are the same text in UTF-16: keep one of them")
    return sorted(paired.items(), key=lambda member: _order(member[0]))


def _order(key: str) -> tuple[int, int, bytes]:
    if _INDEX.match(key) and int(key) <= _LARGEST_INDEX:
        return 0, int(key), b""
    # Big-endian bytes compare as code units do. Code points would not: U+1F600 has lower units than U+FFFD.
    return 1, 0, key.encode("utf-16-be", "surrogatepass")


def _as_double(number: int | float) -> float:
    try:
        return float(number)
    except OverflowError:  # an int beyond float64: JavaScript reads such a literal as infinity
        return float("inf")


def _pair_surrogates(text: str) -> str:
    """Joins surrogates that stand side by side: a str can hold the halves of one character apart, UTF-16 cannot."""
    return text.encode("utf-16-be", "surrogatepass").decode("utf-16-be", "surrogatepass")


def _quote(text: str) -> str:
    return f'"{_ESCAPED.sub(_escape, text)}"'


def _escape(match: re.Match[str]) -> str:
    character = match.group()
    return _SHORT_ESCAPES.get(character) or f"\\u{ord(character):04x}"
