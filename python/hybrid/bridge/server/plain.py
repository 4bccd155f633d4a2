"""Files that are what they seem to be, and lie where they seem to lie: nothing else is read of a folder that others
write."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a path leads to a place in or below the folder, wherever its links lead."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # RuntimeError: links that lead to each other
        return False


def open_plain(path: Path, *, links: bool) -> BinaryIO | None:
    """A plain file for reading; None for one that is not there, and for what is none. links: whether one may lead to
    it."""
    follow = 0 if links else getattr(os, "O_NOFOLLOW", 0)
    try:
        # A pipe would wait for somebody who writes into it.
        handle = os.open(path, os.O_RDONLY | follow | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        return None
    return os.fdopen(handle, "rb")
