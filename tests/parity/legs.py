"""Runs that are handed from one session to the next, in this process or over the disk to another one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from hybrid.backends.protocol import SessionState, StepResult, TrainingSession
from hybrid.training.parity.workload import Workload


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
