"""The training loop.

`train` prepares a run, and `Trainer` takes it from its first step to its last: steps, validation, samples,
checkpoints. The session does all arithmetic (`backends.protocol`); the loop decides when. It ends in one of these
ways: finished, stopped on request (saved, exit code 75), an alert, a refusal, a failure. A device that is lost is
replaced, and the run goes on from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from hybrid.backends.collection import Collection
from hybrid.backends.protocol import StepInfo, TrainingSession
from hybrid.checkpoint.manifest import Progress
from hybrid.checkpoint.store import CheckpointStore
from hybrid.contracts.javascript import iso_time
from hybrid.data.loader import DataLoader
from hybrid.errors import AlertRaised, DataContractError, DeviceLost, NonFiniteError
from hybrid.models.parameters import count_parameters
from hybrid.training.boards import Board, open_boards
from hybrid.training.entries import Entries, StepPlace
from hybrid.training.evaluation import evaluate, sample
from hybrid.training.lock import locked
from hybrid.training.meter import Meter
from hybrid.training.metrics_log import (
    DISCARDED,
    METRICS,
    VALIDATION,
    VALIDATION_DISCARDED,
    JsonLines,
    read_rows,
)
from hybrid.training.outcome import Outcome, already_finished, ended, status_of
from hybrid.training.plot import draw_losses
from hybrid.training.profiling import Trace, check_profile, open_trace
from hybrid.training.resume import Start, find_start
from hybrid.training.run_files import Facts, RunFile, check_place, read_run_file
from hybrid.training.saved import restore
from hybrid.training.saving import Saver
from hybrid.training.start import Prepared, Request, Services, prepare_run, run_facts

Closeable = Saver | DataLoader | JsonLines | Board | Trace | TrainingSession


Loop = Callable[[Request, Services, Prepared, CheckpointStore, RunFile], Outcome]


def train(request: Request, services: Services, loop: Loop | None = None) -> Outcome:
    """Train as requested and say how it ended.

    loop: takes the prepared run from its first step to its last; without one, a Trainer does so in this process.
    Errors are raised after run.json says so: AlertRaised, ContractMismatch, CheckpointCorrupt, CheckpointNotFound,
    ConfigError, DataContractError, DeviceLost (too often), LimitExceeded, StopRequested (before there was anything to
    save).
    """
    check_place(request.run_dir)
    request.run_dir.mkdir(parents=True, exist_ok=True)
    with services.view:
        with services.stop.installed(services.note), locked(request.run_dir):
            outcome = _train(request, services, loop or _in_this_process)
        services.view.event("end", outcome.facts())
        return outcome


def _train(request: Request, services: Services, loop: Loop) -> Outcome:
    existing = read_run_file(request.run_dir)
    record = RunFile(request.run_dir, existing)
    begun = False
    if existing is not None and existing.get("status") == "running":  # and the lock was free
        services.note("the process that trained here last ended without a word; going on from what it saved")
    try:
        check_profile(request.profile, request.config)
        prepared, store = prepare_run(request, services)
        begun = prepared.start.step < prepared.steps or _lacks_its_end(existing, prepared)
        if not begun:
            return already_finished(request.run_dir, prepared.start.step, prepared.steps)
        return loop(request, services, prepared, store, record)
    except BaseException as error:
        # A refusal before the first step leaves the record of an earlier run as it is; so does a longer run that never
        # began, of one that is finished.
        if existing is None or (begun and record.facts.get("status") != "finished"):
            message = str(error) or type(error).__name__
            facts = {"status": status_of(error), "message": message, "updatedAt": _time(services)}
            _close(partial(record.update, **facts), error)
        raise


def _in_this_process(
    request: Request, services: Services, prepared: Prepared, store: CheckpointStore, record: RunFile
) -> Outcome:
    with Trainer(request, services, prepared, store, record) as trainer:
        return trainer.run()


class Trainer:
    """One run in this process. Use it as a context manager: leaving closes everything, and draws the loss curve."""

    step: int = 0  # data steps done; they count on when the optimizer skips
    target_tokens: int = 0  # seen in all steps of the run
    opened_at: int = 0  # the step of the state that the session began with
    validated: int = 0  # the newest step that has a validation row
    sampled: int = 0
    saved_at: float = 0.0  # seconds of the services' clock
    entries: Entries
    describe: dict[str, Any]

    def __init__(
        self, request: Request, services: Services, prepared: Prepared, store: CheckpointStore, record: RunFile
    ) -> None:
        config = prepared.config
        self.config = config
        self.prepared = prepared
        self.services = services
        self.run_dir = request.run_dir
        self.store = store
        self.record = record
        self.stop = services.stop
        self.steps = prepared.steps
        self.judges = config.telemetry.alerts.fail_on_alert
        self.recoveries = 0
        manifest = prepared.start.manifest
        self.run_id = manifest.lineage.run_id if manifest else secrets.token_hex(8)
        self.metrics = JsonLines(self.run_dir / METRICS, self.run_dir / DISCARDED)
        self.validation = JsonLines(self.run_dir / VALIDATION, self.run_dir / VALIDATION_DISCARDED)
        self.boards = open_boards(config, self.run_dir, self.run_id)
        self.loader = DataLoader(
            prepared.data.train, prepared.plan, config.data.microbatch_size or config.data.batch_size,
            prefetch=config.data.prefetch,
        )  # fmt: skip
        self.saver = Saver(prepared, services, store, self.run_id)
        self.meter = Meter(services.clock)
        self.collection = Collection()
        self.trace = open_trace(request.profile, prepared.start.step, self.run_dir, services)
        self.session: TrainingSession | None = None

    # --- the loop

    def run(self) -> Outcome:
        """From the starting checkpoint to the end, over as many devices as it takes."""
        while True:
            try:
                with self.meter.stopped():  # compiling for a minute says nothing about the steps to come
                    self.session = self._open_session()
                with self.collection:
                    return self._loop(self.session)
            except DeviceLost as error:
                self._count_recovery(error)

    def _loop(self, session: TrainingSession) -> Outcome:
        while True:
            self._save_if_due(session)
            self._evaluate_if_due(session)
            self._sample_if_due(session)
            if self.stop.requested:
                return self._end(session, "stopped")
            if self.step >= self.steps:
                return self._end(session, "finished")
            self._train_step(session)

    def _train_step(self, session: TrainingSession) -> None:
        step = self.step + 1
        self.collection.step(step)
        if self.trace is not None:
            with self.meter.paused():  # writing a trace takes longer than its steps
                self.trace.before(step)
        with self.meter.waiting():
            batches = self.loader.step(step)
            targets = self.loader.target_tokens(step)
        self.entries.begin(step, self._place(step, targets), session.memory())
        session.begin(StepInfo(step, targets, len(batches), self._z_loss(step)))
        for batch in batches:
            session.accumulate(batch)
        if self.judges:
            self.entries.judge(session.inspect())
        session.apply()
        self.step = step
        self.target_tokens += targets
        self.meter.step(targets)
        try:
            self.entries.record(session.poll_metrics(wait=self.judges))
        except AlertRaised:
            self._save(session)
            raise
        self.saver.report()

    def _evaluate_if_due(self, session: TrainingSession) -> None:
        samples, settings = self.prepared.data.validation, self.config.evaluation
        if samples is None or not self._due(settings.every) or self.validated >= self.step:
            return
        with self._pause(session, "evaluate"):
            result = evaluate(session, samples, self.loader.microbatch_size, settings.batches, self.stop)
            self.collection.now()
        if result is None:
            return  # a stop was requested; the evaluation is made up for when the run goes on
        row = {"step": self.step, "split": "validation", **result}
        self.validation.append(row)
        self.validated = self.step
        for board in self.boards:
            board.validation(row, self.services.now())
        self.services.view.event("validation", row)

    def _sample_if_due(self, session: TrainingSession) -> None:
        settings = self.config.sampling
        if not self._due(settings.every) or self.sampled >= self.step:
            return
        self.sampled = self.step
        with self._pause(session, "sample"):
            try:
                text = sample(session, self.prepared.data.tokenizer, settings, self.stop)
            except (DataContractError, NonFiniteError) as error:
                return self.services.note(f"no sample at step {self.step}: {error}")
        if text is not None:
            self.services.view.event("sample", {"step": self.step, "prompt": settings.prompt, "text": text})

    def _save_if_due(self, session: TrainingSession) -> None:
        every, hours = self.config.checkpoint.every, self.config.checkpoint.every_hours
        waited = self.services.clock() - self.saved_at
        if (every and self.step % every == 0) or (hours is not None and waited >= hours * 3600):
            self._save(session)

    def _save(self, session: TrainingSession) -> None:
        if self.step == self.opened_at or self.saver.holds(self.step):
            return  # nothing new
        with self._pause(session, "save"):
            self.saver.save(
                session, self._progress(), describe=self.describe, environment=self.entries.environment,
                provenance=self.entries.provenance, session=self.entries.state,
            )  # fmt: skip
            self._record()
            self.collection.now()
        self.saved_at = self.services.clock()

    def _end(self, session: TrainingSession, status: str) -> Outcome:
        self._save(session)
        self.entries.record(session.poll_metrics(wait=True))
        self.saver.wait()
        outcome = ended(status, self.step, self.steps, self.run_dir, self.stop.reason)
        self._record(status=status, message=outcome.message)
        return outcome

    # --- sessions: the first one, and those after a lost device

    def _open_session(self) -> TrainingSession:
        """A session that holds the state this run starts from; after a lost device, its newest checkpoint."""
        start = self.prepared.start
        if self.recoveries:
            self.saver.wait()
            if self.saver.saved:
                start = find_start("auto", self.run_dir, self.store)
        else:
            self.store.clean()
        session = self.services.new_session(self.config)
        state = {}
        self.target_tokens = 0
        if start.ref is not None and start.manifest is not None:
            manifest = restore(session, self.store, start.ref)
            if start.step >= self.steps:  # killed behind its last save, perhaps before the older ones were pruned
                self.store.prune(start.ref.path)
            state = manifest.session
            self.target_tokens = manifest.progress.target_tokens
        self.step = self.opened_at = self.sampled = start.step
        self.saved_at = self.services.clock()
        self.saver.forget()
        cut = self.metrics.cut(self.step)
        if cut:
            self.services.note(f"moved {cut} metrics rows after step {self.step} to {DISCARDED}")
        self.validation.cut(self.step)
        self.validated = max((row["step"] for row in read_rows(self.validation.path)), default=0)
        self.describe = session.describe()
        self.entries = Entries(
            self.prepared, self.services, self.metrics, self.meter, self.describe, state, self.boards
        )
        self._announce(session, start)
        return session

    def _count_recovery(self, error: DeviceLost) -> None:
        self.recoveries += 1
        most = self.config.backend.max_recoveries
        with contextlib.suppress(Exception):  # whatever a lost device answers, it is given up
            if self.session is not None:
                self.session.close()
        self.session = None
        if self.recoveries > most:
            raise DeviceLost(
                f"the device was lost {self.recoveries} times, and backend.maxRecoveries is {most}: {error}"
            )
        self.services.note(
            f"the device was lost after step {self.step} ({error}); going on from the last checkpoint with a new one "
            f"({self.recoveries} of at most {most} times)"
        )

    # --- small things

    def _due(self, every: int) -> bool:
        """Whether something that happens every so many steps, and at the end, is due after the current one."""
        return bool(every) and self.step > 0 and (self.step % every == 0 or self.step == self.steps)

    @contextmanager
    def _pause(self, session: TrainingSession, phase: str) -> Iterator[None]:
        """Finish the steps in flight, so that their time counts as training, and then stop the meter."""
        self.entries.record(session.poll_metrics(wait=True))
        self.services.phase(phase)
        with self.meter.paused():
            yield
        self.services.phase("train")

    def _z_loss(self, step: int) -> float:
        objective = self.config.objective
        return objective.z_loss if objective.z_loss_steps is None or step <= objective.z_loss_steps else 0.0

    def _place(self, step: int, targets: int) -> StepPlace:
        cursor = self.prepared.plan.cursor(step - 1)
        size, length = self.config.data.batch_size, self.config.data.sequence_length
        return StepPlace(
            epoch=cursor["epoch"],
            batch=cursor["position"] // size + 1,
            ignored_targets=size * length - targets,
            tokens_per_second=self.meter.tokens_per_second,
            step_milliseconds=self.meter.step_milliseconds,
            data_wait_share=self.meter.data_wait_share,
        )

    def _progress(self) -> Progress:
        cursor = self.prepared.plan.cursor(self.step)
        size, length = self.config.data.batch_size, self.config.data.sequence_length
        return Progress(
            step=self.step,
            epoch=cursor["epoch"],
            batch=cursor["position"] // size,
            samples=cursor["samples"],
            tokens=cursor["samples"] * length,
            target_tokens=self.target_tokens,
        )

    def _announce(self, session: TrainingSession, start: Start) -> None:
        config, data = self.config, self.prepared.data.train
        self._record(
            **run_facts(self.prepared, self.run_id, start),
            createdAt=self.record.facts.get("createdAt") or _time(self.services),
            backend=self.describe,
            environment=self.entries.environment,
            provenance=self.entries.provenance,
        )
        facts = {
            "name": config.run.name,
            "runId": self.run_id,
            "runDir": str(self.run_dir),
            "step": self.step,
            "steps": self.steps,
            "backend": self.describe["backend"],
            "adapter": (self.describe.get("gpuAdapter") or {}).get("name") or self.describe.get("adapter"),
            "precision": config.precision.type,
            "parameters": count_parameters(self.prepared.model),
            "trainTokens": data.ledger.kept,
            "tokensPerStep": config.data.batch_size * config.data.sequence_length,
            "memory": session.memory(),
            "peakFlops": self.entries.budget.peak,
            "utilisation": self.entries.budget.text(),
            "resumedFrom": start.parent,
        }
        self.services.view.event("run", facts)
        self.services.phase("train")

    def _record(self, **facts: object) -> None:
        self.record.update(**facts, step=self.step, updatedAt=_time(self.services))

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(_close, partial(draw_losses, self.run_dir, self.config.run.name), error)
            for resource in (
                self.session,
                self.saver,
                self.loader,
                self.metrics,
                self.validation,
                *self.boards,
                self.trace,
            ):
                if resource is not None:
                    stack.callback(_close, resource.close, error)


def _lacks_its_end(existing: Facts | None, prepared: Prepared) -> bool:
    """Whether a run was stopped or killed after its last step: the evaluation at the end is still to be made."""
    ended = existing is None or existing.get("status") not in ("running", "stopped", "failed")
    return not ended and prepared.start.step == prepared.steps


def _close(close: Callable[[], object], error: BaseException | None) -> None:
    """Close, and keep the error that ended the run in front."""
    try:
        close()
    except Exception as late:
        if error is None:
            raise
        error.add_note(f"while ending the run: {late}")


def _time(services: Services) -> str:
    return iso_time(services.now() * 1000) or ""
