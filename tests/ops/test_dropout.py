"""Dropout masks are the documented function of seed, site, step, sample and element, and of nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid.backends.reference.executor import Executor
from hybrid.backends.reference.kernels import dropout
from hybrid.graph.autodiff import backward
from hybrid.graph.ir import ACT
from hybrid.graph.tracer import Tracer
from hybrid.ops import OpError

MASK = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """Philox 4x32-10 from its paper (Salmon et al. 2011), written here so as to share nothing with the package."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high1 ^ c[1] ^ k0, low1, high0 ^ c[3] ^ k1, low0]
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 3, 5), (1, 1, 1)])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.999])
def test_mask_is_the_documented_formula(shape: tuple[int, int, int], rate: float) -> None:
    samples, step, key = np.array([7, 3][: shape[0]], np.uint32), 12, (0x12345678, 0x9ABCDEF0)
    keys = np.array([[0, 0], key], np.uint32)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    got = dropout(x, samples, np.array([step], np.uint32), keys, site=1, rate=rate)
    for b, t, c in np.ndindex(shape):
        element = t * shape[2] + c
        word = philox((element >> 2, int(samples[b]), step, 0), key)[element & 3]
        kept = word >= int(rate * 2**32)
        assert got[b, t, c] == (x[b, t, c] * np.float32(1 / (1 - rate)) if kept else 0.0)


def test_share_of_dropped_elements_is_the_rate() -> None:
    x = np.ones((4, 64, 64), np.float32)
    got = dropout(x, np.arange(4, dtype=np.uint32), np.ones(1, np.uint32), np.ones((1, 2), np.uint32), site=0, rate=0.3)
    assert abs(np.mean(got == 0.0) - 0.3) < 0.01
    assert abs(got.mean() - 1.0) < 0.02


def test_splitting_a_batch_changes_no_mask() -> None:
    x = np.ones((4, 8, 4), np.float32)
    samples = np.array([5, 0, 2, 9], np.uint32)
    step, keys = np.array([3], np.uint32), np.array([[1, 2]], np.uint32)
    whole = dropout(x, samples, step, keys, site=0, rate=0.5)
    parts = [dropout(x[i : i + 1], samples[i : i + 1], step, keys, site=0, rate=0.5) for i in range(4)]
    np.testing.assert_array_equal(whole, np.concatenate(parts))


def test_gradient_passes_through_the_same_mask() -> None:
    tracer = Tracer()
    x = tracer.input("x", (2, 3, 4), ACT)
    y = tracer.dropout(x, "here", 0.4)
    up = tracer.input("up", y.shape, ACT)
    (dx,) = backward(tracer.graph, {y: up}, wrt=[x]).values()
    tracer.graph.outputs.update(y=y, dx=dx)
    draw = np.random.default_rng(1).standard_normal
    values = {"x": draw(x.shape), "up": draw(x.shape)}
    keys = {"sample_ids": np.arange(2), "data_step": np.array([1]), "dropout_keys": np.array([[4, 5]])}
    out = Executor(tracer.graph, "f64").run({**values, **keys}, {}).outputs
    factor = out["y"] / values["x"]
    assert set(np.unique(factor).round(6)) == {0.0, round(float(np.float32(1 / 0.6)), 6)}
    np.testing.assert_allclose(out["dx"], values["up"] * factor, rtol=1e-12)


def test_outside_training_and_at_rate_zero_it_is_the_identity() -> None:
    for tracer, rate in ((Tracer(training=False), 0.5), (Tracer(), 0.0)):
        x = tracer.input("x", (2, 3, 4), ACT)
        assert tracer.dropout(x, "here", rate) is x
        assert set(tracer.graph.inputs) == {"x"}


def test_a_site_used_twice_is_refused() -> None:
    tracer = Tracer()
    x = tracer.input("x", (2, 3, 4), ACT)
    tracer.dropout(x, "here", 0.5)
    with pytest.raises(OpError, match="'here' is used twice"):
        tracer.dropout(x, "here", 0.5)
