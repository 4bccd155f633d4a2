"""Settings and steps for the tests of every backend's session, and the reference session that they compare with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from hybrid.backends.protocol import SessionState, StepInfo, StepResult, TrainingSession
from hybrid.backends.reference.session import ReferenceSession
from hybrid.data.batch import IGNORE, Batch
from hybrid.models.config import ModelConfig
from hybrid.optim.settings import OptimizerSettings
from models.small import LLAMA, random_batch

ADAMW = OptimizerSettings(type="adamw", lr=3e-3, beta2=0.95, weight_decay=0.1)
SEED = 11


def arguments(b: int, t: int, settings: dict[str, Any]) -> dict[str, Any]:
    """A session's, with defaults where `settings` has none."""
    common = {"optimizer": ADAMW, "max_grad_norm": 1.0, "seed": SEED}
    return {**common, "batch_size": b, "sequence_length": t, **settings}


def reference(cfg: ModelConfig = LLAMA, b: int = 3, t: int = 16, **settings: Any) -> ReferenceSession:
    return ReferenceSession(cfg, **arguments(b, t, settings))


def step(it: TrainingSession, data_step: int, *batches: Batch, z_loss: float = 0.0) -> StepResult:
    it.begin(StepInfo(data_step, sum(b.target_tokens for b in batches), len(batches), z_loss))
    for batch in batches:
        it.accumulate(batch)
    it.apply()
    return it.poll_metrics(wait=True)[-1]


def parts(batch: Batch, size: int) -> list[Batch]:
    names = ("ids", "targets", "positions", "segment_ids", "sample_ids")
    return [
        Batch(*(getattr(batch, name)[start : start + size] for name in names))
        for start in range(0, len(batch.ids), size)
    ]


def steps_of(cfg: ModelConfig, count: int) -> list[list[Batch]]:
    """Two microbatches a step, with unequal numbers of targets and sample ids of one global batch."""
    steps = []
    for s in range(count):
        first, second = (random_batch(cfg, seed=100 * s + i) for i in range(2))
        targets = second.targets.copy()
        targets[:2] = IGNORE
        steps.append([first, replace(second, targets=targets, sample_ids=second.sample_ids + np.uint32(3))])
    return steps


def assert_states_equal(a: SessionState, b: SessionState) -> None:
    assert (a.optimizer_step, a.scaler) == (b.optimizer_step, b.scaler)
    for ours, theirs in ((a.model, b.model), (a.optimizer, b.optimizer)):
        assert ours.keys() == theirs.keys()
        for name, array in ours.items():
            np.testing.assert_array_equal(array, theirs[name], err_msg=name)
