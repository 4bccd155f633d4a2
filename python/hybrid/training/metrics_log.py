"""Files of JSON lines in the run folder: one object a line, written and flushed as it happens.

A process that is killed can leave half a line at the end; reading stops there. A resumed run cuts what lies beyond its
checkpoint, and keeps the cut rows beside it. A disk that is full, or fails, is a HybridError.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from hybrid.errors import HybridError

METRICS = "metrics.jsonl"
DISCARDED = "metrics.discarded.jsonl"
VALIDATION = "validation.jsonl"
VALIDATION_DISCARDED = "validation.discarded.jsonl"

Row = dict[str, Any]


class JsonLines:
    """An append-only file of rows that have a `step`, in step order. It grows on disk, not in memory."""

    def __init__(self, path: Path, discarded: Path) -> None:
        self.path = path
        self._discarded = discarded
        self._file: FileIO | None = None

    def append(self, row: Row) -> None:
        """Write one row at once. ValueError for a number that JSON does not have."""
        line = json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"
        rest = memoryview(line.encode("utf-8", "surrogatepass"))
        with _disk_errors(self.path):
            if self._file is None:
                self._file = FileIO(self.path, "ab")
            while rest:
                rest = rest[self._file.write(rest) :]

    def cut(self, step: int) -> int:
        """Move the rows after `step` to the discarded file; how many there were. Half a line at the end is dropped."""
        self.close()
        if not self.path.exists():
            return 0
        keep = 0
        cut: list[bytes] = []
        for line, row in _lines(self.path):
            if cut or row["step"] > step:
                cut.append(line)
            else:
                keep += len(line)
        if cut:
            with _disk_errors(self._discarded), self._discarded.open("ab") as file:
                file.writelines(cut)
                file.flush()
                os.fsync(file.fileno())
        with _disk_errors(self.path):
            if keep != self.path.stat().st_size:
                os.truncate(self.path, keep)
        return len(cut)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise HybridError(
            f"{path}: could not be written: {error.strerror or error}; checkpoints are untouched: see to it, and start "
            "the run again to go on"
        ) from error


def read_rows(path: Path) -> Iterator[Row]:
    """The complete rows of a file; none if it does not exist."""
    if path.exists():
        for _, row in _lines(path):
            yield row


def _lines(path: Path) -> Iterator[tuple[bytes, Row]]:
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                return
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                return
            yield line, row
