"""Saving in the background, so that training goes on meanwhile.

At most two saves are outstanding: one being written and one waiting. A third `submit` waits until there is room;
nothing is dropped or merged, for each cadence step was promised. So memory holds at most two snapshots, and a disk
that is too slow slows the run down instead of filling the memory.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType

from hybrid.checkpoint.snapshot import CheckpointSnapshot
from hybrid.checkpoint.store import CheckpointStore
from hybrid.errors import HybridError

MAX_OUTSTANDING = 2


class AsyncCheckpointWriter:
    """Saves snapshots to `store` in order, on one background thread that lives while there is work.

    The first error is raised once, by the next `submit`, `wait` or `close`; each save's own error is also in its
    future. As a context manager it closes itself. The thread is no daemon: a program that ends without `close` still
    finishes what it was saving.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._waiting: deque[tuple[CheckpointSnapshot, Future[Path]]] = deque()
        self._running = False
        self._closed = False
        self._error: BaseException | None = None  # not yet raised

    @property
    def outstanding(self) -> int:
        """Saves that are waiting or being written."""
        with self._changed:
            return len(self._waiting) + self._running

    def submit(self, snapshot: CheckpointSnapshot, *, owned: bool = False) -> Future[Path]:
        """Save `snapshot` in the background; the future gives the checkpoint's folder, or the error.

        owned: nobody will change the arrays any more. Otherwise they are copied before this returns. Returns at once
        unless two saves are outstanding. Errors: an earlier save's; HybridError for a wrong snapshot or after
        `close`.
        """
        snapshot.validate()
        if not owned:
            snapshot = snapshot.owned()
        future: Future[Path] = Future()
        with self._changed:
            self._raise_error()
            if self._closed:
                raise HybridError("the checkpoint writer is closed")
            self._changed.wait_for(lambda: len(self._waiting) + self._running < MAX_OUTSTANDING)
            self._raise_error()
            self._waiting.append((snapshot, future))
            if not self._running:
                self._running = True
                threading.Thread(target=self._work, name="checkpoint-writer").start()
        return future

    def wait(self) -> None:
        """Return when nothing is outstanding. Errors: those of the saves."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._running)
            self._raise_error()

    def close(self) -> None:
        """Like `wait`, and nothing more can be submitted."""
        with self._changed:
            self._closed = True
        self.wait()

    def __enter__(self) -> AsyncCheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except BaseException as late:
            if error is None:
                raise
            error.add_note(f"a checkpoint also could not be saved: {late}")

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._running = False
                    self._changed.notify_all()
                    return
                snapshot, future = self._waiting.popleft()
                self._changed.notify_all()
            try:
                path = self._store.save(snapshot)
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error
                future.set_exception(error)
            else:
                future.set_result(path)
            del snapshot  # its arrays may be all the memory there is
            with self._changed:
                self._changed.notify_all()
