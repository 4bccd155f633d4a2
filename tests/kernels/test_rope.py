"""Rotary embeddings against complex rotation in float64."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid.plan.kernels import rope
from kernels.harness import assert_close, run, stored

pytestmark = pytest.mark.webgpu


def _table(positions: int, width: int) -> np.ndarray:
    angle = np.arange(positions)[:, None] * 10_000.0 ** (-np.arange(width // 2) * 2 / width)
    return np.concatenate([np.cos(angle), np.sin(angle)], 1).astype(np.float32)


@pytest.mark.parametrize("shape", [(1, 1, 8), (33, 3, 36), (66, 2, 32), (7, 5, 6)])
def test_pairs_turn_by_their_position_and_back(shape, precision):
    rows, heads, width = shape
    rng = np.random.default_rng(width)
    x = stored(rng.normal(size=shape), precision)
    positions, table = rng.integers(0, 40, rows), _table(40, width)
    c, s = np.split(table.astype(np.float64)[positions][:, None, :], 2, -1)
    turned = (x[..., : width // 2] + 1j * x[..., width // 2 :]) * (c + 1j * s)
    launch = rope.rope(rows, heads, width, precision=precision)
    (y,) = run(launch, [x, positions, table, np.zeros(shape)], precision)
    assert_close(y, np.concatenate([turned.real, turned.imag], -1), precision)
    back = rope.rope(rows, heads, width, precision=precision, inverse=True)
    assert_close(run(back, [y, positions, table, np.zeros(shape)], precision)[0], x, precision)


def test_an_odd_head_width_is_refused():
    with pytest.raises(ValueError, match="head width 7 is odd"):
        rope.rope(4, 1, 7, precision="f32")
