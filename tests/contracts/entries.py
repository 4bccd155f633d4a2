"""Makes metrics entries for tests."""

from __future__ import annotations

from typing import Any

from hybrid.contracts.metrics import RunFacts, StepFacts
from hybrid.contracts.progress import ProgressContext, Snapshot, snapshot
from hybrid.contracts.telemetry import Telemetry, TelemetrySettings

RUN = RunFacts(
    objective="cross_entropy",
    seed=1337,
    model_id="tiny",
    environment_metadata={"runtime": "python", "platform": "linux"},
    total_param_count=1000,
    trainable_param_count=1000,
    trainable_groups=("decay", "no_decay"),
    runtime_preset="stdlib-tiny",
    kernel_path="webgpu/f32",
    build_provenance={"commitHash": None, "buildId": None, "buildTimestamp": None},
)


def step(**changes: Any) -> StepFacts:
    """A usual step: clipped to half its norm, not overflowed."""
    facts: dict[str, Any] = {
        "step": 1,
        "epoch": 0,
        "batch": 1,
        "total_loss": 2.5,
        "step_time_ms": 12.0,
        "forward_ms": 4.0,
        "backward_ms": 6.0,
        "optimizer_ms": 1.0,
        "timing_source": "device",
        "lr": 1e-3,
        "scheduler_index": 0,
        "scheduler_phase": "constant",
        "grad_norm": 2.0,
        "clip_factor": 0.5,
        "loss_scale": 1.0,
        "overflow": False,
        "nan_count": 0,
        "inf_count": 0,
        "optimizer_step": 1,
        "target_tokens": 250,
        "ignored_targets": 6,
    }
    return StepFacts(**{**facts, **changes})


def progress(number: int = 1) -> Snapshot:
    context = ProgressContext(steps_per_shard=10)
    return snapshot(context, number, elapsed_ms=100.0 * number, executed=number, process_ms=100.0 * number, now_ms=0)


def telemetry(**settings: Any) -> Telemetry:
    return Telemetry(TelemetrySettings.resolve(settings))
