"""This side of a run in a tab: the same run folder and view as any other, and ways to end.

The tab does what `training.runner.Trainer` does, and reports it; this side keeps the run folder, and verifies the
checkpoints that come in.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from hybrid.bridge.job import FOREIGN, build_job, checkpoint_files, last_sequence, name_of_start, plan_settings
from hybrid.bridge.server.uploads import Uploads
from hybrid.checkpoint.digests import digest_bytes
from hybrid.checkpoint.finding import CheckpointRef, step_folder_name
from hybrid.checkpoint.loading import VerifiedCheckpoint
from hybrid.checkpoint.manifest import MANIFEST_NAME, MODEL_FILE, OPTIMIZER_FILE
from hybrid.checkpoint.store import CheckpointStore
from hybrid.contracts.javascript import iso_time
from hybrid.contracts.metrics import validate_entry
from hybrid.contracts.stable_json import stable_hash
from hybrid.errors import AlertRaised, CheckpointCorrupt, HybridError
from hybrid.models.parameters import count_parameters
from hybrid.training.boards import open_boards
from hybrid.training.metrics_log import (
    DISCARDED,
    METRICS,
    VALIDATION,
    VALIDATION_DISCARDED,
    JsonLines,
    read_rows,
)
from hybrid.training.outcome import Outcome, ended
from hybrid.training.plot import draw_losses
from hybrid.training.resume import find_start
from hybrid.training.run_files import RunFile
from hybrid.training.saved_run import check_model, check_place, saved_config
from hybrid.training.start import Prepared, Request, Services, run_facts, settings_of
from hybrid.training.view import printable

RUNTIME = "browser"
BYTES_BESIDE_TENSORS = 64 * 1024 * 1024  # headers, tokenizer and settings of a checkpoint

_STEP = re.compile(r"step-[0-9]{8,15}\Z")


class TabRun:
    """This side of a run in a tab. Use it as a context manager: leaving closes the files and draws the loss curve.

    Its methods are called by one thread at a time (`Desk` sees to that), `check` by the one that has an upload.
    """

    def __init__(
        self, request: Request, services: Services, prepared: Prepared, store: CheckpointStore, record: RunFile
    ) -> None:
        config, run_dir = prepared.config, request.run_dir
        self.services = services
        self.prepared = prepared
        self.store = store
        self.record = record
        self.run_dir = run_dir
        self.start = prepared.start
        self.data_folder: Path = prepared.data.store.path
        self.plan_settings = plan_settings(config)
        manifest = prepared.start.manifest
        self.run_id = manifest.lineage.run_id if manifest else secrets.token_hex(8)
        self.files = {name: digest_bytes(data) for name, data in checkpoint_files(prepared).items()}
        self.metrics = JsonLines(run_dir / METRICS, run_dir / DISCARDED)
        self.validation = JsonLines(run_dir / VALIDATION, run_dir / VALIDATION_DISCARDED)
        self.written = {rows: _last_step(rows) for rows in (self.metrics, self.validation)}
        self.phase = "data"  # what is shown
        self.saved = 0  # checkpoints of this process
        self.boards = open_boards(config, run_dir, self.run_id)
        # Weights and two moments, four bytes each.
        most = 12 * count_parameters(prepared.model) + BYTES_BESIDE_TENSORS
        self.uploads = Uploads(store, most, self.check, self.adopted)

    def __enter__(self) -> TabRun:
        self.store.clean()
        ref = self.start.ref
        if ref is not None:
            loaded = self.store.load(ref)
            if self.start.config is not None:
                check_model(loaded, self.start.config)
            self.store.continue_from(loaded)
            if self.start.step >= self.prepared.steps:  # killed behind its last save, perhaps before pruning
                self.store.prune(ref.path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.uploads.clear()
        closing: list[Callable[[], None]] = [self.metrics.close, self.validation.close]
        closing += [board.close for board in self.boards]
        closing.append(partial(draw_losses, self.run_dir, self.prepared.config.run.name))
        for close in closing:
            try:
                close()
            except Exception as late:
                if error is None:
                    raise
                error.add_note(f"while ending the run: {late}")  # what ended it stays in front

    # --- what the tab asks for

    def job(self) -> dict[str, Any]:
        """The run as a tab begins it, or goes on with it after a reload: from the newest checkpoint then."""
        if self.saved:
            self.start = find_start("auto", self.run_dir, self.store)
        self.sequence = last_sequence(self.store)
        self.parent = self.start.ref.checkpoint_hash if self.start.ref else None
        self.step = self.start.step
        self._record(
            **run_facts(self.prepared, self.run_id, self.start),
            createdAt=self.record.facts.get("createdAt") or self._time(),
            step=self.step,
        )
        return build_job(self.prepared, self.run_dir, self.run_id, self.start, self.sequence)

    def checkpoint_folder(self, name: str) -> Path | None:
        """Where the files of a checkpoint lie that a tab may read; None if there is none of that name."""
        ref = self.start.ref
        if ref is not None and name == FOREIGN and name_of_start(self.start, self.run_dir) == FOREIGN:
            return ref.path
        folder = self.store.folder / name
        return folder if _STEP.match(name) and (folder / MANIFEST_NAME).is_file() else None

    # --- what the tab reports

    def apply(self, event: Any) -> None:
        """Do what an event says. Errors: HybridError for one that cannot be true; OSError."""
        getattr(self, f"_on_{event.kind}")(event)

    def show_phase(self, phase: str) -> None:
        if phase != self.phase:
            self.phase = phase
            self.services.phase(phase)

    def _on_phase(self, event: Any) -> None:
        self.show_phase(event.phase)

    def _on_progress(self, event: Any) -> None:
        total = None if event.total is None else int(event.total)
        self.services.view.event("progress", {"stage": event.stage, "done": int(event.done), "total": total})

    def _on_note(self, event: Any) -> None:
        self.services.note(printable(event.text))

    def _on_run(self, event: Any) -> None:
        place = {"runDir": str(self.run_dir), "resumedFrom": self.start.parent}
        self.services.view.event("run", {**event.facts(), **place})

    def _on_step(self, event: Any) -> None:
        self.services.view.event("step", event.facts())

    def _on_sample(self, event: Any) -> None:
        self.services.view.event("sample", event.facts())

    def _on_checkpoint(self, event: Any) -> None:
        path = self.store.folder / step_folder_name(event.step)
        self.services.view.event("checkpoint", {"step": event.step, "path": str(path)})

    def _on_entry(self, event: Any) -> None:
        validate_entry(event.row)
        self._append(self.metrics, event.row)
        for board in self.boards:
            board.entry(event.row, self.services.now())

    def _on_validation(self, event: Any) -> None:
        row = event.row.model_dump(exclude_none=True)
        self._append(self.validation, row)
        for board in self.boards:
            board.validation(row, self.services.now())
        self.services.view.event("validation", row)

    def _on_cut(self, event: Any) -> None:
        rows = self.metrics if event.file == "metrics" else self.validation
        cut = rows.cut(event.step)
        self.written[rows] = min(self.written[rows], event.step)
        if cut and rows is self.metrics:
            self.services.note(f"moved {cut} metrics rows after step {event.step} to {DISCARDED}")

    def _on_record(self, event: Any) -> None:
        self._record(**event.record.model_dump(exclude_unset=True))

    def _on_end(self, event: Any) -> None:
        if event.status == "alert":
            return
        last = self.start.step if not self.saved else find_start("auto", self.run_dir, self.store).step
        if event.step != last or (event.status == "finished" and event.step != self.prepared.steps):
            raise HybridError(
                f"the tab says that the run {event.status} at step {event.step} of {self.prepared.steps}, but its "
                f"newest checkpoint is of step {last}"
            )

    def outcome(self, end: Any) -> Outcome:
        """How the run ended. AlertRaised for one that was ended by an alert."""
        if end.status == "alert":
            error = AlertRaised(tuple(end.alerts), end.step)
            if end.message:  # it names the step that raised the alert; the run's own may be the one before
                error.args = (printable(end.message),)
            raise error
        reason = self.services.stop.reason or "asked for on the page"
        outcome = ended(end.status, end.step, self.prepared.steps, self.run_dir, reason)
        self._record(status=end.status, message=outcome.message, step=end.step)
        return outcome

    def where_it_goes_on(self) -> str:
        """Where the same command would go on, for the sentence about a tab that is gone."""
        ref = self.store.latest()
        return f"from the checkpoint of step {ref.step}" if ref is not None else "at step 0: nothing was saved yet"

    # --- checkpoints that come in

    def check(self, loaded: VerifiedCheckpoint) -> None:
        """CheckpointCorrupt unless a checkpoint from the tab is the next one of this very run.

        Its hashes hold already; but hashes hold for any content, and the run would go on from it.
        """
        manifest, path, prepared = loaded.manifest, loaded.path, self.prepared
        lineage, step = manifest.lineage, manifest.progress.step
        expected = {
            "lineage.runId": (lineage.run_id, self.run_id),
            "lineage.sequence": (lineage.sequence, self.sequence + 1),
            "lineage.previousCheckpointHash": (lineage.previous_checkpoint_hash, self.parent),
            "lineage.runtime": (lineage.runtime, RUNTIME),
            "config": (stable_hash(manifest.config), stable_hash(settings_of(prepared))),
            "fingerprints": (
                stable_hash(manifest.fingerprints.to_json()),
                stable_hash(prepared.fingerprints.to_json()),
            ),
            "hashes": (
                {**manifest.hashes.to_json(), "runtimePresetId": None, "kernelPathId": None},
                prepared.hashes.to_json(),
            ),
            "resumeAudits": (stable_hash(list(manifest.resume_audits)), stable_hash(list(prepared.audits))),
            "files": (
                sorted(manifest.files),
                sorted([MODEL_FILE, OPTIMIZER_FILE, *self.files]),
            ),
            **{name: (manifest.files.get(name), digest) for name, digest in self.files.items()},
        }
        for name, (found, wanted) in expected.items():
            if found != wanted:
                raise CheckpointCorrupt(f"{path.name}: {name} is {found!r:.200}: this run has {wanted!r:.200}")
        if not self.step < step <= prepared.steps:
            raise CheckpointCorrupt(f"{path.name}: step {step} does not follow step {self.step} of {prepared.steps}")
        config = saved_config(path, manifest)
        check_place(path, manifest, config)
        check_model(loaded, config)

    def adopted(self, ref: CheckpointRef) -> None:
        """A checkpoint from the tab is in its place."""
        self.saved += 1
        self.sequence, self.parent, self.step = ref.sequence, ref.checkpoint_hash, ref.step

    # --- small things

    def _append(self, rows: JsonLines, row: dict[str, Any]) -> None:
        if row["step"] <= self.written[rows]:
            raise HybridError(f"the tab sent a row of step {row['step']} after one of step {self.written[rows]}")
        rows.append(row)
        self.written[rows] = row["step"]

    def _record(self, **facts: Any) -> None:
        self.record.update(**facts, updatedAt=self._time())

    def _time(self) -> str:
        return iso_time(self.services.now() * 1000) or ""


def _last_step(rows: JsonLines) -> int:
    return max((row["step"] for row in read_rows(rows.path)), default=0)
