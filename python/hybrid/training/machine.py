"""The machine that a run is on."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container


def machine_memory() -> int | None:
    """Bytes of memory that this process may have at most; None where the system does not tell."""
    found = []
    with contextlib.suppress(AttributeError, OSError, ValueError):  # Windows has no sysconf
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        found.append(int(CGROUP_LIMIT.read_text(encoding="ascii")))
    return min((count for count in found if count > 0), default=None)
