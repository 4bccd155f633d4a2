"""`--profile STEPS`: what some steps spend their time on."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from hybrid.config.tree import RunConfig
from hybrid.errors import ConfigError
from hybrid.training.start import Services

FOLDER = "profile"
SETTLED = 3  # the step of a process from which on nothing is set up any more


class Trace(Protocol):
    """Hears of each step before it begins."""

    def before(self, step: int) -> None: ...

    def close(self) -> None: ...


def check_profile(steps: int | None, config: RunConfig) -> None:
    """ConfigError for a profile that cannot be made."""
    if steps is None:
        return
    if steps < 1:
        raise ConfigError(f"--profile {steps}: expected at least 1 step")
    if config.backend.name != "torch":
        raise ConfigError(
            f"--profile needs --backend torch, and this run is for {config.backend.name!r}: metrics.jsonl has the "
            "times of its steps (forward_ms, backward_ms, optimizer_ms), and `hybrid bench` measures kernels"
        )


def open_trace(steps: int | None, done: int, run_dir: Path, services: Services) -> Trace | None:
    """A trace of that many steps, beginning with the third behind `done`; None for none."""
    if steps is None:
        return None
    from hybrid.backends.torch.profiling import StepTrace

    return StepTrace(
        run_dir / FOLDER, done + SETTLED, steps,
        lambda file: services.note(f"profiled {steps} step(s): open {file} in chrome://tracing or ui.perfetto.dev"),
    )  # fmt: skip
