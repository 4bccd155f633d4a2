"""The parity contract for the torch backend, against float64 and the reference backend; and a run that is handed from
one backend to the next."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid.backends.protocol import SessionState, StepResult, TrainingSession
from hybrid.training.parity import checks
from hybrid.training.parity.contract import CONTRACT, SHORT_STEPS
from hybrid.training.parity.mutants import MUTANTS, check_mutants
from hybrid.training.parity.runtimes import SessionRuntime, Trace, float64, open_runtimes, session_arguments, torch
from hybrid.training.parity.workload import MODELS, Workload
from parity.legs import assert_relay_equals, relay_over_ranks
from parity.test_webgpu import assert_all_pass
from parity.traces import trace, traces
from torch_backend.jobs import job, run_jobs
from training.micro import entries, run

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def backend() -> SessionRuntime:
    return torch()


def workload(model: str, **changes: Any) -> Workload:
    return replace(Workload(model, MODELS[model], SHORT_STEPS), **changes)


@pytest.mark.parametrize("model", MODELS)
def test_f32_training_keeps_the_contract(backend: SessionRuntime, model: str) -> None:
    """All rows of the f32 part: weights, bookkeeping, losses, bitwise repetition and resume, splits, updates."""
    work = workload(model)
    ours = backend.train(work)
    compared = traces(work, "float64", "reference") | {"torch": ours}
    rows = [*checks.compare_starts(work, compared), *checks.compare_bookkeeping(work, compared)]
    rows += checks.compare_losses(work, compared, "loss")
    rows += checks.check_repeatable(work, backend, ours)
    rows.append(checks.check_splits(work, backend))
    long = replace(work, steps=checks.LONG_STEPS)
    rows += checks.compare_updates(long, traces(long, "float64") | {"torch": backend.train(long)})
    assert {row.check for row in rows} == {
        *("initial_weights", "bookkeeping", "repeat", "resume", "loss", "gradients", "update", "update_worst")
    }
    assert_all_pass(rows)


@pytest.mark.parametrize("model", MODELS)
def test_f16_training_stays_near_f32_and_skips_an_overflowed_step(backend: SessionRuntime, model: str) -> None:
    """Against the reference in f16 as well: ten steps, and ten with an overflow in them."""
    work = workload(model)
    f16 = replace(work, precision="mixed-f16")
    rows = list(checks.check_mixed(f16, [backend], traces(work, "float64") | {"torch": backend.train(work)}))
    for mixed in (f16, replace(f16, overflow_step=checks.OVERFLOW_STEP)):
        compared = traces(mixed, "reference") | {"torch": backend.train(mixed)}
        rows += [*checks.compare_losses(mixed, compared, "mixed_pair"), *checks.compare_bookkeeping(mixed, compared)]
    assert {row.check for row in rows} == {
        *("mixed_first", "mixed_tenth", "mixed_pair", "bookkeeping", "skip", "repeat", "resume")
    }
    assert_all_pass(rows)


@pytest.mark.parametrize("model", MODELS)
def test_bf16_training_stays_near_f32(backend: SessionRuntime, model: str) -> None:
    ours, f32 = backend.train(workload(model, precision="mixed-bf16")), trace("float64", workload(model))
    for check, step in (("mixed_first", 1), ("mixed_tenth", SHORT_STEPS)):
        assert checks.relative(ours.losses[step - 1], f32.losses[step - 1]) <= CONTRACT[check].limit


def test_every_mutant_is_noticed(backend: SessionRuntime) -> None:
    verdicts = check_mutants(float64(), [backend], models=["llama"])
    assert len(verdicts) == len(MUTANTS)
    assert not [verdict.mutant for verdict in verdicts if verdict.survived]


def test_the_command_knows_the_backend() -> None:
    assert [runtime.name for runtime in open_runtimes(["reference", "torch"])[0]] == ["float64", "reference", "torch"]


# --- one run over several backends --------------------------------------------------------------------------------


def relay(work: Workload, legs: list[tuple[str, int]]) -> Trace:
    """Train by turns: each leg is a backend and how many steps it takes."""
    results: list[StepResult] = []
    state: SessionState | None = None
    initial: SessionState | None = None
    step = 0
    for name, count in legs:
        session = open_session(name, work)
        if state is not None:
            session.import_state(state)
        initial = initial or session.export_state()
        for _ in range(count):
            step += 1
            session.begin(work.info(step))
            for batch in work.microbatches(step):
                session.accumulate(batch)
            session.apply()
        results += session.poll_metrics(wait=True)
        state = session.export_state()
        session.close()
    assert state is not None and initial is not None
    return Trace(initial, results, state)


def open_session(name: str, work: Workload) -> TrainingSession:
    if name == "torch":
        from hybrid.backends.torch.session import TorchSession

        return TorchSession(work.model, **session_arguments(work))
    if name == "webgpu":
        from hybrid.backends.webgpu.session import WebGPUSession

        return WebGPUSession(work.model, **session_arguments(work))
    from hybrid.backends.reference.session import ReferenceSession

    return ReferenceSession(work.model, **session_arguments(work))


@pytest.mark.parametrize("precision", ["f32", "mixed-f16"])
@pytest.mark.parametrize("model", ["gpt2", "looped"])
def test_a_relay_over_reference_and_torch_equals_the_straight_run(model: str, precision: str) -> None:
    work = workload(model, precision=precision)
    handed = relay(work, [("reference", 3), ("torch", 4), ("reference", 3)])
    compared = {"relay": handed, "reference": trace("reference", work)}
    rows = [*checks.compare_losses(work, compared, "loss" if precision == "f32" else "mixed_pair")]
    rows += checks.compare_bookkeeping(work, compared)
    assert_all_pass(rows)


@pytest.mark.webgpu
def test_a_relay_over_reference_torch_and_webgpu_equals_the_straight_run() -> None:
    work = workload("llama")
    handed = relay(work, [("reference", 3), ("torch", 3), ("webgpu", 2), ("torch", 2)])
    compared = {"relay": handed} | traces(work, "float64", "reference")
    rows = [*checks.compare_losses(work, compared, "loss"), *checks.compare_bookkeeping(work, compared)]
    assert_all_pass(rows)


@pytest.mark.webgpu
@pytest.mark.parametrize("model", ["llama", "looped"])
def test_a_relay_over_webgpu_and_torch_on_two_ranks_and_one_equals_the_straight_run(model: str, tmp_path: Path) -> None:
    work = workload(model)
    handed = relay_over_ranks(tmp_path, work, lambda: open_session("webgpu", work))
    straight = SessionRuntime("webgpu", lambda work: open_session("webgpu", work)).train(work)
    assert_relay_equals(work, handed, straight)


@pytest.mark.webgpu
def test_a_whole_run_goes_from_webgpu_over_two_ranks_and_one_back_to_webgpu(tmp_path: Path) -> None:
    """Through checkpoints on disk, with dropout; evaluated on the way."""
    settings = ("evaluation.every=4", "data.microbatchSize=1")
    run(tmp_path, "backend.name=webgpu", "run.steps=4", *settings, run="relay")
    outcome = run_jobs(tmp_path, job("train", 2, "relay", count=8))["relay"]
    assert outcome["codes"] == [0, 0], outcome["errors"]
    run(tmp_path, "backend.name=torch", "backend.device=cpu", "run.steps=12", *settings, run="relay")
    run(tmp_path, "backend.name=webgpu", "run.steps=16", *settings, run="relay")
    run(tmp_path, "backend.name=webgpu", "run.steps=16", *settings, run="straight")
    relayed, straight = (entries(tmp_path, name) for name in ("relay", "straight"))
    assert [row["kernel_path"].split("-")[0] for row in relayed] == ["wgsl"] * 4 + ["torch"] * 8 + ["wgsl"] * 4
    for ours, theirs in zip(relayed, straight, strict=True):
        assert ours["total_loss"] == pytest.approx(theirs["total_loss"], rel=CONTRACT["loss"].limit)
        for key in ("step", "epoch", "batch", "lr", "supervised_token_count", "optimizer_step"):
            assert ours[key] == theirs[key]
