"""A run that saves, and is killed with SIGKILL at a chosen operation. As a program it kills one child for each case
it is given: `crashing.py FOLDER OPERATION:COUNT:TORN ...` leaves in FOLDER/<case> what such a run leaves behind.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

from checkpoint import examples
from hybrid.checkpoint.filesystem import OsFilesystem
from hybrid.checkpoint.store import CheckpointStore

OPERATIONS = ("data", "sync", "manifest", "rename", "remove")

# (step, seed of the numbers): ordinary saves with retention, then a save that replaces another state of its step.
SCENARIO = ((1, 1), (2, 2), (3, 3), (3, 33), (4, 4))


class CountingFilesystem(OsFilesystem):
    """Counts its operations by kind; small blocks, so that there are many."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def reached(self, operation: str, torn: Any = None) -> None:
        """Called before each operation; `torn` does half of it."""
        self.counts[operation] += 1

    def blocks(self, data: memoryview) -> list[memoryview]:
        return [data[start : start + 512] for start in range(0, len(data), 512)]

    def write_data(self, file: BinaryIO, block: memoryview) -> None:
        self.reached("data", lambda: file.write(block[: len(block) // 2]))
        super().write_data(file, block)

    def write_manifest(self, file: BinaryIO, block: memoryview) -> None:
        self.reached("manifest", lambda: file.write(block[: len(block) // 2]))
        super().write_manifest(file, block)

    def sync_file(self, file: BinaryIO) -> None:
        self.reached("sync")
        super().sync_file(file)

    def sync_folder(self, path: Path) -> None:
        self.reached("sync")
        super().sync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        # A rename is whole or not at all: torn means that it is done and nothing after it.
        self.reached("rename", lambda: source.rename(target))
        super().rename(source, target)

    def remove_folder(self, path: Path) -> None:
        self.reached("remove", lambda: next(iter(sorted(path.iterdir()))).unlink())
        super().remove_folder(path)


class DeadlyFilesystem(CountingFilesystem):
    """Ends the process, without any clean-up, at the given operation (1 is the first of its kind), or half-way
    through it.
    """

    def __init__(self, operation: str, count: int, torn: bool) -> None:
        super().__init__()
        self.last = (operation, count, torn)

    def reached(self, operation: str, torn: Any = None) -> None:
        super().reached(operation)
        if self.last[:2] == (operation, self.counts[operation]):
            if self.last[2] and torn is not None:
                torn()
            os.kill(os.getpid(), signal.SIGKILL)


def run(folder: Path, filesystem: OsFilesystem, scenario: tuple[tuple[int, int], ...] = SCENARIO) -> CheckpointStore:
    """Save the scenario. `folder/acknowledged` gets a line when a save has returned."""
    store = CheckpointStore(folder / "run", keep_last=2, filesystem=filesystem, clock=examples.clock)
    for step, seed in scenario:
        store.save(examples.snapshot(step, seed=seed))
        with (folder / "acknowledged").open("a") as file:
            file.write(f"{step} {seed}\n")
    return store


def main(folder: Path, cases: list[str]) -> None:
    for case in cases:
        operation, count, torn = case.split(":")
        child = os.fork()
        if child == 0:
            (folder / case).mkdir()
            run(folder / case, DeadlyFilesystem(operation, int(count), torn == "torn"))
            os._exit(1)  # the operation was never reached
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"{case}: status {status}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
