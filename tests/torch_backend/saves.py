"""Scenarios of saving and loading on several ranks, for `forked`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from checkpoint import examples
from hybrid.backends.protocol import SessionState, SpreadState
from hybrid.backends.torch import shards
from hybrid.backends.torch.leading import LeadingSession, Orders, follow
from hybrid.backends.torch.ranks import Ranks
from hybrid.backends.torch.session import TorchSession
from hybrid.checkpoint import state as states
from hybrid.checkpoint.loading import CheckpointStream
from hybrid.checkpoint.manifest import Manifest
from hybrid.checkpoint.pieces import PiecedTensor
from hybrid.checkpoint.snapshot import CheckpointSnapshot
from hybrid.checkpoint.store import CheckpointStore
from hybrid.checkpoint.writer import AsyncCheckpointWriter
from hybrid.models.config import ModelConfig
from hybrid.training.parity.runtimes import session_arguments
from hybrid.training.parity.workload import SEQUENCE_LENGTH, VOCABULARY, Workload

CPU = torch.device("cpu")
# About 8 MB of state: enough that what is counted is the state.
MODEL = ModelConfig(
    vocabulary_size=1000, context_length=SEQUENCE_LENGTH, layers=2, width=128, heads=4, feed_forward_width=390,
)  # fmt: skip
LARGEST = 4 * MODEL.vocabulary_size * MODEL.width  # bytes of a tensor
FILE_BYTES = 128 * 1024
assert MODEL.vocabulary_size >= VOCABULARY


def rank() -> int:
    return int(os.environ["RANK"])


def snapshot(about: CheckpointSnapshot, state: SessionState | SpreadState) -> CheckpointSnapshot:
    """What `about` says of another state."""
    return replace(
        about,
        model=state.model,
        optimizer=state.optimizer,
        optimizer_step=state.optimizer_step,
        scaler=state.scaler,
    )


def hash_of(state: SessionState | SpreadState, manifest: Manifest) -> str:
    """The state hash that a checkpoint of `state` would have, at the place of another one."""
    return states.state_hash(
        states.digests_of_arrays(state.model),
        states.digests_of_arrays(state.optimizer),
        optimizer_step=state.optimizer_step,
        progress=manifest.progress.to_json(),
        scaler=state.scaler,
        cursor=manifest.cursor,
    )


def opened(folder: Path) -> list[tuple[bool, Path]]:
    """From now on, what this process opens below `folder`: whether to write, and the path; as far as the interpreter
    knows."""
    seen: list[tuple[bool, Path]] = []

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], (str, os.PathLike)):
            path = Path(arguments[0])
            if folder in path.parents:
                seen.append((bool(arguments[2] & (os.O_WRONLY | os.O_RDWR)), path))

    sys.addaudithook(hear)
    return seen


@contextmanager
def most_memory() -> Iterator[Callable[[], int]]:
    """How many bytes Python and NumPy held inside the block at most, beside those from before."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    peak: list[int] = []
    try:
        yield lambda: peak[0]
    finally:
        peak.append(tracemalloc.get_traced_memory()[1] - before)
        tracemalloc.stop()


def saving(folder: Path, name: str, **settings: Any) -> None:
    """Two steps, a save, and two more steps while it is held up. Each rank tells what it wrote, and how much memory it
    took; rank 0 saves the same state as one process would, for comparison."""
    shards.FILE_BYTES = FILE_BYTES
    if settings.get("sharding") == "hybrid":  # two ranks are a node
        os.environ.update(LOCAL_RANK=str(rank() % 2), LOCAL_WORLD_SIZE="2")
    gate, told = folder / f"{name}.gate", folder / f"{name}.{rank()}.json"
    facts: dict[str, Any] = {}
    seen = opened(folder / name)
    start, write = shards.Shards.start, shards._write

    def counted(self: shards.Shards, *arguments: Any) -> Any:
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        future = start(self, *arguments)
        facts["staged"] = self.staged_bytes
        facts["most"] = lambda: tracemalloc.get_traced_memory()[1] - before
        return future

    def held_up(pieces: dict[str, shards.Piece], *arguments: Any) -> None:
        facts["largest"] = max(piece.rows.nbytes for piece in pieces.values())
        while rank() == 1 and not gate.exists():
            time.sleep(0.01)
        write(pieces, *arguments)

    replaced: Any = shards
    replaced.Shards.start, replaced._write = counted, held_up
    work = Workload(name, MODEL, 4, microbatch_size=1)
    with Ranks(CPU) as ranks:
        if rank():
            follow(ranks)
        else:
            orders = Orders(ranks)
            session = LeadingSession(ranks, orders, work.model, **{**session_arguments(work), **settings})
            _steps(session, work, 1, 2)
            about = replace(examples.snapshot(2, cfg=MODEL), model={}, optimizer={})
            alone = CheckpointStore(folder / f"{name}-alone", clock=examples.clock)
            alone.save(snapshot(about, session.export_state()))
            together = CheckpointStore(folder / name, clock=examples.clock)
            writer = AsyncCheckpointWriter(together)
            pieces = together.incoming(2)
            state = session.export_pieces(pieces, "saving")
            future = writer.submit(snapshot(about, state), owned=True)
            _steps(session, work, 3, 4)
            facts["under way after two more steps"] = not future.done()
            gate.touch()
            writer.close()
            facts["files of pieces"] = sorted(path.name for path in pieces.iterdir())
            state.close()
            together.discard(pieces)
            orders.give("end", {})
    facts["most"] = facts["most"]()
    facts["written"] = sorted({path.name for writes, path in seen if writes})
    told.write_text(json.dumps(facts))


def loading(folder: Path, name: str, **settings: Any) -> None:
    """The newest checkpoint of a run into a session of these ranks, and out again: rank 0 tells its hash then."""
    facts: dict[str, Any] = {}
    work = Workload(name, MODEL, 1, microbatch_size=1)
    seen = opened(folder / name)
    with Ranks(CPU) as ranks:
        if rank():
            follow(ranks)
        else:
            orders = Orders(ranks)
            session = LeadingSession(ranks, orders, work.model, **{**session_arguments(work), **settings})
            store = CheckpointStore(folder / name)
            found = store.latest()
            assert found is not None
            stream = CheckpointStream(found.path)
            manifest = stream.about.manifest
            with (
                most_memory() as most,
                session.filling(stream.names, manifest.optimizer_step, manifest.scaler) as fill,
            ):
                stream.pour(fill)
            facts["most"] = most()
            pieces = CheckpointStore(folder / f"{name}-again").incoming(2)
            state = session.export_pieces(pieces, "saving")
            facts["hash"] = hash_of(state, manifest)
            state.close()
            orders.give("end", {})
    facts["opened"] = [path.name for _, path in seen if not path.name.startswith("shard-")]
    (folder / f"{name}.loaded-{os.environ['WORLD_SIZE']}.{rank()}.json").write_text(json.dumps(facts))


def save_fails(folder: Path, name: str, kind: str) -> None:
    """A whole run in which a save goes wrong: the disk of rank 1 is full at the second one ("full"), or a process is
    killed in it, while it writes its pieces ("writer") or puts the files together ("reader"). Or while rank 1 is still
    writing, rank 0 is asked to stop ("stop"), or rank 1 fails in a step ("step")."""
    from torch_backend import forked

    calls = [0]
    writer: Any = HuggingFaceStorageWriter
    starting: Any = shards.Shards
    tensor: Any = PiecedTensor
    session: Any = TorchSession
    original, start, blocks, accumulate = writer.write_data, starting.start, tensor.blocks, session.accumulate

    def write_data(self: Any, *arguments: Any) -> Any:
        calls[0] += 1
        if rank() == 1 and kind in ("stop", "step"):
            time.sleep(0.5)
        if rank() == 1 and calls[0] == 2 and kind == "full":
            raise OSError(28, "No space left on device")
        if rank() == 1 and calls[0] == 2 and kind == "writer":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank() == 0 and kind == "stop":
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return original(self, *arguments)

    def lonely_start(self: Any, state: Any, pieces: Path, what: str) -> Any:
        under_way = [path.name for path in pieces.parent.iterdir() if path.name.startswith(".tmp-")]
        assert rank() or under_way == [pieces.name]
        return start(self, state, pieces, what)

    def late_blocks(self: Any) -> Any:
        if kind == "reader" and calls[0] == 2 and self.name.startswith("moment1"):
            os.kill(os.getpid(), signal.SIGKILL)
        return blocks(self)

    def failing(self: Any, batch: Any) -> None:
        if rank() == 1 and kind == "step" and calls[0]:
            raise RuntimeError("boom")
        accumulate(self, batch)

    writer.write_data, starting.start, tensor.blocks, session.accumulate = (
        write_data, lonely_start, late_blocks, failing,
    )  # fmt: skip
    forked.train(folder, name, 1000 if kind == "stop" else 6, "checkpoint.every=2")


def _steps(session: LeadingSession, work: Workload, first: int, last: int) -> None:
    for step in range(first, last + 1):
        session.begin(work.info(step))
        for batch in work.microbatches(step):
            session.accumulate(batch)
        session.apply()


def restored(session: Any, run: Path) -> str:
    """In this process: the hash of a run's newest checkpoint after it went through a session."""
    store = CheckpointStore(run)
    found = store.latest()
    assert found is not None
    loaded = store.load(found)
    manifest = loaded.manifest
    session.import_state(SessionState(loaded.model, loaded.optimizer, manifest.optimizer_step, manifest.scaler))
    return hash_of(session.export_state(), manifest)


SCENARIOS = {f.__name__: f for f in (saving, loading, save_fails)}
