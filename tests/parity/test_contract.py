"""The parity contract between the reference backend, its float64 form and the hand-written torch model, and what the
contract is measured on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hybrid.backends.protocol import SessionState
from hybrid.data.batch import IGNORE
from hybrid.training.parity import checks
from hybrid.training.parity.contract import CONTRACT, LONG_STEPS, SHORT_STEPS, Row
from hybrid.training.parity.mutants import MUTANTS, Mutant, check_mutants
from hybrid.training.parity.runtimes import float64, open_runtimes, reference
from hybrid.training.parity.workload import MODELS, OPTIMIZER, Workload, workloads
from parity.traces import trace, traces


def workload(name: str, steps: int = SHORT_STEPS, **changes: Any) -> Workload:
    return replace(Workload(name, MODELS[name], steps), **changes)


def failures(rows: Sequence[Row]) -> list[str]:
    return [
        f"{r.model}: {r.promise.what} ({', '.join(r.runtimes)}): {r.measured} > {r.promise.limit} {r.note}"
        for r in rows
        if not r.passed
    ]


@pytest.mark.parametrize("model", MODELS)
def test_f32_training_agrees_with_float64(model: str) -> None:
    """The whole f32 part of the contract, as `hybrid parity` runs it."""
    work = workload(model)
    rows = list(checks.check_f32(work, [float64(), reference()], traces(work, "float64", "reference")))
    assert {row.check for row in rows} == {
        *("initial_weights", "bookkeeping", "repeat", "resume", "loss", "gradients", "update", "update_worst")
    }
    assert not failures(rows), "\n".join(failures(rows))


@pytest.mark.torch
@pytest.mark.parametrize("model", MODELS)
def test_f32_training_agrees_with_torch(model: str) -> None:
    work, long = workload(model), workload(model, LONG_STEPS)
    rows = list(checks.compare_bookkeeping(work, short := traces(work, "reference", "torch")))
    rows += checks.compare_losses(work, short, "loss")
    rows += checks.compare_updates(long, traces(long, "float64", "torch"))
    assert not failures(rows), "\n".join(failures(rows))


@pytest.mark.torch
@pytest.mark.parametrize("model", MODELS)
def test_mixed_training_stays_near_f32_and_skips_an_overflowed_step(model: str) -> None:
    f32 = traces(workload(model), "float64", "reference", "torch")
    rows = list(checks.check_mixed(workload(model, precision="mixed-f16"), [reference()], f32))
    assert {row.check for row in rows} == {*("mixed_first", "mixed_tenth", "bookkeeping", "skip", "repeat", "resume")}
    assert not failures(rows), "\n".join(failures(rows))


@pytest.mark.torch
def test_torch_skips_the_same_step_with_the_same_scales() -> None:
    overflowing = workload("llama", precision="mixed-f16", overflow_step=checks.OVERFLOW_STEP)
    compared = traces(overflowing, "reference", "torch")
    rows = [*checks.compare_bookkeeping(overflowing, compared)]
    rows += checks.compare_losses(overflowing, compared, "mixed_pair")
    assert not failures(rows), "\n".join(failures(rows))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_is_noticed(mutant: Mutant) -> None:
    verdicts = check_mutants(float64(), [reference()], [mutant])
    assert [verdict.model for verdict in verdicts] == list(MODELS)
    assert not [verdict for verdict in verdicts if verdict.survived]


def test_a_session_without_a_mistake_survives_as_a_mutant() -> None:
    """The contract notices mistakes, not the planting of them."""
    verdicts = check_mutants(float64(), [reference()], [Mutant("nothing wrong")], models=["llama"])
    assert verdicts and all(verdict.survived for verdict in verdicts)


# --- what it is measured on ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_the_workload_is_not_a_toy(model: str) -> None:
    work = workload(model)
    assert work.model.dropout == 0.1 and work.model.layers == 2 and work.model.width == 64
    run = trace("reference", work)
    assert all(result.clip_factor < 1 for result in run.results)
    assert run.losses[-1] < run.losses[0]
    for step in range(1, SHORT_STEPS + 1):
        first, second = work.microbatches(step)
        assert first.target_tokens != second.target_tokens
        assert work.info(step).target_tokens == first.target_tokens + second.target_tokens


def test_every_batch_is_packed_padded_and_consistent() -> None:
    for work in workloads(1):
        for step in range(1, LONG_STEPS + 1):
            batches = work.microbatches(step)
            assert [b.sample_ids.tolist() for b in batches] == [[0, 1], [2, 3]]
            padded = packed = 0
            for batch in batches:
                same = batch.segment_ids[:, 1:] == batch.segment_ids[:, :-1]
                real = batch.segment_ids > 0
                goes_on = same & real[:, 1:]
                np.testing.assert_array_equal(batch.positions[:, 1:][goes_on], batch.positions[:, :-1][goes_on] + 1)
                restarts = ~same & real[:, 1:]
                assert not batch.positions[:, 1:][restarts].any()
                assert (batch.targets[~real] == IGNORE).all()
                within = goes_on & (batch.targets[:, :-1] != IGNORE)
                np.testing.assert_array_equal(batch.targets[:, :-1][within], batch.ids[:, 1:][within])
                padded += int((~real).any())
                packed += int(restarts.any())
            assert padded == 1 and packed == 2
        break


def test_the_seed_decides_the_batches() -> None:
    one, two = workload("gpt2"), workload("gpt2", seed=1)
    assert np.array_equal(one.microbatches(3)[0].ids, one.microbatches(3)[0].ids)
    assert not np.array_equal(one.microbatches(3)[0].ids, two.microbatches(3)[0].ids)
    assert not np.array_equal(one.microbatches(3)[0].ids, one.microbatches(4)[0].ids)


# --- the checks themselves ----------------------------------------------------------------------------------------


def test_the_tolerances_are_those_of_the_contract() -> None:
    assert {name: promise.limit for name, promise in CONTRACT.items()} == {
        "initial_weights": 0,
        "bookkeeping": 0,
        "repeat": 0,
        "resume": 0,
        "skip": 0,
        "loss": 1e-6,
        "update": 1e-6,
        "update_worst": 1e-6,
        "gradients": 1e-6,
        "mixed_first": 1e-3,
        "mixed_tenth": 5e-3,
        "mixed_pair": 1e-3,
    }


def test_one_minus_cosine_resolves_small_angles() -> None:
    a = np.array([1.0, 0.0])
    assert checks.one_minus_cosine(a, 3 * a) == 0
    assert checks.one_minus_cosine(a, np.array([1.0, 1e-6])) == pytest.approx(5e-13, rel=1e-6)
    assert checks.one_minus_cosine(a, -a) == pytest.approx(2)
    assert checks.one_minus_cosine(a, np.zeros(2)) == 1
    assert checks.one_minus_cosine(np.zeros(2), np.zeros(2)) == 0


def test_a_loss_that_is_no_number_fails() -> None:
    assert checks.relative(float("nan"), 1.0) == float("inf")
    assert checks.relative(1.0, float("inf")) == float("inf")
    assert checks.relative(1.1, 1.0) == pytest.approx(0.1)


def test_different_bytes_sees_one_flipped_bit_and_a_missing_tensor() -> None:
    def state(value: float, **more: np.ndarray) -> SessionState:
        return SessionState({"w": np.array([value, 2.0], np.float32), **more}, {}, 1)

    assert checks.different_bytes(state(1.0), state(1.0)) == 0
    assert checks.different_bytes(state(1.0), state(float(np.nextafter(np.float32(1), np.float32(2))))) == 1
    assert checks.different_bytes(state(1.0), state(1.0, extra=np.zeros(3, np.float32))) == 12
    assert checks.different_bytes(state(0.0), state(-0.0)) == 1


def test_only_the_bias_of_the_keys_has_no_gradient() -> None:
    final = trace("float64", workload("gpt2")).final
    assert checks.zero_gradient_tensors(final) == {f"model.layers.{i}.self_attn.k_proj.bias" for i in range(2)}
    for model in ("llama", "looped"):
        assert not checks.zero_gradient_tensors(trace("float64", workload(model)).final)


def test_the_expected_bookkeeping_is_that_of_the_loss_scaler() -> None:
    from hybrid.contracts.loss_scaler import DynamicLossScaler

    work = workload("llama", precision="mixed-f16", overflow_step=4)
    scaler = DynamicLossScaler(work.loss_scaling)
    for data_step, _, overflow, used, after, _ in checks.expected_bookkeeping(work):
        assert overflow == (data_step == 4)
        assert used == scaler.step_scale()
        scaler.update(overflow)
        assert after == scaler.step_scale()


def test_an_unknown_backend_is_refused() -> None:
    from hybrid.errors import ConfigError

    with pytest.raises(ConfigError, match="'cuda'"):
        open_runtimes(["reference", "cuda"])
    assert [r.name for r in open_runtimes(["reference"])[0]] == ["float64", "reference"]
    assert OPTIMIZER.weight_decay > 0
