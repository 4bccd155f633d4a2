"""The shuffle is a permutation for every size, the twins agree, and no arrangement is favoured."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.errors import DataContractError, LimitExceeded
from hybrid.random import shuffle, shuffle_numpy
from hybrid.random.streams import stream_key

SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 63, 64, 65, 100, 255, 256, 257, 1000, 1024, 1025, 4096, 5000]
KEY = st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))


@pytest.mark.parametrize("n", SIZES)
def test_every_position_appears_once(n):
    for epoch in range(3):
        images = shuffle_numpy.permute(np.arange(n), n, shuffle.epoch_key(5, epoch))
        assert sorted(images.tolist()) == list(range(n))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 700), key=KEY)
def test_any_size_and_key_gives_a_permutation_and_twins_agree(n, key):
    plain = [shuffle.permute(index, n, key) for index in range(n)]
    assert sorted(plain) == list(range(n))
    assert shuffle_numpy.permute(np.arange(n), n, key).tolist() == plain


@settings(max_examples=100, deadline=None)
@given(n=st.integers(1, 2**48), key=KEY, data=st.data())
def test_twins_agree_up_to_the_limit(n, key, data):
    indices = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5, unique=True))
    plain = [shuffle.permute(index, n, key) for index in indices]
    assert all(0 <= image < n for image in plain)
    assert len(set(plain)) == len(indices)
    assert shuffle_numpy.permute(np.array(indices), n, key).tolist() == plain


def test_the_shape_and_type_of_the_indices_are_free():
    key = (1, 2)
    expected = shuffle_numpy.permute(np.arange(12), 12, key).reshape(3, 4)
    images = shuffle_numpy.permute(np.arange(12, dtype=np.uint16).reshape(3, 4), 12, key)
    assert images.dtype == np.int64
    assert np.array_equal(images, expected)
    assert shuffle_numpy.permute(np.array([], dtype=np.int64), 12, key).shape == (0,)


@pytest.mark.parametrize("n", [3, 4, 5])
def test_small_sets_take_every_order_equally_often(n):
    orders = Counter(
        tuple(shuffle.permute(index, n, stream_key(99, f"shuffle/{epoch}")) for index in range(n))
        for epoch in range(6000)
    )
    arrangements = list(permutations(range(n)))
    expected = 6000 / len(arrangements)
    chi_square = sum((orders[order] - expected) ** 2 / expected for order in arrangements)
    freedom = len(arrangements) - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("n", [1000, 4096, 5000])
def test_positions_land_uniformly(n):
    """Where the first, a middle and the last position land over 2,000 epochs, in 20 bins: chi-square of a fixed
    seed.
    """
    for position in (0, n // 2, n - 1):
        images = np.array([shuffle.permute(position, n, shuffle.epoch_key(1337, epoch)) for epoch in range(2000)])
        observed = np.bincount(images * 20 // n, minlength=20)
        assert ((observed - 100) ** 2 / 100).sum() < 43.8  # 0.1 % quantile at 19 degrees of freedom


def test_neighbours_are_parted_and_epochs_are_unrelated():
    n = 10_000
    first, second = (shuffle_numpy.permute(np.arange(n), n, shuffle.epoch_key(7, epoch)) for epoch in (0, 1))
    for one, other in ((first[:-1], first[1:]), (first, second), (first, np.arange(n))):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.04
    assert (first == second).sum() < 10
    # Steps between neighbours, modulo n, are uniform too: a weak round function would favour some.
    steps = np.bincount((first[1:] - first[:-1]) % n * 20 // n, minlength=20)
    assert ((steps - (n - 1) / 20) ** 2 / ((n - 1) / 20)).sum() < 43.8


def test_global_samples_cross_epochs_without_repeating_or_missing_any():
    n, seed = 7, 3
    order = [shuffle.sample(seed, index, n) for index in range(3 * n)]
    for epoch in range(3):
        assert sorted(order[epoch * n : (epoch + 1) * n]) == list(range(n))
    assert shuffle.sample_position(20, n) == (2, 6)
    for first in range(3 * n):
        for count in (0, 1, 5, 3 * n - first):
            assert shuffle_numpy.samples(seed, first, min(count, 3 * n - first), n).tolist() == order[first:][:count]


def test_what_cannot_be_shuffled_is_refused_by_name():
    with pytest.raises(DataContractError, match=r"position 5 .* 5 samples .* expected 0\.\.4"):
        shuffle.permute(5, 5, (0, 0))
    with pytest.raises(DataContractError, match="position -1"):
        shuffle_numpy.permute(np.array([0, -1]), 5, (0, 0))
    with pytest.raises(DataContractError, match="cannot shuffle 0 samples"):
        shuffle.permute(0, 0, (0, 0))
    with pytest.raises(DataContractError, match="index -1 is negative"):
        shuffle.sample_position(-1, 5)
    with pytest.raises(LimitExceeded, match="2\\^48"):
        shuffle.permute(0, 2**48 + 1, (0, 0))
