"""Sum, mean and mean squared error of everything."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid.plan.kernels import reduce
from kernels.harness import assert_close, run, stored

pytestmark = pytest.mark.webgpu


@pytest.mark.parametrize("size", [1, 257, 70_000])
def test_sums_and_means_are_those_of_float64(size, precision):
    rng = np.random.default_rng(size)
    a, b = (stored(rng.normal(1, 1, size), precision) for _ in range(2))
    y = np.zeros(1)
    assert_close(run(reduce.sum_all(size, precision=precision), [a, y], precision)[0], [a.sum()])
    assert_close(run(reduce.mean_all(size, precision=precision, element="act"), [a, y], precision)[0], [a.mean()])
    assert_close(run(reduce.mse(size, precision=precision), [a, b, y], precision)[0], [((a - b) ** 2).mean()])
