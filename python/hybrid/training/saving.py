"""Checkpoints of a run: from a session's state to a folder, in the background."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from hybrid.backends.protocol import SessionState, SpreadSession, SpreadState, TrainingSession
from hybrid.checkpoint.manifest import Hashes, Progress
from hybrid.checkpoint.snapshot import CheckpointSnapshot
from hybrid.checkpoint.store import CheckpointStore
from hybrid.checkpoint.writer import AsyncCheckpointWriter
from hybrid.training.start import Prepared, Services, settings_of


class Saver:
    """Saves states of one run. Reports each finished save to the view; the first error ends the run at the next
    call."""

    def __init__(self, prepared: Prepared, services: Services, store: CheckpointStore, run_id: str) -> None:
        self._prepared = prepared
        self._services = services
        self._store = store
        self._run_id = run_id
        self._writer = AsyncCheckpointWriter(store)
        self._pending: list[tuple[int, Future[Path]]] = []
        self._last_step: int | None = None
        self.saved = False  # whether a checkpoint of this process is on disk

    def save(
        self,
        source: TrainingSession,
        progress: Progress,
        *,
        describe: dict[str, Any],
        environment: dict[str, Any],
        provenance: dict[str, Any] | None,
        session: Callable[[], dict[str, Any]],
    ) -> None:
        """Copy the state of `source`; it is written while training goes on. Waits while two saves are outstanding, or
        one, where the state lies on several processes. session: asked after the copy, whose time is the run's."""
        state, done = self._take(source, progress.step)
        prepared, hashes, tokenizer = self._prepared, self._prepared.hashes, self._prepared.data.tokenizer
        snapshot = CheckpointSnapshot(
            model=state.model,
            optimizer=state.optimizer,
            optimizer_step=state.optimizer_step,
            progress=progress,
            config=settings_of(prepared),
            model_config=prepared.model,
            seed=prepared.config.run.seed,
            run_id=self._run_id,
            runtime=describe["backend"],
            scaler=state.scaler,
            cursor=prepared.plan.cursor(progress.step),
            hashes=Hashes(
                config_hash=hashes.config_hash,
                dataset_hash=hashes.dataset_hash,
                tokenizer_hash=hashes.tokenizer_hash,
                optimizer_hash=hashes.optimizer_hash,
                kernel_path_id=describe.get("kernel_path"),
            ),
            fingerprints=prepared.fingerprints,
            environment=environment,
            provenance=provenance,
            session=session(),
            resume_audits=prepared.audits,
            tokenizer_json=tokenizer.to_json(),
            special_tokens={} if tokenizer.end_of_text is None else {"eos": tokenizer.end_of_text},
        )
        future = self._writer.submit(snapshot, owned=True)
        future.add_done_callback(lambda future: done())
        self._pending.append((progress.step, future))
        self._last_step = progress.step

    def _take(
        self, source: TrainingSession, step: int
    ) -> tuple[SessionState, Callable[[], None]] | tuple[SpreadState, Callable[[], None]]:
        """The state, and what to do when it is saved."""
        if not isinstance(source, SpreadSession):
            return source.export_state(), lambda: None
        self._writer.wait()  # each process holds one copy of its part, not two
        folder = self._store.incoming(step)
        try:
            state = source.export_pieces(folder.resolve(), f"saving step {step}")
        except BaseException:
            self._store.discard(folder)
            raise

        def done() -> None:
            state.close()
            self._store.discard(folder)

        return state, done

    def holds(self, step: int) -> bool:
        """Whether the state after this step was handed over last: it need not be saved twice."""
        return self._last_step == step

    def report(self) -> None:
        """Tell the view about saves that have finished. Raises the error of one that failed."""
        while self._pending and self._pending[0][1].done():
            step, future = self._pending.pop(0)
            self._services.view.event("checkpoint", {"step": step, "path": str(future.result())})
            self.saved = True

    def wait(self) -> None:
        """Return when everything is on disk."""
        self._writer.wait()
        self.report()

    def forget(self) -> None:
        """After going back to an older step: its successors are to be saved again."""
        self._last_step = None

    def close(self) -> None:
        self._writer.close()
        self.report()
