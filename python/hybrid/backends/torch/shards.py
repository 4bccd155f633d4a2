"""Saving a state that lies on several ranks: each writes what it has of it, at the same time, in the background.

A rank first copies its own rows of every tensor to the host; that is all that a save keeps in memory, and training goes
on. A thread then writes the copies with torch's distributed checkpointing, in its safetensors form, into a folder that
all ranks see; `hybrid.checkpoint.pieces` reads them from there. Whoever has a tensor in several copies (DDP, HSDP)
shares its rows out among them, so that nothing is written twice and every rank has the same share.

The thread has a process group of its own, because its collectives run beside those of the training. It is a daemon: a
process that has to end because of an error elsewhere does not wait for it, and the save that it leaves behind is none.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from hybrid.backends.torch.ranks import FOREVER, Ranks
from hybrid.backends.torch.session import ShardedState
from hybrid.errors import ConfigError, HybridError

# A file is put together in memory, twice, before it is written: this bounds it, as far as single tensors allow.
FILE_BYTES = 32 * 2**20
# A rank that fails has this long to write what it has of a save: the other ranks can finish it then.
SETTLING_SECONDS = 4.0


@dataclass(frozen=True)
class Piece:
    """Rows of a tensor of `shape`, from row `first` on, in host memory of their own."""

    first: int
    shape: tuple[int, ...]
    rows: Tensor


class Shards:
    """Saves of one rank. Every rank makes one, and calls `start` for the same saves in the same order. As a context
    manager it waits for the last one, or, behind an error, a short while.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._last: Future[None] | None = None
        self.staged_bytes = 0  # of the last save
        with ranks.together("connecting for checkpoints"):
            self._group = dist.new_group(backend="gloo", timeout=FOREVER)

    def start(self, state: ShardedState, folder: Path, what: str) -> Future[None]:
        """Copy this rank's part of `state` and write it into `folder`, which exists, in the background.

        what: the action, in messages. The result comes when all ranks have written; where one fails, all have the same
        error. Waits for the save before: one is under way at a time.
        """
        self.wait()
        if not folder.is_dir():
            raise HybridError(f"{folder} is not there: processes on several machines need one file system for it")
        tensors = {**state.model, **state.optimizer}
        pieces = stage(tensors, self._ranks.rank, self._ranks.size)
        self.staged_bytes = sum(piece.rows.nbytes for piece in pieces.values())
        files = _files({name: pieces[name].rows.nbytes if name in pieces else 0 for name in _reading_order(tensors)})
        future: Future[None] = Future()

        def work() -> None:
            try:
                _write(pieces, files, folder, self._group)
            except CheckpointException as error:
                # Torch tells every rank what failed on which.
                errors = {rank: failure[0] for rank, failure in error.failures.items()}
                future.set_exception(self._ranks.post_together(what, errors))
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        self._last = future
        threading.Thread(target=work, name="shards", daemon=True).start()
        return future

    def wait(self) -> None:
        """Return when this rank has written everything. Errors: those of the last save, once."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.wait()
        elif self._last is not None:
            wait([self._last], SETTLING_SECONDS)


def stage(state: Mapping[str, Tensor], rank: int, size: int) -> dict[str, Piece]:
    """Host copies of what this rank has to write of each tensor; nothing where others have all of its rows."""
    pieces = {}
    for name, tensor in state.items():
        first, rows = _own_rows(name, tensor, rank, size)
        if len(rows):
            # Each in an allocation of its own: torch's writer copies views of larger ones again.
            copy = torch.from_numpy(np.empty(tuple(rows.shape), np.float32))
            pieces[name] = Piece(first, tuple(tensor.shape), copy.copy_(rows))
    return pieces


def _own_rows(name: str, tensor: Tensor, rank: int, size: int) -> tuple[int, Tensor]:
    """The first of the rows that this rank writes, and a view of them."""
    if not isinstance(tensor, DTensor):
        return _part(0, tensor.detach(), rank, size)
    mesh, copies, index = tensor.device_mesh, 1, 0
    for dimension, (placement, place) in enumerate(zip(tensor.placements, mesh.get_coordinate() or (), strict=True)):
        if placement.is_replicate():
            copies, index = copies * mesh.size(dimension), index * mesh.size(dimension) + place
        elif not placement.is_shard(0):
            raise ConfigError(f"tensor {name!r} is placed as {placement}: a checkpoint is made of whole rows")
    local = tensor.to_local().detach()
    chunks = tensor.__create_chunk_list__() if len(local) else []  # type: ignore[no-untyped-call]
    return _part(chunks[0].offsets[0], local, index, copies) if chunks else (0, local)


def _part(first: int, rows: Tensor, index: int, parts: int) -> tuple[int, Tensor]:
    share = -(-len(rows) // parts)
    begin = min(len(rows), index * share)
    return first + begin, rows[begin : begin + share]


def _reading_order(names: Mapping[str, Any]) -> list[str]:
    """The order in which the files of a checkpoint want the tensors: weights, then moments (`<slot>/<name>`)."""
    return sorted(names, key=lambda name: ("/" in name, name))


def _files(sizes: Mapping[str, int]) -> dict[str, int]:
    """The number of the file, from 1 on, that holds this rank's part of each tensor. Rank 0 decides for all: none has
    more of a tensor than it."""
    files, number, filled = {}, 1, 0
    for name, size in sizes.items():
        if filled and filled + size > FILE_BYTES:
            number, filled = number + 1, 0
        filled += size
        files[name] = number
    return files


def _write(pieces: dict[str, Piece], files: dict[str, int], folder: Path, group: Any) -> None:
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files, save_distributed=True)
    writer.per_thread_copy_ahead = 0  # everything is on the host already
    save(pieces, storage_writer=writer, planner=_Planner(), process_group=group)


class _Planner(DefaultSavePlanner):
    """Tells torch which rows of which tensors a rank writes. The plan of all ranks is torch's: it refuses rows that are
    missing or written twice."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator
        self.flatten_state_dict = False

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_item(name, piece) for name, piece in self.state_dict.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        rows: Tensor = self.state_dict[index.fqn].rows
        return rows


def _item(name: str, piece: Piece) -> WriteItem:
    offsets = torch.Size([piece.first] + [0] * (len(piece.shape) - 1))
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=piece.rows.size()),
            properties=TensorProperties(dtype=piece.rows.dtype),
            size=torch.Size(piece.shape),
        ),
    )
