"""One process a run folder: a lock that the system releases when the process ends, however it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybrid.errors import ConfigError

FILE = "run.lock"


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the folder's lock inside the block. ConfigError if another process holds it."""
    handle = os.open(run_dir / FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            _lock(handle)
        except OSError:
            raise ConfigError(
                f"{run_dir}: another process is training in this folder; choose another --run-dir"
            ) from None
        yield
    finally:
        os.close(handle)


if sys.platform == "win32":
    import msvcrt

    def _lock(handle: int) -> None:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
