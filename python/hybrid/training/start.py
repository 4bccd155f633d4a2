"""What stands before the first step: data, resolved settings, fingerprints, and the checkpoint that the run goes on
from."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from hybrid.backends.protocol import TrainingSession
from hybrid.checkpoint.filesystem import OsFilesystem
from hybrid.checkpoint.manifest import Fingerprints, Hashes
from hybrid.checkpoint.store import CheckpointStore
from hybrid.config.contract import contract
from hybrid.config.loading import to_settings
from hybrid.config.machine import machine_memory
from hybrid.config.resolve import check, model_config, resolve, run_length, scheduled_steps
from hybrid.config.size import check_size
from hybrid.config.tree import CheckpointSection, RunConfig
from hybrid.contracts.fingerprint import identity_hashes
from hybrid.contracts.stable_json import stable_hash
from hybrid.data.loader import BatchPlan
from hybrid.data.prepare import PreparedData, prepare
from hybrid.errors import ConfigError, LimitExceeded
from hybrid.models.config import ModelConfig
from hybrid.models.parameters import count_parameters
from hybrid.training.resume import Start, agree, find_start
from hybrid.training.sessions import check_backend, choose_backend, make_session
from hybrid.training.signals import StopFlag
from hybrid.training.view import QuietView, View, WatchedView


class SessionFactory(Protocol):
    """Makes a session for a resolved configuration, and another one after a device was lost.

    note: takes a sentence for the user. progress(what, done, total): of the set-up; it may raise StopRequested.
    """

    def __call__(
        self, config: RunConfig, note: Callable[[str], None], progress: Callable[[str, int, int], None]
    ) -> TrainingSession: ...


@dataclass(frozen=True)
class Request:
    """What the user asked for.

    resume: `auto` goes on from the newest checkpoint in run_dir, if there is one; `never` wants a folder without any;
    a path names a checkpoint or a run. accepted: contract fields (dotted) that may differ from it, each with the same
    reason. profile: how many steps to record with a profiler.
    """

    config: RunConfig
    run_dir: Path
    resume: Literal["auto", "never"] | Path = "auto"
    accepted: tuple[str, ...] = ()
    reason: str | None = None
    command: str = "train"
    profile: int | None = None


@dataclass(frozen=True)
class Services:
    """The outside world of a run. clock: monotonic seconds. now: Unix time in seconds. filesystem: for checkpoints.

    processes: that train together. A run whose view nobody reads any more is stopped, so it saves.
    """

    view: View = field(default_factory=QuietView)
    stop: StopFlag = field(default_factory=StopFlag)
    make_session: SessionFactory = make_session
    clock: Callable[[], float] = time.perf_counter
    now: Callable[[], float] = time.time
    filesystem: OsFilesystem = field(default_factory=OsFilesystem)
    processes: int = 1

    def __post_init__(self) -> None:
        gone = partial(self.stop.request, "nobody reads the output any more")
        object.__setattr__(self, "view", WatchedView(self.view, gone))

    def note(self, text: str) -> None:
        self.view.event("note", {"text": text})

    def phase(self, name: str) -> None:
        self.view.event("phase", {"phase": name})

    def new_session(self, config: RunConfig) -> TrainingSession:
        """A session with fresh weights. Raises StopRequested if a stop is requested while it is set up."""
        self.phase("warm-up")
        self.check_fit(config)
        report = _progress(self)

        def progress(what: str, done: int, total: int) -> None:
            report(what, done, total)
            self.stop.check()

        return self.make_session(config, self.note, progress)

    def check_fit(self, config: RunConfig) -> None:
        """LimitExceeded for a run that is too large for this machine, if `auto` means that the CPU trains."""
        try:
            check_size(config, "reference", machine_memory())
        except LimitExceeded:
            if choose_backend(config) == "reference":  # asked last, for it takes a while
                raise


@dataclass(frozen=True)
class Prepared:
    """A run that could begin. config: resolved. plan: which samples each step reads. audits: accepted changes, for the
    record."""

    config: RunConfig
    model: ModelConfig
    data: PreparedData
    plan: BatchPlan
    steps: int
    start: Start
    fingerprints: Fingerprints
    hashes: Hashes
    audits: tuple[dict[str, Any], ...]


def prepare_run(request: Request, services: Services) -> tuple[Prepared, CheckpointStore]:
    """Everything but the session. Changes nothing in the run folder.

    Errors: ConfigError, DataContractError, CheckpointNotFound, CheckpointCorrupt, ContractMismatch (with the
    differences), LimitExceeded, MissingDependency, NoAdapter, StopRequested.
    """
    check(request.config)
    _check_retention(request.config.checkpoint)
    check_backend(request.config)
    check_size(request.config, request.config.backend.name, machine_memory(), processes=services.processes)
    store = CheckpointStore(
        request.run_dir,
        keep_last=request.config.checkpoint.keep_last or None,
        keep_every=request.config.checkpoint.keep_every or None,
        keep_hours=request.config.checkpoint.keep_hours,
        filesystem=services.filesystem,
        clock=services.now,
    )
    start = find_start(request.resume, request.run_dir, store)
    services.phase("data")
    data = prepare(request.config.data, progress=_progress(services), should_stop=lambda: services.stop.requested)
    services.stop.check()
    config = resolve(request.config, data.tokenizer.vocabulary_size, len(data.train), start.config)
    check_size(config, config.backend.name, machine_memory(), processes=services.processes)
    steps, limit = run_length(config, len(data.train))
    if start.config is not None and _keeps_schedule(request.config, start.config, steps, len(data.train)):
        _explain_schedule(config, steps, services)
    fingerprints = Fingerprints(
        dataset={"fingerprint": data.fingerprint, "samples": len(data.train), "tokens": data.store.token_count},
        tokenizer={
            "kind": data.tokenizer.kind,
            "hash": data.tokenizer.hash,
            "vocabularySize": data.tokenizer.vocabulary_size,
        },
        contract=contract(config),
    )
    audits = agree(start, fingerprints, request.accepted, request.reason, request.command, services.now)
    prepared = Prepared(
        config=config,
        model=model_config(config),
        data=data,
        plan=BatchPlan(len(data.train), config.data.batch_size, config.run.seed, limit),
        steps=steps,
        start=start,
        fingerprints=fingerprints,
        hashes=_hashes(fingerprints),
        audits=audits,
    )
    return prepared, store


def _check_retention(settings: CheckpointSection) -> None:
    """ConfigError for a setting that would do nothing. Not among the checks that a saved run must pass: it may have had
    them."""
    for name, value in (("keepEvery", settings.keep_every), ("keepHours", settings.keep_hours)):
        if value and not settings.keep_last:
            raise ConfigError(
                f"checkpoint.{name} = {value}: with checkpoint.keepLast = 0 all checkpoints are kept; "
                f"expected checkpoint.keepLast of at least 1, or no checkpoint.{name}"
            )


def _keeps_schedule(asked: RunConfig, begun: RunConfig, steps: int, samples: int) -> bool:
    """Whether the schedule is as long as when the run began although nobody has asked for that: nothing asks for a
    length, or it comes from the run folder's own settings (which have the length that was found) and `steps` differ."""
    if asked.schedule.total_steps is None:
        return True
    return asked.schedule.total_steps == begun.schedule.total_steps and steps != run_length(begun, samples)[0]


def _explain_schedule(config: RunConfig, steps: int, services: Services) -> None:
    """A schedule that followed the length of the run stays as it was when the run began; say so where that matters."""
    schedule = config.schedule
    if schedule.type in ("cosine", "cosine_to_min", "wsd") and schedule.total_steps != scheduled_steps(config, steps):
        planned = schedule.warmup_steps + (schedule.total_steps or 0)
        services.note(
            f"the learning rate follows a schedule of {planned} steps, fixed when this run began, not the {steps} it "
            "has now; --resume never begins a new run, and --set schedule.totalSteps=N (counted after the warm-up) "
            "with --accept-change schedule.totalSteps changes it"
        )


def _hashes(fingerprints: Fingerprints) -> Hashes:
    found = identity_hashes(fingerprints.to_json())
    agreed = fingerprints.contract
    return Hashes(
        config_hash=found["configHash"],
        dataset_hash=found["datasetHash"],
        tokenizer_hash=found["tokenizerHash"],
        optimizer_hash=stable_hash({key: agreed[key] for key in ("optimizer", "schedule")}),
    )


def _progress(services: Services) -> Callable[[str, int, int | None], None]:
    """Long work before the first step as events, ten a second at most and one for each new stage."""
    last, shown = float("-inf"), ""

    def report(stage: str, done: int, total: int | None) -> None:
        nonlocal last, shown
        if services.clock() - last >= 0.1 or stage != shown:
            last, shown = services.clock(), stage
            services.view.event("progress", {"stage": stage, "done": done, "total": total})

    return report


def settings_of(prepared: Prepared) -> dict[str, Any]:
    """The resolved configuration as run.json and checkpoints hold it."""
    return to_settings(prepared.config)


def run_facts(prepared: Prepared, run_id: str, start: Start) -> dict[str, Any]:
    """What run.json says when a run begins, or goes on from `start`, beside time and place."""
    fingerprints = prepared.fingerprints.to_json()
    return {
        "status": "running",
        "message": "",
        "runId": run_id,
        "name": prepared.config.run.name,
        "steps": prepared.steps,
        "resumedFrom": start.parent,
        **({"branchedFrom": start.parent} if start.branches else {}),
        "config": settings_of(prepared),
        "fingerprints": fingerprints,
        "hashes": identity_hashes(fingerprints),
        "parameters": count_parameters(prepared.model),
    }
