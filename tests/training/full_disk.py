"""A disk that fills up, in place of `metrics_log.FileIO`."""

from __future__ import annotations

import errno
from io import FileIO
from typing import Any


def full_after(rows: int) -> type[FileIO]:
    """Files that take so many rows, over all of them, and of the next one half."""

    class Filling(FileIO):
        left = rows

        def write(self, data: Any) -> int:
            Filling.left -= 1
            if Filling.left > -1:
                return super().write(data)
            if Filling.left == -1:
                return super().write(bytes(data)[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

    return Filling
