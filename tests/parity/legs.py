"""Runs that are handed from one session to the next, in this process or over the disk to others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hybrid.backends.protocol import SessionState, StepResult, TrainingSession
from hybrid.training.parity import checks
from hybrid.training.parity.runtimes import Trace
from hybrid.training.parity.workload import Workload
from parity.traces import assert_all_pass, traces
from torch_backend.jobs import job, run_jobs


def train_steps(session: TrainingSession, work: Workload, first: int, count: int) -> list[StepResult]:
    """`count` steps of a workload, from step `first`."""
    for step in range(first, first + count):
        session.begin(work.info(step))
        for batch in work.microbatches(step):
            session.accumulate(batch)
        session.apply()
    return session.poll_metrics(wait=True)


def save_state(path: Path, state: SessionState, results: list[StepResult]) -> None:
    facts = {"step": state.optimizer_step, "scaler": state.scaler, "results": [vars(result) for result in results]}
    np.savez(path, facts=json.dumps(facts), **state.model, **state.optimizer)


def load_state(path: Path) -> SessionState:
    with np.load(path) as file:
        facts = json.loads(str(file["facts"]))
        tensors = {name: file[name] for name in file.files if name != "facts"}
    moments = {name for name in tensors if name.startswith(("moment1/", "moment2/"))}
    model = {name: tensor for name, tensor in tensors.items() if name not in moments}
    return SessionState(model, {name: tensors[name] for name in moments}, facts["step"], facts["scaler"])


def load_results(path: Path) -> list[StepResult]:
    with np.load(path) as file:
        return [StepResult(**result) for result in json.loads(str(file["facts"]))["results"]]


def relay_over_ranks(folder: Path, work: Workload, make: Callable[[], TrainingSession]) -> Trace:
    """Ten steps: three in a session, three in torch on two ranks, two in torch on one, two in a session again. make:
    those at both ends."""
    session = make()
    initial = session.export_state()
    results = train_steps(session, work, 1, 3)
    state = session.export_state()
    session.close()
    for size, first, count in ((2, 4, 3), (1, 7, 2)):
        name = f"leg{first}"
        save_state(folder / f"{name}.npz", state, [])
        outcome = run_jobs(folder, job("leg", size, name, model=work.name, first=first, count=count))[name]
        assert outcome["codes"] == [0] * size, outcome["errors"]
        done = folder / f"{name}.done.npz"
        state, results = load_state(done), results + load_results(done)
    session = make()
    session.import_state(state)
    results += train_steps(session, work, 9, 2)
    final = session.export_state()
    session.close()
    return Trace(initial, results, final)


def assert_relay_equals(work: Workload, handed: Trace, straight: Trace) -> None:
    """...the run that never changed hands, float64 and the reference backend, within the contract."""
    compared = {"relay": handed, "straight": straight} | traces(work, "float64", "reference")
    rows = [*checks.compare_losses(work, compared, "loss"), *checks.compare_bookkeeping(work, compared)]
    assert_all_pass(rows)
