"""Random JSON values, texts and numbers that are likely to be treated differently by two languages."""

from __future__ import annotations

import struct
from math import isfinite
from random import Random
from typing import Any

INFINITE = 10**400  # to JSON.parse it is infinity

# Digits, letters, quotes, escapes, white space of both kinds, characters in and beyond the BMP, half a surrogate pair.
CHARACTERS = "0179azAZ_-. '\"\\/\t\n\x00\x1c\x7f\x85\u00a0éßñ\u2028\ue000中😀\ufeff"
LONE = "\ud83d"
NUMBERS = (0, 1, -1, 2, 3, 10, 100, 0.5, -0.5, 1.5, 1e-7, 1e21, 123456789, 2**53 - 1, -(2**31), 0.1)
TEXTS = (
    *("", " ", "\u00a0", "\x1c", "0", "1", "42", " 7 ", "-3", "1e3", ".5", "5.", "+1", "0x1F", "0b101", "0o17"),
    *("1_000", "nan", "Infinity", "x", "true", "null", "12px", "2026-01-02", "2026-02-30", "2024-02-29T24:00"),
    *("2026-01-02T03:04:05.678901Z", "2026-01-02T03:04+02:30", "2026-13", "0000-01-01", "9999-12-31T23:59-10:00"),
    *("1767225600123", "1767225600123.9", "-1", "2026", "2026T01:02", "2 January 2026"),
)


def text(draw: Random, longest: int = 8, lone: bool = True) -> str:
    """Any text; with `lone`, now and then one with half of a surrogate pair."""
    letters = [draw.choice(CHARACTERS) for _ in range(draw.randrange(longest + 1))]
    if lone and letters and draw.random() < 0.1:
        letters[draw.randrange(len(letters))] = LONE
    return "".join(letters)


def number(draw: Random) -> int | float:
    """Small integers, numbers at the edges of notation, doubles of random bits, and integers beyond 2^53."""
    kind = draw.randrange(5)
    if kind == 0:
        return draw.randrange(-1000, 1000)
    if kind == 1:
        return draw.choice(NUMBERS)
    if kind == 2:
        value: float = struct.unpack("<d", draw.randbytes(8))[0]
        return value if isfinite(value) else 0.0
    if kind == 3:
        return draw.uniform(-1, 1) * 10 ** draw.randrange(-9, 23)
    return draw.choice((2**53 + 1, 2**63, 2**64 - 1, 10**21, -(10**30), INFINITE))


def plain_number(draw: Random) -> int | float:
    """A number that both languages write alike in messages: 1 and 1.0 are not, and integers have at most 15 digits."""
    value = draw.choice((draw.randrange(-(10**15), 10**15), draw.uniform(-3, 3), draw.uniform(-1, 1) * 1e-5))
    return value if value != int(value) else int(value)


def scalar(draw: Random) -> Any:
    return draw.choice((None, True, False, number(draw), number(draw), text(draw), draw.choice(TEXTS)))


def junk(draw: Random) -> Any:
    """A small value of any type, whose repr is the same in both languages."""
    return draw.choice(
        (
            *(None, True, False, 0, 1, -1, 2, 7, 2.5, -0.25, 1e-5, "", " ", "x", "it's", 'say "no"'),
            *(
                [],
                [1],
                ["a", None],
                {},
                {"a": 1},
                {"b": [True]},
                text(draw, lone=False),
                draw.choice(TEXTS),
                draw.randrange(10**9),
            ),
        )
    )


def value(draw: Random, depth: int = 4, keys: str | None = None) -> Any:
    """A nested JSON value; its objects have keys of `keys`, or any."""
    kind = draw.randrange(6) if depth else 0
    if kind < 3:
        return scalar(draw)
    count = draw.randrange(5)
    if kind == 3:
        return [value(draw, depth - 1, keys) for _ in range(count)]
    return {key(draw, keys): value(draw, depth - 1, keys) for _ in range(count)}


def key(draw: Random, keys: str | None) -> str:
    if keys is not None:
        return draw.choice(keys)
    return draw.choice((text(draw), str(draw.randrange(30)), str(2**32 - draw.randrange(4)), f"0{draw.randrange(9)}"))


def settings(draw: Random, names: Any, make: Any = junk, share: float = 0.5) -> dict[str, Any]:
    """Some of the names, each with a value of `make`."""
    return {name: make(draw) for name in names if draw.random() < share}
