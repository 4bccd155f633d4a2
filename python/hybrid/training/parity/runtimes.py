"""Who trains a workload: a runtime turns it into a trace, and the checks compare traces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hybrid.backends.protocol import SessionState, StepResult, TrainingSession
from hybrid.errors import ConfigError, HybridError, MissingDependency
from hybrid.training.parity.workload import SEQUENCE_LENGTH, Workload

BACKENDS = ("reference", "webgpu", "torch")


class NotAvailable(HybridError):
    """This runtime cannot train this workload here; the message says why."""


@dataclass(frozen=True)
class Trace:
    """What a run did and where it ended. `before_skip` and `after_skip` surround the injected overflow, if there was
    one."""

    initial: SessionState
    results: list[StepResult]
    final: SessionState
    before_skip: SessionState | None = None
    after_skip: SessionState | None = None

    @property
    def losses(self) -> list[float]:
        return [result.loss for result in self.results]


class Runtime(Protocol):
    """One implementation of training."""

    name: str
    precisions: tuple[str, ...]  # those that it has
    resumes: bool  # whether `train` knows `resume_after`: it promises bitwise repeatability

    def train(self, workload: Workload, resume_after: int = 0) -> Trace:
        """Train all steps; with `resume_after`, export the state after that many and go on in a new session.
        NotAvailable where the machine lacks something."""
        ...


@dataclass
class SessionRuntime:
    """A backend, through the session protocol and nothing else.

    With `reuse` sessions are kept and wound back to their first state for the next run of the same shape: on a GPU most
    of a short run is the compilation of its kernels. Where a run resumes, it goes on in a new session all the same.
    """

    name: str
    make: Callable[[Workload], TrainingSession]
    precisions: tuple[str, ...] = ("f32", "mixed-f16")
    resumes: bool = True
    reuse: bool = False
    kept: dict[Workload, tuple[TrainingSession, SessionState]] = field(default_factory=dict)

    def open(self, workload: Workload) -> tuple[TrainingSession, SessionState]:
        """A session at its first step, and its state there."""
        shape = replace(workload, steps=0, overflow_step=0)
        if shape in self.kept:
            session, initial = self.kept[shape]
            session.import_state(initial)
            return session, initial
        session = self.make(workload)
        opened = session, session.export_state()
        if self.reuse:
            self.kept[shape] = opened
        return opened

    def done_with(self, session: TrainingSession) -> None:
        if not any(session is kept for kept, _ in self.kept.values()):
            session.close()

    def close(self) -> None:
        for session, _ in self.kept.values():
            session.close()
        self.kept.clear()

    def train(self, workload: Workload, resume_after: int = 0) -> Trace:
        session, initial = self.open(workload)
        try:
            results: list[StepResult] = []
            before_skip = after_skip = None
            for data_step in range(1, workload.steps + 1):
                if data_step == workload.overflow_step:
                    before_skip = session.export_state()
                session.begin(workload.info(data_step))
                for batch in workload.microbatches(data_step):
                    session.accumulate(batch)
                session.apply()
                if data_step == workload.overflow_step:
                    after_skip = session.export_state()
                if data_step == resume_after:
                    results += session.poll_metrics(wait=True)
                    state = session.export_state()
                    self.done_with(session)
                    session = self.make(workload)
                    session.import_state(state)
            results += session.poll_metrics(wait=True)
            return Trace(initial, results, session.export_state(), before_skip, after_skip)
        finally:
            self.done_with(session)


def session_arguments(workload: Workload) -> dict[str, Any]:
    """The constructor arguments that every session shares."""
    return {
        "batch_size": workload.microbatch_size,
        "sequence_length": SEQUENCE_LENGTH,
        "precision": workload.precision,
        "optimizer": workload.optimizer,
        "max_grad_norm": workload.max_grad_norm,
        "loss_scaling": workload.loss_scaling,
        "seed": workload.seed,
    }


def reference() -> SessionRuntime:
    """The NumPy backend."""
    from hybrid.backends.reference.session import ReferenceSession

    return SessionRuntime("reference", lambda work: ReferenceSession(work.model, **session_arguments(work)))


def float64() -> SessionRuntime:
    """The NumPy backend in double precision: what every f32 run should come near. Its exported states are rounded to
    float32, so it does not resume bit for bit."""
    from hybrid.backends.reference.session import ReferenceSession

    def make(work: Workload) -> TrainingSession:
        return ReferenceSession(work.model, **{**session_arguments(work), "precision": "f64"})

    return SessionRuntime("float64", make, precisions=("f32",), resumes=False)


def webgpu(adapter: str | None = None) -> SessionRuntime:
    """The WebGPU backend on one adapter, opened once. NotAvailable when there is none."""
    from hybrid.backends.webgpu.device import open_device
    from hybrid.backends.webgpu.session import WebGPUSession

    try:
        device = open_device(adapter)
    except HybridError as error:
        raise NotAvailable(str(error)) from error
    return SessionRuntime(
        f"webgpu:{adapter}" if adapter else "webgpu",
        lambda work: WebGPUSession(work.model, device=device, **session_arguments(work)),
        precisions=("f32", "mixed-f16") if device.has_f16 else ("f32",),
        reuse=True,
    )


def torch() -> SessionRuntime:
    """The torch backend on CUDA, or on the CPU where there is none. NotAvailable without the package."""
    try:
        from hybrid.backends.torch.session import TorchSession
    except MissingDependency as error:
        raise NotAvailable(str(error)) from error
    return SessionRuntime("torch", lambda work: TorchSession(work.model, **session_arguments(work)))


def open_runtimes(names: list[str] | None) -> tuple[list[SessionRuntime], dict[str, str]]:
    """The runtimes named (some of `BACKENDS`, or "webgpu:ADAPTER"), or all that are present; and why others are not.

    The float64 reference is always among them. NotAvailable for one that is named and cannot be had, ConfigError for a
    name that is none.
    """
    openers = {"reference": reference, "webgpu": webgpu, "torch": torch}
    runtimes = [float64()]
    missing: dict[str, str] = {}
    for name in names or BACKENDS:
        backend, _, adapter = name.partition(":")
        if backend not in BACKENDS or (adapter and backend != "webgpu"):
            raise ConfigError(f"--backends names {name!r}: expected some of {', '.join(BACKENDS)}, webgpu:ADAPTER")
        try:
            runtimes.append(webgpu(adapter) if adapter else openers[backend]())
        except NotAvailable as error:
            if names:
                raise
            missing[name] = str(error)
    return runtimes, missing
