"""Philox gives the published words, and its NumPy twin gives the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.vectors import load
from hybrid.random import philox, philox_numpy

CASES = load("philox")["cases"]
WORD = st.integers(0, 2**32 - 1)


def test_the_vectors_are_all_there():
    assert len(CASES) == 35


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_both_twins_give_the_words_of_the_vector(case):
    counter = tuple(int(word, 16) for word in case["ctr"])
    key = tuple(int(word, 16) for word in case["key"])
    expected = tuple(int(word, 16) for word in case["out"])
    assert philox.philox4x32(counter, key) == expected
    assert tuple(philox_numpy.philox4x32(np.array([counter], dtype=np.uint32), key)[0].tolist()) == expected


@given(counter=st.tuples(WORD, WORD, WORD, WORD), key=st.tuples(WORD, WORD))
def test_twins_agree_on_any_block(counter, key):
    vectorised = philox_numpy.philox4x32(np.array([counter], dtype=np.uint32), key)
    assert tuple(vectorised[0].tolist()) == philox.philox4x32(counter, key)


@pytest.mark.parametrize("count", [0, 1, philox_numpy.CHUNK - 1, philox_numpy.CHUNK, 2 * philox_numpy.CHUNK + 3])
def test_chunks_do_not_show(count):
    counters = np.zeros((count, 4), dtype=np.uint32)
    counters[:, 0] = np.arange(count)
    words = philox_numpy.philox4x32(counters, (7, 8))
    assert words.dtype == np.uint32
    assert words.shape == (count, 4)
    for row in {0, count // 2, count - 1} if count else ():
        assert tuple(words[row].tolist()) == philox.philox4x32((row, 0, 0, 0), (7, 8))


def test_counters_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"\(3,\).*expected \[M, 4\]"):
        philox_numpy.philox4x32(np.zeros(3, dtype=np.uint32), (0, 0))
