"""Dropout draws exactly the mask that every other runtime draws."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid.plan.kernels import elementwise
from hybrid.random.philox import philox4x32
from hybrid.random.streams import stream_key
from kernels.harness import assert_close, run, stored

pytestmark = pytest.mark.webgpu
SITES = ["dropout/embed", "dropout/layers.0.attention", "dropout/layers.0.mlp"]
SEED = 0x1234_5678_9ABC


def _mask(sample_ids, elements, step, site, rate):
    """The keep rule, word by word, from the pure Python generator."""
    key = stream_key(SEED, SITES[site])
    keep = np.zeros((len(sample_ids), elements), bool)
    for row, sample in enumerate(sample_ids):
        for e in range(elements):
            keep[row, e] = philox4x32((e >> 2, sample, step, 0), key)[e & 3] >= int(rate * 2**32)
    return keep


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("elements", [1, 36, 261])
def test_the_mask_is_exact(elements, rate, precision):
    sample_ids, step, site = [0, 7, 4_000_000_000], 123_456, 1
    x = stored(np.random.default_rng(3).normal(size=(3, elements)) + 3, precision)
    keys = np.array([stream_key(SEED, name) for name in SITES], np.uint32)
    launch = elementwise.dropout(3, elements, site=site, rate=rate, precision=precision)
    (y,) = run(launch, [x, sample_ids, [step], keys, np.zeros_like(x)], precision)
    keep = _mask(sample_ids, elements, step, site, rate)
    assert np.array_equal(y != 0, keep)
    assert_close(y, np.where(keep, x / (1 - rate), 0), precision)


def test_step_sample_and_site_each_change_the_mask():
    def kept(sample=0, step=1, site=0):
        keys = np.array([stream_key(SEED, name) for name in SITES], np.uint32)
        launch = elementwise.dropout(1, 400, site=site, rate=0.5, precision="f32")
        return run(launch, [np.ones((1, 400)), [sample], [step], keys, np.zeros((1, 400))])[0] != 0

    base = kept()
    assert np.array_equal(base, kept())
    for other in (kept(sample=1), kept(step=2), kept(site=1)):
        assert 100 < np.sum(base != other) < 300
