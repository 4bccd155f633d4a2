"""Stable JSON is the same text everywhere."""

from __future__ import annotations

import json
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.vectors import load
from hybrid.contracts.stable_json import number_text, stable_hash, stable_json
from hybrid.errors import ConfigError

VECTORS = load("stable_json")


def test_every_case_gives_its_text_and_hash():
    cases = VECTORS["cases"]
    for case in cases:
        assert stable_json(case["input"]) == case["text"]
        assert stable_hash(case["input"]) == case["sha256"]
    assert len(cases) == 150


def test_the_key_that_runtimes_treat_differently_is_refused():
    assert len(VECTORS["quirk_cases"]) == 1
    with pytest.raises(ConfigError, match=r"\$ has a key '__proto__'"):
        stable_json(VECTORS["quirk_cases"][0]["input"])


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_round_trip(number):
    assert float(number_text(number)) == number


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1e21, "1e+21"),
        (123456789012345680000.0, "123456789012345680000"),
        (1e-6, "0.000001"),
        (1e-7, "1e-7"),
        (-0.0, "0"),
        (5e-324, "5e-324"),
        (-1.5e300, "-1.5e+300"),
        (0.1 + 0.2, "0.30000000000000004"),
        (100.0, "100"),
        (2**53 + 1, "9007199254740992"),
    ],
)
def test_numbers_are_written_as_javascript_does(number, text):
    assert number_text(number) == text


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
        max_leaves=20,
    )
)
def test_the_text_is_json_and_stable(value):
    text = stable_json(value)
    assert stable_json(json.loads(text)) == text
    assert stable_hash(value) == sha256(text.encode("utf-8")).hexdigest()


def test_the_order_of_members_and_the_kind_of_sequence_do_not_matter():
    assert stable_json({"b": (1, 2), "a": True}) == stable_json({"a": True, "b": [1.0, 2.0]}) == '{"a":true,"b":[1,2]}'


def test_surrogates_that_form_a_pair_are_one_character():
    assert stable_json("\ud83d" + "\ude00") == '"😀"'
    assert stable_json("\ude00\ud83d") == '"\\ude00\\ud83d"'
    with pytest.raises(ConfigError, match="same text in UTF-16"):
        stable_json({"😀": 1, "\ud83d" + "\ude00": 2})


def test_integers_beyond_float64_are_null_like_other_infinities():
    assert stable_json([10**400, float("inf"), float("nan")]) == "[null,null,null]"


def test_other_types_are_refused_with_their_path():
    with pytest.raises(TypeError, match=r"\$\.a\[1\] is a bytes"):
        stable_json({"a": [1, b""]})
    with pytest.raises(TypeError, match=r"\$\.a has the key 1"):
        stable_json({"a": {1: 2}})
