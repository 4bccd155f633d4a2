"""The memory of the machine that a run is on, as far as this process may use it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

# Where control groups are, by what /proc/self/cgroup says of their kind: version 2 names no controller, and version 1
# has a tree for memory alone. A group may use what it, and each group around it, may.
_TREES = {
    "": (("sys/fs/cgroup", "memory.max"), ("sys/fs/cgroup/unified", "memory.max")),
    "memory": (("sys/fs/cgroup/memory", "memory.limit_in_bytes"),),
}


def machine_memory(root: Path = Path("/")) -> int | None:
    """Bytes of memory that this process may have at most: what is built in, or less where it is in a container or
    another control group (a job of Slurm or systemd). None where the system does not tell. root: of the file system."""
    found = []
    with contextlib.suppress(AttributeError, OSError, ValueError):  # Windows has no sysconf
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if (limit := group_memory(root)) is not None:
        found.append(limit)
    return min((count for count in found if count > 0), default=None)


def group_memory(root: Path = Path("/")) -> int | None:
    """Bytes that the control groups of this process allow; None without a limit. A group of version 1 that has none
    says so with a number that no machine has."""
    found = []
    for file in _limits(root):
        with contextlib.suppress(OSError, ValueError):  # it is not there, or says "max"
            found.append(int(file.read_text(encoding="ascii")))
    return min((count for count in found if count > 0), default=None)


def _limits(root: Path) -> Iterator[Path]:
    """The files that may have a limit. What is above the group that a container sees as the outermost has no name in
    it, and the kernel then gives the path of another view: the outermost counts in any case."""
    for controllers, path in _groups(root):
        kinds = controllers.split(",")
        for tree, name in (place for kind, places in _TREES.items() if kind in kinds for place in places):
            inside = PurePosixPath(path.lstrip("/"))
            for group in (inside, *inside.parents):
                if ".." not in group.parts:
                    yield root / tree / group / name


def _groups(root: Path) -> Iterator[tuple[str, str]]:
    """Controllers and path of each group of this process; the outermost ones, where the system does not tell."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        lines = ["0::/", "1:memory:/"]
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        if separator:
            yield controllers, path
