"""One process a run folder: a lock that the system releases when the process ends, however it ends."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybrid.errors import ConfigError

FILE = "run.lock"
NAME_BYTES = 256
# Whoever looks holds the lock for an instant; that is no reason to refuse a run.
PATIENCE_SECONDS = 0.5
HELD = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)  # what a lock is answered that another process has


@contextmanager
def locked(run_dir: Path, patience: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Hold the folder's lock inside the block. ConfigError if another process holds it, for `patience` seconds, or if
    the file system has no locks.

    The file has the name of this machine in it.
    """
    handle = os.open(run_dir / FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        until = time.monotonic() + patience
        while not _taken_in(run_dir, handle):
            if time.monotonic() >= until:
                raise ConfigError(
                    f"{run_dir}: another process is training in this folder; choose another --run-dir"
                ) from None
            time.sleep(0.02)
        with contextlib.suppress(OSError):  # a full disk: then nobody can tell where this was
            os.ftruncate(handle, 0)
            os.write(handle, _machine())
        yield
    finally:
        os.close(handle)


def is_abandoned(run_dir: Path) -> bool:
    """Whether the process that had the folder's lock last was one of this machine, and has ended.

    False where that cannot be known: file systems that several machines share need not share locks, so the processes
    of another machine are taken at their word.
    """
    flags = os.O_RDWR | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
    try:
        handle = os.open(run_dir / FILE, flags)
    except OSError:
        return False
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode) or not _taken(handle):
            return False
        return os.read(handle, NAME_BYTES) == _machine()
    except OSError:
        return False
    finally:
        os.close(handle)


def _taken_in(run_dir: Path, handle: int) -> bool:
    try:
        return _taken(handle)
    except OSError as error:
        raise ConfigError(
            f"{run_dir}: this file system cannot lock files ({error.strerror}), so nothing would keep a second process "
            "from training in the folder; choose a --run-dir on another one"
        ) from error


def _machine() -> bytes:
    return platform.node().encode("utf-8", "backslashreplace")[:NAME_BYTES] or b"?"


def _taken(handle: int) -> bool:
    """Whether this process has the lock now. OSError where there are no locks."""
    try:
        _lock(handle)
    except OSError as error:
        if error.errno in HELD:
            return False
        raise
    return True


if sys.platform == "win32":
    import msvcrt

    def _lock(handle: int) -> None:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
