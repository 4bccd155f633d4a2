"""Initial weights are normal enough, and identical wherever they are made."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid.random import initial, initial_numpy


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (2, 3, 4), (0,)])
@pytest.mark.parametrize("std", [0.02, 1.0, 3e-5])
def test_twins_make_identical_bits(shape, std):
    count = int(np.prod(shape))
    plain = np.frombuffer(initial.normal(11, "model.norm.weight", count, std), dtype=np.float32)
    vectorised = initial_numpy.normal(11, "model.norm.weight", shape, std)
    assert vectorised.dtype == np.float32
    assert vectorised.shape == shape
    assert plain.tobytes() == vectorised.tobytes()


def test_chunks_of_the_vectorised_twin_do_not_show():
    whole = initial_numpy.normal(3, "w", (2 * initial_numpy.CHUNK + 5,), 0.02)
    assert whole[:100].tobytes() == initial.normal(3, "w", 100, 0.02).tobytes()
    part = initial_numpy.normal(3, "w", (initial_numpy.CHUNK + 1,), 0.02)
    assert part.tobytes() == whole[: len(part)].tobytes()


def test_mean_deviation_and_tails_are_those_of_a_normal_distribution():
    values = initial_numpy.normal(1337, "model.embed_tokens.weight", (400_000,), 0.02).astype(np.float64) / 0.02
    count = len(values)
    assert abs(values.mean()) < 4 / np.sqrt(count)
    assert abs(values.std() - 1) < 4 / np.sqrt(2 * count)
    assert abs((values**3).mean()) < 0.02  # skewness 0
    assert abs((values**4).mean() - (3 - 0.15)) < 0.05  # the sum of eight uniforms has excess kurtosis -1.2/8
    for limit, share in ((1.0, 0.3173), (2.0, 0.0455)):
        assert abs((np.abs(values) > limit).mean() - share) < 0.01
    assert np.abs(values).max() <= 4.9


def test_each_tensor_and_each_seed_has_values_of_its_own():
    tensors = [initial_numpy.normal(1, "a", (1000,), 1.0), initial_numpy.normal(1, "b", (1000,), 1.0)]
    tensors.append(initial_numpy.normal(2, "a", (1000,), 1.0))
    correlation = np.corrcoef(tensors)
    assert np.abs(correlation - np.eye(3)).max() < 0.13


def test_a_deviation_of_zero_gives_zeros():
    assert initial.normal(1, "a", 4, 0.0).tolist() == [0, 0, 0, 0]
