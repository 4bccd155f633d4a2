"""Temporary folders that go with their process. What one leaves that is killed, the next removes."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

LOCK = "hybrid.lock"  # held as long as the process lives
YOUNG_SECONDS = 60.0  # its owner may not hold the lock yet


class TemporaryFolder:
    """A folder of this process, until `close`. Making one removes those that processes which are gone have left.

    prefix: of its name. parent: where it is made; None for the system's place.
    """

    def __init__(self, prefix: str, parent: str | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self._lock: int | None = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        _is_mine(self._lock)
        for other in self.path.parent.glob(f"{prefix}*"):
            if other != self.path:
                _remove_if_left(other)

    def close(self) -> None:
        """Remove it, as far as nothing in it is in use; may be called again."""
        if self._lock is not None:  # first: Windows removes no file that is open
            os.close(self._lock)
            self._lock = None
        shutil.rmtree(self.path, ignore_errors=True)


if sys.platform == "win32":

    def _is_mine(lock: int) -> bool:
        return False

    def _remove_if_left(folder: Path) -> None:
        """Nothing: a lock would not tell, and half of a folder that is in use would go."""

else:
    import fcntl

    def _is_mine(lock: int) -> bool:
        """Take the lock; whether that went well."""
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def _remove_if_left(folder: Path) -> None:
        with contextlib.suppress(OSError):  # somebody else removes it, or it is another user's
            facts = folder.lstat()
            if facts.st_uid != os.getuid() or time.time() - facts.st_mtime < YOUNG_SECONDS:
                return
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if _is_mine(lock):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
