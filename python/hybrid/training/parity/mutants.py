"""Known mistakes, planted through the session protocol: a contract that does not notice them proves nothing.

Each mutant trains like a correct session but for one thing. It survives when no row of the contract fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hybrid.backends.protocol import SessionState, StepInfo, StepResult, TrainingSession
from hybrid.data.batch import IGNORE, Batch
from hybrid.optim.settings import OptimizerSettings
from hybrid.optim.table import rows
from hybrid.training.parity.checks import compare_losses, compare_updates
from hybrid.training.parity.contract import LONG_STEPS, SHORT_STEPS, Row
from hybrid.training.parity.runtimes import Runtime, SessionRuntime, Trace
from hybrid.training.parity.workload import MODELS, Workload


class Wrapped:
    """A session that stands in for `inner`. Subclasses change one thing."""

    def __init__(self, inner: TrainingSession, optimizer: OptimizerSettings) -> None:
        self.inner = inner
        self.optimizer = optimizer
        self.results: list[StepResult] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


class DecaysNorms(Wrapped):
    """Weight decay on the norm weights too: what the optimizer does to matrices is done to them after each step."""

    def begin(self, info: StepInfo) -> None:
        self.before = self.inner.export_state()
        self.inner.begin(info)

    def apply(self) -> None:
        self.inner.apply()
        self.results += self.inner.poll_metrics(wait=True)
        state = self.inner.export_state()
        _, _, rate, decay, _, _ = rows(self.optimizer, state.optimizer_step, 1)[0]
        for name in state.model:
            if "norm" in name and name.endswith(".weight"):
                state.model[name] = state.model[name] - np.float32(rate * decay) * self.before.model[name]
        self.inner.import_state(state)

    def poll_metrics(self, wait: bool = False) -> list[StepResult]:
        results, self.results = self.results, []
        return results


class DropsLastPosition(Wrapped):
    """The loss is right, but the last position of each row sends no gradient back.

    Each step is run twice: once whole, for what it reports, and once without those targets, for what it does.
    """

    def begin(self, info: StepInfo) -> None:
        self.info, self.batches = info, list[Batch]()
        self.before: SessionState = self.inner.export_state()

    def accumulate(self, batch: Batch) -> None:
        self.batches.append(batch)

    def apply(self) -> None:
        whole = self._run(self.batches)
        self.inner.import_state(self.before)
        dropped = self._run([replace(b, targets=_without_last(b)) for b in self.batches])
        self.results.append(replace(dropped, loss=whole.loss, nll=whole.nll))

    def _run(self, batches: list[Batch]) -> StepResult:
        self.inner.begin(self.info)
        for batch in batches:
            self.inner.accumulate(batch)
        self.inner.apply()
        return self.inner.poll_metrics(wait=True)[-1]

    def poll_metrics(self, wait: bool = False) -> list[StepResult]:
        results, self.results = self.results, []
        return results


def _without_last(batch: Batch) -> np.ndarray:
    targets = batch.targets.copy()
    targets[:, -1] = IGNORE
    return targets


def _settings(**factors: float) -> Callable[[Workload], Workload]:
    """A workload whose optimizer settings are multiplied by these factors."""

    def change(workload: Workload) -> Workload:
        changed = {name: getattr(workload.optimizer, name) * factor for name, factor in factors.items()}
        return replace(workload, optimizer=replace(workload.optimizer, **changed))

    return change


def _same(workload: Workload) -> Workload:
    return workload


@dataclass(frozen=True)
class Mutant:
    """A mistake: wrong settings, or a session that does one thing wrong."""

    name: str
    change: Callable[[Workload], Workload] = _same
    wrapper: type[Wrapped] | None = None

    def plant(self, runtime: SessionRuntime) -> SessionRuntime:
        """The runtime with this mistake in it."""

        def make(workload: Workload) -> TrainingSession:
            session = runtime.make(self.change(workload))
            return self.wrapper(session, workload.optimizer) if self.wrapper else session  # type: ignore[return-value]

        return SessionRuntime(f"{runtime.name} with {self.name}", make, runtime.precisions, resumes=False)


MUTANTS = (
    Mutant("no weight decay", _settings(weight_decay=0.0)),
    Mutant("weight decay on norms", wrapper=DecaysNorms),
    Mutant("epsilon x 100", _settings(eps=100.0)),
    Mutant("learning rate + 0.1 %", _settings(lr=1.001)),
    Mutant("last position's gradient dropped", wrapper=DropsLastPosition),
)


@dataclass(frozen=True)
class Verdict:
    """Whether the contract noticed a mutant, and by which row."""

    mutant: str
    runtime: str
    model: str
    noticed_by: Row | None

    @property
    def survived(self) -> bool:
        return self.noticed_by is None

    def to_dict(self) -> dict[str, object]:
        """For `--json`."""
        noticed = self.noticed_by.to_dict() if self.noticed_by else None
        return {
            "mutant": self.mutant,
            "runtime": self.runtime,
            "model": self.model,
            "survived": self.survived,
            "noticedBy": noticed,
        }


def check_mutants(
    baseline: Runtime,
    runtimes: Sequence[SessionRuntime],
    mutants: Sequence[Mutant] = MUTANTS,
    progress: Callable[[str], None] = lambda text: None,
    models: Sequence[str] = tuple(MODELS),
) -> list[Verdict]:
    """Plant each mutant in each runtime and compare with the correct `baseline`, on each of `models`."""
    verdicts = []
    for name in models:
        workload = Workload(name, MODELS[name], SHORT_STEPS)
        truth: dict[int, Trace] = {}
        for runtime in runtimes:
            for mutant in mutants:
                progress(f"{workload.name}: {runtime.name} with {mutant.name}")
                noticed = _first_failure(workload, baseline, truth, mutant.plant(runtime))
                verdicts.append(Verdict(mutant.name, runtime.name, workload.name, noticed))
    return verdicts


def _first_failure(
    workload: Workload, baseline: Runtime, truth: dict[int, Trace], mutated: SessionRuntime
) -> Row | None:
    """The first row that fails: losses of ten steps, and only then the updates of 100."""
    for steps, compare in ((SHORT_STEPS, lambda w, t: compare_losses(w, t, "loss")), (LONG_STEPS, compare_updates)):
        longer = replace(workload, steps=steps)
        if steps not in truth:
            truth[steps] = baseline.train(longer)
        for row in compare(longer, {baseline.name: truth[steps], mutated.name: mutated.train(longer)}):
            if not row.passed:
                return row
    return None
