"""Files that know their digests, and folders that appear whole or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybrid.errors import DataContractError, StopRequested

CHUNK_BYTES = 8 * 2**20
# A half-made folder that nothing was written to for this long belongs to a process that is gone.
ABANDONED_SECONDS = 3600.0

# progress(stage, done, total): `total` is None where it is not known beforehand.
Progress = Callable[[str, int, "int | None"], None]
ShouldStop = Callable[[], bool]


class DigestWriter:
    """Writes a file and computes, on the way, its size, its sha256 and the sha256 of each 8 MiB chunk."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._whole = hashlib.sha256()
        self._chunk = hashlib.sha256()
        self._room = CHUNK_BYTES
        self._chunks: list[str] = []
        self._size = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._whole.update(data)
        self._size += len(data)
        view = memoryview(data)
        while len(view):
            part = view[: self._room]
            self._chunk.update(part)
            self._room -= len(part)
            view = view[len(part) :]
            if self._room == 0:
                self._end_chunk()

    def finish(self) -> dict[str, Any]:
        """Flush to the disk, close, and return the manifest's record: {"bytes", "sha256", "chunks"}."""
        if self._room < CHUNK_BYTES:
            self._end_chunk()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"bytes": self._size, "sha256": self._whole.hexdigest(), "chunks": self._chunks}

    def close(self) -> None:
        """Close without a record; for a build that failed."""
        self._file.close()

    def _end_chunk(self) -> None:
        self._chunks.append(self._chunk.hexdigest())
        self._chunk = hashlib.sha256()
        self._room = CHUNK_BYTES


def check_size(path: Path, record: dict[str, Any]) -> None:
    """DataContractError unless the file exists and has the size of its record."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataContractError(f"{path}: {error.strerror}; the manifest lists it, so build the store again") from None
    expected = record["bytes"]
    if size < expected:
        raise DataContractError(
            f"{path}: truncated at offset {size}, expected {expected} bytes; copy it again or build the store again"
        )
    if size > expected:
        raise DataContractError(
            f"{path}: {size} bytes, {size - expected} more than expected from offset {expected} on; "
            "build the store again"
        )


def verify_file(path: Path, record: dict[str, Any], on_bytes: Callable[[int], None]) -> None:
    """Hash the whole file and compare with its record. DataContractError names the file and the range of offsets that
    differs. `on_bytes(count)` is called after each chunk, and may raise."""
    check_size(path, record)
    whole = hashlib.sha256()
    with path.open("rb") as file:
        for number, expected in enumerate(record["chunks"]):
            data = file.read(CHUNK_BYTES)
            if hashlib.sha256(data).hexdigest() != expected:
                first = number * CHUNK_BYTES
                raise DataContractError(
                    f"{path}: the bytes at offsets {first}..{first + len(data) - 1} (chunk {number}) are not "
                    "what was written: their sha256 differs from the manifest's; "
                    "copy the file again or build the store again"
                )
            whole.update(data)
            on_bytes(len(data))
    if whole.hexdigest() != record["sha256"]:
        raise DataContractError(f"{path}: the chunks match the manifest but the sha256 of the whole file does not")


def stop_if(should_stop: ShouldStop | None, what: str) -> None:
    """StopRequested if a stop is wanted."""
    if should_stop is not None and should_stop():
        raise StopRequested(f"stopped on request while {what}; nothing half made was kept")


@contextmanager
def new_folder(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """A folder to fill, which becomes `target` when the block ends well and is removed when it does not.

    It lies beside the target, so that renaming stays within one file system. An existing target is a DataContractError,
    before any work is done, unless `replace`.
    """
    if target.exists() and not replace:
        raise DataContractError(f"{target} exists already; choose another folder, or replace this one (`--replace`)")
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target)
    building = target.parent / f"{_prefix(target)}{uuid.uuid4().hex[:12]}"
    building.mkdir()
    try:
        yield building
        sync_folder(building)
        _move_into_place(building, target, replace)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    sync_folder(target.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable, where the system lets a folder be synced."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prefix(target: Path) -> str:
    return f".{target.name}.building-"


def _move_into_place(building: Path, target: Path, replace: bool) -> None:
    if not (replace and target.exists()):
        building.rename(target)
        return
    aside = target.parent / f"{_prefix(target)}{uuid.uuid4().hex[:12]}"
    target.rename(aside)
    try:
        building.rename(target)
    except BaseException:
        aside.rename(target)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _remove_abandoned(target: Path) -> None:
    """A process that was killed could not clean up; the next one does."""
    for leftover in target.parent.iterdir():
        if not leftover.name.startswith(_prefix(target)):
            continue
        try:
            newest = max(path.stat().st_mtime for path in (leftover, *leftover.iterdir()))
        except OSError:  # no folder, or another process has just finished with it
            continue
        if time.time() - newest > ABANDONED_SECONDS:
            shutil.rmtree(leftover, ignore_errors=True)
