"""AdamW over flat ranges, against the formula in float64 and torch's own AdamW."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid.plan.kernels import optimizer, state
from kernels.harness import assert_close, run

pytestmark = pytest.mark.webgpu
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
RATES, DECAYS = (3e-3, 1e-3), (0.1, 0.0)


def _schedule(first: int, rows: int):
    """Header and rows [bc1, bc2, lr0, wd0, lr1, wd1] as the host writes them."""
    words = np.zeros(optimizer.SCHEDULE_HEADER + rows * 6, np.uint32)
    words[0] = first
    for i in range(rows):
        t = first + i
        row = [1 - BETA1**t, 1 - BETA2**t, RATES[0] / t, DECAYS[0], RATES[1] / t, DECAYS[1]]
        at = optimizer.SCHEDULE_HEADER + 6 * i
        words[at : at + 6] = np.array(row, np.float32).view(np.uint32)
    return words.view(np.float32)


def _state(step: int, multiplier: float = 1.0, skip: int = 0):
    words = np.zeros(64, np.uint32)
    words[state.OPTIMIZER_STEP] = step
    words[state.GRAD_MULTIPLIER] = np.float32(multiplier).view(np.uint32)
    words[state.SKIP] = skip
    return words


def _launch(size, group, precision="f32", half=False):
    return optimizer.adamw(
        size, group=group, groups=2, beta1=BETA1, beta2=BETA2, eps=EPS, precision=precision, half=half
    )


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("size", [4, 260, 5000])
def test_ten_steps_are_adamw_with_the_schedule_row_of_each_step(size, group):
    rng = np.random.default_rng(size)
    p = rng.normal(size=size).astype(np.float32)
    m, v = np.zeros((2, size), np.float32)
    expected = [a.astype(np.float64) for a in (p, m, v)]
    schedule = _schedule(1, 10)
    for t in range(1, 11):
        g = rng.normal(size=size).astype(np.float32) * 512
        ep, em, ev = expected
        scaled = g.astype(np.float64) * 0.5 / 256
        em = BETA1 * em + (1 - BETA1) * scaled
        ev = BETA2 * ev + (1 - BETA2) * scaled**2
        update = em / (1 - BETA1**t) / (np.sqrt(ev / (1 - BETA2**t)) + EPS) + DECAYS[group] * ep
        expected = [ep - RATES[group] / t * update, em, ev]
        p, m, v = run(_launch(size, group), [p, g, m, v, schedule, _state(t, 0.5 / 256)])
    for got, want in zip((p, m, v), expected, strict=True):
        assert_close(got, want)


@pytest.mark.torch
def test_torch_takes_the_same_steps():
    import torch

    rng = np.random.default_rng(1)
    p = rng.normal(size=64).astype(np.float32)
    m, v = np.zeros((2, 64), np.float32)
    leaf = torch.nn.Parameter(torch.tensor(p))
    theirs = torch.optim.AdamW([leaf], lr=1e-2, betas=(BETA1, BETA2), eps=EPS, weight_decay=0.1)
    for t in range(1, 6):
        g = rng.normal(size=64).astype(np.float32)
        leaf.grad = torch.tensor(g)
        theirs.step()
        words = np.zeros(optimizer.SCHEDULE_HEADER + 4, np.uint32)
        words[0] = t
        row = np.array([1 - BETA1**t, 1 - BETA2**t, 1e-2, 0.1], np.float32)
        words[optimizer.SCHEDULE_HEADER :] = row.view(np.uint32)
        launch = optimizer.adamw(64, group=0, groups=1, beta1=BETA1, beta2=BETA2, eps=EPS, precision="f32")
        p, m, v = run(launch, [p, g, m, v, words.view(np.float32), _state(t)])
        assert_close(p, leaf.detach().numpy())


def test_a_skipped_step_leaves_everything_as_it_was(precision):
    p, g, m, v = np.random.default_rng(2).uniform(1, 2, (4, 8)).astype(np.float32)
    g[0] = np.nan
    half = precision == "mixed-f16"
    arrays = [p, g, m, v, _schedule(1, 1), _state(0, 1.0, skip=1), *([np.full(8, 3.0)] if half else [])]
    outputs = run(_launch(8, 0, precision, half), arrays, precision)
    for got, before in zip(outputs, [p, m, v, np.full(8, 3.0)], strict=False):
        assert np.array_equal(got, before)


def test_f16_copies_are_the_nearest_f16_of_the_master_weights(f16_device):
    precision = "mixed-f16"
    p = np.array([1.0001, -2e-4, 70_000.0, -1e9, 65_504.0, 0, 0, 0], np.float32)
    nearest = np.clip(p, -65_504, 65_504).astype(np.float16)
    outputs = run(optimizer.to_half(8, precision=precision), [p, np.zeros(8)], precision)
    assert np.array_equal(outputs[0], nearest)
    assert outputs.weight_overflow
    assert not outputs.overflow
    assert not run(optimizer.to_half(8, precision=precision), [p / 2e4, np.zeros(8)], precision).weight_overflow
    zero = np.zeros(8)
    arrays = [p, zero, zero, zero, _schedule(1, 1), _state(1), zero]
    outputs = run(_launch(8, 1, precision, half=True), arrays, precision)
    assert np.array_equal(outputs[0], p)
    assert np.array_equal(outputs[3], nearest)
    assert outputs.weight_overflow
    assert not outputs.overflow
