"""Saving in the background is the same as saving at once: nothing is lost, merged, torn or kept quiet."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from checkpoint import examples
from hybrid.checkpoint.filesystem import OsFilesystem
from hybrid.checkpoint.store import CheckpointStore
from hybrid.checkpoint.writer import AsyncCheckpointWriter
from hybrid.errors import HybridError


class Gate(examples.Unsynced):
    """Writing stops at the first byte until the gate is opened; afterwards it may fail."""

    def __init__(self, error: OSError | None = None) -> None:
        super().__init__()
        self.open = threading.Event()
        self.reached = threading.Event()
        self.error = error

    def write_data(self, file: BinaryIO, block: memoryview) -> None:
        self.reached.set()
        assert self.open.wait(30)
        if self.error is not None:
            raise self.error
        super().write_data(file, block)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


def store(path: Path, filesystem: OsFilesystem) -> CheckpointStore:
    return CheckpointStore(path, filesystem=filesystem, clock=examples.clock)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_saved_is_the_moment_of_submission(tmp_path: Path, gate: Gate) -> None:
    """Training goes on in the same arrays while the disk is slow; the result equals a synchronous save, byte for
    byte.
    """
    snapshot = examples.snapshot()
    synchronous = store(tmp_path / "a", examples.Unsynced()).save(examples.snapshot())
    with AsyncCheckpointWriter(store(tmp_path / "b", gate)) as writer:
        future = writer.submit(snapshot)
        assert gate.reached.wait(30)
        for array in (*snapshot.model.values(), *snapshot.optimizer.values()):
            array += 1
        gate.open.set()
    assert contents(future.result()) == contents(synchronous)


def test_arrays_that_are_given_away_are_not_copied(tmp_path: Path, gate: Gate) -> None:
    snapshot = examples.snapshot()
    with AsyncCheckpointWriter(store(tmp_path, gate)) as writer:
        future = writer.submit(snapshot, owned=True)
        assert gate.reached.wait(30)
        snapshot.optimizer["moment1/model.norm.weight"][:] = 7
        gate.open.set()
    loaded = store(tmp_path, gate).load(future.result())
    assert np.array_equal(loaded.optimizer["moment1/model.norm.weight"], np.full(4, 7, np.float32))


def test_two_saves_may_be_outstanding_and_a_third_waits(tmp_path: Path, gate: Gate) -> None:
    writer = AsyncCheckpointWriter(store(tmp_path, gate))
    futures = [writer.submit(examples.snapshot(1)), writer.submit(examples.snapshot(2))]
    assert writer.outstanding == 2
    third = threading.Thread(target=lambda: futures.append(writer.submit(examples.snapshot(3))))
    third.start()
    time.sleep(0.05)
    assert third.is_alive() and writer.outstanding == 2
    gate.open.set()
    third.join(30)
    writer.close()
    assert writer.outstanding == 0
    assert [future.result().name for future in futures] == ["step-00000001", "step-00000002", "step-00000003"]
    chain = [store(tmp_path, gate).load(future.result()).manifest for future in futures]
    assert [m.lineage.sequence for m in chain] == [1, 2, 3]
    assert [m.lineage.previous_checkpoint_hash for m in chain[1:]] == [m.checkpoint_hash for m in chain[:2]]


def test_submitting_returns_before_the_disk_is_done(tmp_path: Path, gate: Gate) -> None:
    writer = AsyncCheckpointWriter(store(tmp_path, gate))
    future = writer.submit(examples.snapshot())
    assert gate.reached.wait(30) and not future.done()
    assert store(tmp_path, gate).latest() is None
    gate.open.set()
    writer.wait()
    assert future.done() and store(tmp_path, gate).latest() is not None


@pytest.mark.parametrize("way", ["submit", "wait", "close"])
def test_an_error_is_raised_at_the_next_call_once(tmp_path: Path, way: str) -> None:
    gate = Gate(OSError(28, "No space left on device"))
    gate.open.set()
    writer = AsyncCheckpointWriter(store(tmp_path, gate))
    future = writer.submit(examples.snapshot())
    assert isinstance(future.exception(30), HybridError)
    with pytest.raises(HybridError, match="No space left on device"):
        writer.submit(examples.snapshot(6)) if way == "submit" else getattr(writer, way)()
    gate.error = None
    if way != "close":
        writer.submit(examples.snapshot(7)).result(30)
    writer.close()


def test_a_wrong_snapshot_is_refused_at_once(tmp_path: Path, gate: Gate) -> None:
    writer = AsyncCheckpointWriter(store(tmp_path, gate))
    with pytest.raises(HybridError, match="lacks the tensor"):
        writer.submit(examples.snapshot(model={}))
    writer.close()
    with pytest.raises(HybridError, match="the checkpoint writer is closed"):
        writer.submit(examples.snapshot())


def test_the_error_of_the_run_is_not_hidden_by_one_of_saving(tmp_path: Path) -> None:
    gate = Gate(OSError(5, "Input/output error"))
    gate.open.set()
    with pytest.raises(KeyError) as caught, AsyncCheckpointWriter(store(tmp_path, gate)) as writer:
        writer.submit(examples.snapshot())
        raise KeyError("the run's own")
    assert any("Input/output error" in note for note in caught.value.__notes__)


def test_a_slow_disk_takes_its_time(tmp_path: Path) -> None:
    """The throttle that the loop's own test uses: about 7 kB at 20 kB/s."""
    slow = OsFilesystem(bytes_per_second=20_000)
    begin = time.monotonic()
    path = store(tmp_path, slow).save(examples.snapshot())
    size = sum(p.stat().st_size for p in path.iterdir())
    assert time.monotonic() - begin > size / 20_000 * 0.9


def test_while_a_slow_disk_writes_computing_goes_on(tmp_path: Path) -> None:
    """Waiting for the disk does not hold the interpreter: the work ends long before the save does."""
    work: Any = np.random.default_rng(0).standard_normal((64, 64))
    writer = AsyncCheckpointWriter(store(tmp_path, OsFilesystem(bytes_per_second=5_000)))
    future = writer.submit(examples.snapshot())
    for _ in range(100):
        work @ work
    assert not future.done()
    writer.close()
    assert future.done()
