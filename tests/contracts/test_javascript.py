"""Numbers, blank text and dates mean what they mean in a browser."""

from __future__ import annotations

from math import isnan

import pytest

from hybrid.contracts.javascript import is_finite_number, is_integer, iso_time, optional_text, parse_time, to_number


@pytest.mark.parametrize(
    ("text", "number"), [("42", 42), (" 1e3\n", 1000), (".5", 0.5), ("5.", 5), ("0x1F", 31), ("-2", -2)]
)
def test_text_that_spells_a_number(text, number):
    assert to_number(text) == number


@pytest.mark.parametrize(
    "value", [None, "", "  ", True, [], "1_000", "nan", "inf", "Infinity", "12px", "\x1c1", float("inf")]
)
def test_what_is_no_number(value):
    assert isnan(to_number(value))


def test_booleans_are_no_numbers_and_whole_floats_are_integers():
    assert is_integer(3.0)
    assert is_integer(10**30)
    assert not any(is_integer(value) for value in (True, 3.5, "3", None, float("nan"), 10**400))
    assert not any(is_finite_number(value) for value in (False, float("inf"), 10**400, "1"))


def test_blank_text_is_nothing_but_other_control_characters_are_text():
    assert optional_text(" \u00a0\ufeff\n") is None
    assert optional_text("\x1c") == "\x1c"
    assert (optional_text(7.5), optional_text(10.0), optional_text(True), optional_text(["a"])) == (
        "7.5",
        "10",
        None,
        None,
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "1970-01-01T00:00:00.000Z"),
        (-1, "1969-12-31T23:59:59.999Z"),
        (1767225600123.9, "2026-01-01T00:00:00.123Z"),
        ("2026-02", "2026-02-01T00:00:00.000Z"),
        ("2024-02-29T24:00", "2024-03-01T00:00:00.000Z"),
        ("2026-01-02T03:04:05.6789Z", "2026-01-02T03:04:05.678Z"),
        ("2026-01-02T03:04", "2026-01-02T03:04:00.000Z"),
        ("0999-01-01", "0999-01-01T00:00:00.000Z"),
        ("2026-02-30", None),
        ("2026-13", None),
        ("2026-01-02T24:01Z", None),
        ("2026-01-02T03:60Z", None),
        ("2 January 2026", None),
        (1e300, None),
        (None, None),
        ({}, None),
    ],
)
def test_times_become_iso_in_utc(value, expected):
    assert parse_time(value) == expected


def test_years_beyond_the_calendar_have_no_text():
    assert iso_time(1e15) is None
