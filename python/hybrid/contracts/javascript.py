"""The few JavaScript meanings that contracts depend on: what a number is, what blank text is, how a date is written.

Contracts speak of JSON values. Python would call True a number and strip characters that JavaScript keeps; these say
what a browser says. Where JavaScript's own rule is an accident (`Number(null)` and `Number("")` are 0) the value is
no number here.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from math import isfinite, nan
from typing import Any, TypeGuard

from hybrid.contracts.stable_json import number_text

# White space and line ends of ECMAScript. str.strip() would also take U+001C to U+001F and U+0085.
WHITE_SPACE = (
    "\t\n\v\f\r \u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000\ufeff"
)

_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\Z", re.ASCII)
_PREFIXED = re.compile(r"0(?:[xX][0-9a-fA-F]+|[oO][0-7]+|[bB][01]+)\Z", re.ASCII)
_DATE = re.compile(
    r"([0-9]{4})(?:-([0-9]{2})(?:-([0-9]{2}))?)?"
    r"(?:T([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:\.([0-9]{1,9}))?)?(Z|[+-][0-9]{2}:[0-9]{2})?)?\Z",
    re.ASCII,
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether JSON would call the value a number (True and False are not)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_finite_number(value: Any) -> TypeGuard[int | float]:
    """A number that is neither NaN nor infinite as float64."""
    try:
        return is_number(value) and isfinite(value)
    except OverflowError:  # an int beyond float64
        return False


def is_integer(value: Any) -> TypeGuard[int | float]:
    """A whole number, however it is written: 3 and 3.0."""
    return is_finite_number(value) and value == int(value)


def to_number(value: Any) -> float:
    """The number that a number or its text stands for; NaN for anything else: None, blank text, booleans, junk."""
    if is_number(value):
        return float(value) if is_finite_number(value) else nan
    if not isinstance(value, str):
        return nan
    text = value.strip(WHITE_SPACE)
    if _PREFIXED.match(text):
        return float(int(text, 0))
    return float(text) if _DECIMAL.match(text) else nan


def optional_text(value: Any) -> str | None:
    """Trimmed text, or the text of a number; None for blank text and anything else."""
    if is_finite_number(value):
        return number_text(float(value))
    if not isinstance(value, str):
        return None
    return value.strip(WHITE_SPACE) or None


def iso_time(milliseconds: float) -> str | None:
    """`2026-01-02T03:04:05.678Z` for milliseconds since 1970 (fractions cut off); None outside the years 1 to 9999."""
    try:
        moment = _EPOCH + timedelta(milliseconds=int(milliseconds))
    except (OverflowError, ValueError):
        return None
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z".rjust(24, "0")


def parse_time(value: Any) -> str | None:
    """The ISO time of epoch milliseconds (a number or its text) or of a date in ECMAScript's format; None for others.

    A time of day without a zone is read as UTC, so that the result does not depend on the machine.
    """
    milliseconds = to_number(value)
    if isfinite(milliseconds):
        return iso_time(milliseconds)
    match = _DATE.match(value.strip(WHITE_SPACE)) if isinstance(value, str) else None
    if not match:
        return None
    year, month, day, hour, minute, second, fraction, zone = match.groups()
    try:
        moment = datetime(int(year), int(month or 1), int(day or 1), tzinfo=UTC)
    except ValueError:
        return None
    clock = timedelta(hours=int(hour or 0), minutes=int(minute or 0), seconds=int(second or 0))
    if int(minute or 0) > 59 or int(second or 0) > 59 or clock > timedelta(days=1):
        return None
    if zone and zone != "Z":
        offset = timedelta(hours=int(zone[1:3]), minutes=int(zone[4:6]))
        clock += -offset if zone[0] == "+" else offset
    clock += timedelta(milliseconds=int(f"{fraction or '0':0<3}"[:3]))
    return iso_time((moment - _EPOCH + clock) / timedelta(milliseconds=1))
