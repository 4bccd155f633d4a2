"""What saving asks of a file system, one method per kind of operation.

The store writes through an object of this class and through nothing else, so a test can stop the process at exactly
one operation, slow the writing down, or let a disk run full.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from hybrid.errors import HybridError

_BLOCK_BYTES = 1024 * 1024
_SLOW_BLOCK_BYTES = 64 * 1024


class OsFilesystem:
    """The operating system's files. With `bytes_per_second`, writing is no faster than that on average. Errors:
    OSError.
    """

    def __init__(self, bytes_per_second: float | None = None) -> None:
        self._rate = bytes_per_second
        self._due = 0.0

    def create_folder(self, path: Path) -> None:
        """Create `path` and the folders above it that are missing, and make them last."""
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            self.sync_folder(folder.parent)

    def create_file(self, path: Path) -> BinaryIO:
        """A new file for writing, unbuffered; FileExistsError if there is one."""
        return path.open("xb", buffering=0)

    def write_data(self, file: BinaryIO, block: memoryview) -> None:
        """Write a block of any file but the manifest."""
        self._write(file, block)

    def write_manifest(self, file: BinaryIO, block: memoryview) -> None:
        """Write a block of the manifest."""
        self._write(file, block)

    def sync_file(self, file: BinaryIO) -> None:
        """Return when the bytes written to `file` are on the disk."""
        os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """Return when the names in the folder `path` are on the disk."""
        if os.name == "nt":  # Windows neither needs this nor lets a folder be opened
            return
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        """Give a folder another name in one step; `target` must not exist."""
        source.rename(target)

    def remove_folder(self, path: Path) -> None:
        """Delete a folder and what is in it."""
        shutil.rmtree(path)

    def blocks(self, data: memoryview) -> list[memoryview]:
        """`data` in the pieces that one write takes."""
        size = _BLOCK_BYTES if self._rate is None else _SLOW_BLOCK_BYTES
        return [data[start : start + size] for start in range(0, len(data), size)]

    def _write(self, file: BinaryIO, block: memoryview) -> None:
        rest = block
        while len(rest):
            rest = rest[file.write(rest) :]
        if self._rate is not None:
            now = time.monotonic()
            self._due = max(self._due, now) + len(block) / self._rate
            time.sleep(self._due - now)


@contextlib.contextmanager
def fresh(target: Path) -> Iterator[Path]:
    """A sibling of `target` to write, a file or a folder, which then gets its name, or is removed if anything fails.

    Errors: HybridError when `target` exists or the disk refuses.
    """
    if target.exists():
        raise HybridError(f"{target} is there already: choose another name")
    temporary = target.with_name(f".tmp-{target.name}-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.rename(target)
    except OSError as error:
        raise HybridError(f"{target}: could not be written: {error.strerror or error}") from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
