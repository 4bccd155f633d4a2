"""Sessions that misbehave, or only pretend: what the loop must cope with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hybrid.backends.protocol import Evaluation, GenerateOptions, SessionState, StepInfo, StepResult, TrainingSession
from hybrid.config.resolve import model_config
from hybrid.config.tree import RunConfig
from hybrid.data.batch import Batch
from hybrid.errors import DeviceLost
from hybrid.models.parameters import parameter_specs
from hybrid.training.sessions import make_session


class LosingSession:
    """Passes everything on to a session, and loses the device at the calls that `lost` says yes to.

    lost(method, data_step): asked before each call that talks to the device.
    """

    TALKS = ("begin", "accumulate", "apply", "poll_metrics", "evaluate", "generate", "export_state", "import_state")

    def __init__(self, session: TrainingSession, lost: Callable[[str, int], bool]) -> None:
        self._session = session
        self._lost = lost
        self._step = 0
        self._gone = False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._session, name)
        if name not in self.TALKS:
            return method

        def call(*arguments: Any, **options: Any) -> Any:
            if name == "begin":
                self._step = arguments[0].data_step
            if self._gone or self._lost(name, self._step):
                self._gone = True
                raise DeviceLost(f"lost in {name}")
            return method(*arguments, **options)

        return call


def losing(times: list[tuple[str, int]]) -> Callable[..., TrainingSession]:
    """A factory whose sessions lose the device at each of these (method, data step) once, in order."""

    def lost(method: str, step: int) -> bool:
        if times and times[0] == (method, step):
            times.pop(0)
            return True
        return False

    return watched(lost)


def watched(lost: Callable[[str, int], bool]) -> Callable[..., TrainingSession]:
    """A factory of `LosingSession`s."""

    def make(config: RunConfig, *reporting: Any) -> TrainingSession:
        return LosingSession(make_session(config, *reporting), lost)  # type: ignore[return-value]

    return make


class FakeClock:
    """Seconds that only move when they are told to."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


class TimedSession:
    """Does no arithmetic; a step, an evaluation and an export take fixed times of a fake clock. With `diverged`, every
    step is skipped."""

    STEP, EVALUATION, EXPORT = 0.1, 7.0, 5.0

    def __init__(self, config: RunConfig, clock: FakeClock, diverged: bool = False) -> None:
        self._diverged = diverged
        specs = parameter_specs(model_config(config))
        self._clock = clock
        self._model = {spec.name: np.zeros(spec.shape, np.float32) for spec in specs}
        self._results: list[StepResult] = []

    def begin(self, info: StepInfo) -> None:
        self._info = info

    def accumulate(self, batch: Batch) -> None:
        return None

    def inspect(self) -> StepResult:
        step, targets = self._info.data_step, self._info.target_tokens
        return StepResult(
            data_step=step, loss=1.0, nll=1.0, target_tokens=targets, grad_norm=1.0, clip_factor=1.0, loss_scale=1.0,
            loss_scale_after=1.0, growth_counter=0, overflow=self._diverged, loss_overflow=False, nan_count=0,
            inf_count=0, optimizer_step=step,
        )  # fmt: skip

    def apply(self) -> None:
        self._clock.seconds += self.STEP
        self._results.append(self.inspect())

    def poll_metrics(self, wait: bool = False) -> list[StepResult]:
        results, self._results = self._results, []
        return results

    def evaluate(self, batch: Batch) -> Evaluation:
        self._clock.seconds += self.EVALUATION
        return Evaluation(float(batch.target_tokens), batch.target_tokens)

    def generate(self, prompt: list[int], options: GenerateOptions) -> Iterator[int]:
        self._clock.seconds += self.EVALUATION
        return iter([65] * options.tokens)

    def export_state(self) -> SessionState:
        self._clock.seconds += self.EXPORT
        moments = {f"{slot}/{n}": a.copy() for slot in ("moment1", "moment2") for n, a in self._model.items()}
        return SessionState(
            {n: a.copy() for n, a in self._model.items()}, moments, 1, {"scale": 1024.0, "growthCounter": 0}
        )

    def import_state(self, state: SessionState) -> None:
        return None

    def describe(self) -> dict[str, Any]:
        return {"backend": "reference", "kernel_path": "none", "precision": "f32"}

    def memory(self) -> dict[str, int]:
        return {"total": 0}

    def counters(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        return None
