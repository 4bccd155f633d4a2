"""The step's own kernels: opening a step, loss sums, gradient statistics, and closing it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hybrid.contracts.loss_scaler import DynamicLossScaler
from hybrid.plan.kernels import state
from kernels.harness import run

pytestmark = pytest.mark.webgpu
VECTORS = Path(__file__).parents[2] / "bridge/vectors/loss_scaling.json"
RING_ROWS = 8


def bits(value) -> int:
    return int(np.float32(value).view(np.uint32))


def number(word) -> np.float32:
    return np.uint32(word).view(np.float32)


def fresh_state(scaler: DynamicLossScaler | None = None, optimizer_step: int = 0):
    words = np.zeros(64, np.uint32)
    scaler = scaler or DynamicLossScaler()
    words[state.OPTIMIZER_STEP] = optimizer_step
    words[state.LOSS_SCALE] = bits(scaler.scale)
    words[state.SCALER_ENABLED] = scaler.enabled
    return words


def begin(words, data_step: int, targets: int, z_loss: float = 0.0, flags: int = 0):
    step_input = np.zeros(64, np.uint32)
    step_input[:4] = data_step, targets, bits(1 / targets), bits(z_loss)
    arrays = [step_input, words, [0.0], [0.0], np.array([flags, 0])]
    return run(state.step_begin(precision="f32"), arrays)


def finalize(words, gradients, *, flags=(0, 0), max_norm=0.0, scaler=None, ring=None):
    """Statistics of the gradients, then the end of the step. Returns the new state and the ring."""
    gradients = np.asarray(gradients, np.float32)
    records = state.partials_of(gradients.size)
    partials = np.zeros((records, state.PARTIAL_WORDS), np.uint32)
    (partials,) = run(state.grad_stats(gradients.size, partial_offset=0, precision="f32"), [gradients, partials])
    ring = np.zeros((RING_ROWS, state.RING_WORDS), np.uint32) if ring is None else ring
    launch = state.step_finalize(
        records,
        ring_rows=RING_ROWS,
        max_norm=max_norm,
        scaler=scaler or DynamicLossScaler(),
        precision="f32",
    )
    return run(launch, [partials, words, flags, ring])


def test_a_step_opens_with_clean_accumulators_and_the_scaled_seed():
    scaler = DynamicLossScaler({"enabled": True, "initialScale": 4096})
    words = fresh_state(scaler, optimizer_step=6)
    words[[state.SKIP, state.LOSS_ACC, state.NLL_ACC]] = 1, bits(3), bits(4)
    words, seed, z_loss, flags = begin(words, data_step=9, targets=37, z_loss=1e-4, flags=1)
    assert words[[state.SKIP, state.LOSS_ACC, state.NLL_ACC]].tolist() == [0, 0, 0]
    assert words[[state.DATA_STEP, state.TARGET_TOKENS, state.OPTIMIZER_STEP]].tolist() == [9, 37, 6]
    assert number(words[state.LOSS_SCALE_USED]) == 4096
    assert seed[0] == np.float32(4096) * np.float32(1 / 37)
    assert z_loss[0] == np.float32(1e-4)
    assert flags[0] == 0


def test_the_seed_is_not_scaled_when_the_scaler_is_disabled():
    words, seed, _, _ = begin(fresh_state(), data_step=1, targets=64)
    assert number(words[state.LOSS_SCALE_USED]) == 1
    assert seed[0] == 1 / 64


@pytest.mark.parametrize("rows", [1, 63, 64, 1000])
def test_row_losses_add_up_over_microbatches(rows):
    rng = np.random.default_rng(rows)
    words = fresh_state()
    total = np.zeros(2)
    for _ in range(3):
        loss_rows, nll_rows = rng.uniform(0, 5, (2, rows)).astype(np.float32)
        (words,) = run(state.loss_accumulate(rows, precision="f32"), [loss_rows, nll_rows, words])
        total += loss_rows.sum(dtype=np.float64), nll_rows.sum(dtype=np.float64)
    got = [number(words[state.LOSS_ACC]), number(words[state.NLL_ACC])]
    np.testing.assert_allclose(got, total, rtol=1e-6)


@pytest.mark.parametrize("size", [4, 16_384, 16_388, 50_000])
def test_gradient_statistics_are_exact_counts_and_a_tree_sum(size):
    gradients = np.random.default_rng(size).normal(size=size).astype(np.float32)
    records = state.partials_of(size)
    partials = np.full((records + 3, 4), 7, np.uint32)
    (got,) = run(state.grad_stats(size, partial_offset=2, precision="f32"), [gradients, partials])
    assert np.all(got[:2] == 7)
    assert np.all(got[2 + records :] == 7)
    squares = got[2 : 2 + records, 0].view(np.float32).sum(dtype=np.float64)
    np.testing.assert_allclose(squares, np.square(gradients, dtype=np.float64).sum(), rtol=1e-6)
    assert np.all(got[2 : 2 + records, 1:3] == 0)
    gradients[[0, size // 2, size - 1]] = np.nan, -np.inf, np.inf
    gradients[1] = np.float32(3e38)  # finite, whatever its square
    (got,) = run(state.grad_stats(size, partial_offset=0, precision="f32"), [gradients, partials])
    assert got[:records, 1:3].sum(0).tolist() == [1, 2]


def test_a_good_step_reports_what_happened_and_moves_the_optimizer_step():
    words, *_ = begin(fresh_state(optimizer_step=4), data_step=13, targets=20)
    words[[state.LOSS_ACC, state.NLL_ACC]] = bits(50), bits(40)
    words, ring = finalize(words, [3.0, 0, 4.0, 0])
    assert words[[state.OPTIMIZER_STEP, state.SKIP]].tolist() == [5, 0]
    assert number(words[state.GRAD_MULTIPLIER]) == 1
    row = ring[13 % RING_ROWS]
    assert row[[0, 3, 7, 8, 9, 10, 11]].tolist() == [13, 20, 0, 0, 0, 5, 0]
    assert [number(w) for w in row[[1, 2, 4, 5, 6, 12]]] == [2.5, 2, 5, 1, 1, 1]
    assert not np.delete(ring, 13 % RING_ROWS, 0).any()


def test_the_norm_is_of_unscaled_gradients_and_clipping_starts_above_the_limit():
    scaler = DynamicLossScaler({"enabled": True, "initialScale": 256})
    gradients = np.array([3.0, 0, 0, 4.0]) * 256
    for max_norm, factor in [(0.0, 1.0), (5.0, 1.0), (8.0, 1.0), (2.0, 2 / (5 + 1e-6))]:
        words, *_ = begin(fresh_state(scaler), data_step=1, targets=1)
        words, ring = finalize(words, gradients, max_norm=max_norm, scaler=scaler)
        assert number(ring[1, 4]) == 5
        np.testing.assert_allclose(number(ring[1, 5]), factor, rtol=3e-7)
        np.testing.assert_allclose(number(words[state.GRAD_MULTIPLIER]), factor / 256, rtol=3e-7)


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize(
    ("gradients", "flags", "counts"),
    [
        ([1.0, np.nan, np.nan, 2.0], (0, 0), [2, 0]),
        ([1.0, np.inf, -np.inf, np.nan], (0, 0), [1, 2]),
        ([1e38, 1e38, 1e38, 1e38], (0, 0), [0, 0]),  # finite, but their norm is not
        ([1.0, 0.0, 0.0, 0.0], (1, 0), [0, 0]),  # an activation or its gradient did not fit f16
        ([1.0, 0.0, 0.0, 0.0], (0, 1), [0, 0]),  # a weight did not fit f16
    ],
)
def test_what_is_not_finite_never_reaches_the_weights_scaler_on_or_off(gradients, flags, counts, enabled):
    scaler = DynamicLossScaler({"enabled": enabled, "initialScale": 64})
    words, *_ = begin(fresh_state(scaler, optimizer_step=3), data_step=2, targets=1)
    words, ring = finalize(words, gradients, flags=flags, max_norm=1.0, scaler=scaler)
    assert words[[state.SKIP, state.OPTIMIZER_STEP]].tolist() == [1, 3]
    row = ring[2]
    norm_broken = 0 if any(flags) else state.FLAG_NORM_NOT_FINITE
    assert row[7] == state.FLAG_OVERFLOW | norm_broken
    assert row[[8, 9, 10]].tolist() == [*counts, 3]
    assert number(row[5]) == 1
    assert number(row[6]) == (64 if enabled else 1)
    assert number(row[12]) == (32 if enabled else 1)
    assert number(words[state.LOSS_SCALE]) == (32 if enabled else 64)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_is_flagged_and_skips_the_update(bad):
    words, *_ = begin(fresh_state(), data_step=1, targets=1)
    words[state.LOSS_ACC] = bits(bad)
    words, ring = finalize(words, [1.0, 0, 0, 0])
    assert ring[1, 7] == state.FLAG_OVERFLOW | state.FLAG_LOSS_OVERFLOW
    assert words[state.SKIP] == 1


def _power_of_two(value: float) -> bool:
    return float(np.frexp(value)[0]) == 0.5


def _exact_cases():
    """The cases whose factors and bounds are powers of two: those the device promises to follow to the bit."""
    cases = []
    for case in json.loads(VECTORS.read_text())["cases"]:
        scaler = DynamicLossScaler(case["config"])
        numbers = (scaler.scale, scaler.min_scale, scaler.max_scale, scaler.scale_factor, scaler.backoff_factor)
        if all(map(_power_of_two, numbers)) and len(case["overflow"]) <= 100:
            cases.append(case)
    return cases


def test_the_exact_cases_are_most_of_the_vectors():
    assert len(_exact_cases()) == 15


@pytest.mark.parametrize("case", _exact_cases(), ids=lambda c: c["name"])
def test_the_loss_scale_follows_the_host_scaler_step_by_step(case):
    scaler = DynamicLossScaler(case["config"])
    words = fresh_state(scaler)
    updates = 0
    for step, (overflow, expected) in enumerate(zip(case["overflow"], case["steps"], strict=True), 1):
        words, *_ = begin(words, data_step=step, targets=1)
        assert number(words[state.LOSS_SCALE_USED]) == expected["used"]
        gradient = [np.nan if overflow else 1.0, 0, 0, 0]
        words, ring = finalize(words, gradient, scaler=scaler)
        updates += not overflow
        row = ring[step % RING_ROWS]
        assert number(words[state.LOSS_SCALE]) == expected["scale"]
        assert number(row[12]) == (expected["scale"] if scaler.enabled else 1)
        assert words[state.GROWTH_COUNTER] == row[11] == expected["growthCounter"]
        assert words[state.OPTIMIZER_STEP] == updates


def test_without_overflow_check_the_scale_stays_but_the_weights_are_protected():
    scaler = DynamicLossScaler({"enabled": True, "initialScale": 32, "overflowCheck": False, "growthInterval": 2})
    words, *_ = begin(fresh_state(scaler), data_step=1, targets=1)
    words, ring = finalize(words, [np.inf, 0, 0, 0], scaler=scaler)
    assert words[[state.SKIP, state.GROWTH_COUNTER]].tolist() == [1, 1]
    assert number(words[state.LOSS_SCALE]) == 32
    assert ring[1, 7] & state.FLAG_OVERFLOW


def test_the_ring_keeps_the_last_rows():
    words, ring = fresh_state(), None
    for step in range(1, 12):
        words, *_ = begin(words, data_step=step, targets=1)
        words, ring = finalize(words, [1.0, 0, 0, 0], ring=ring)
    assert sorted(ring[:, 0].tolist()) == list(range(4, 12))
