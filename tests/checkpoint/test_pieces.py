"""Tensors that several processes have written in pieces give the files that one process writes, or an error."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint import examples
from hybrid.checkpoint import safetensors
from hybrid.checkpoint.pieces import SHARDING, PieceFolder
from hybrid.checkpoint.snapshot import CheckpointSnapshot
from hybrid.checkpoint.store import CheckpointStore
from hybrid.errors import HybridError

NORM = "model.norm.weight"  # of 4 elements


def cut(folder: Path, tensors: dict[str, Any], parts: int) -> None:
    """Files of pieces: each has the rows that a process among so many would write."""
    folder.mkdir(parents=True)
    for part in range(parts):
        pieces, offsets = {}, {}
        for name, array in tensors.items():
            share = -(-len(array) // parts)
            first = part * share
            if first < len(array):
                pieces[name] = array[first : first + share]
                offsets[name] = {"saved_offsets": [first] + [0] * (array.ndim - 1)}
        write(folder / f"shard-{part}.safetensors", pieces, offsets)


def write(path: Path, pieces: dict[str, Any], offsets: Any) -> None:
    blocks: list[bytes] = []
    safetensors.write(lambda block: blocks.append(bytes(block)), pieces, {SHARDING: json.dumps(offsets)})
    path.write_bytes(b"".join(blocks))


def in_pieces(folder: Path, snapshot: CheckpointSnapshot, parts: int) -> tuple[PieceFolder, CheckpointSnapshot]:
    cut(folder, {**snapshot.model, **snapshot.optimizer}, parts)
    pieces = PieceFolder(folder)
    late = [
        pieces.tensors({name: t.shape for name, t in tensors.items()})
        for tensors in (snapshot.model, snapshot.optimizer)
    ]
    return pieces, replace(snapshot, model=late[0], optimizer=late[1])


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_a_checkpoint_from_pieces_is_the_one_of_a_single_process(tmp_path: Path, parts: int) -> None:
    """Seven parts are more than some tensors have rows."""
    whole = examples.snapshot()
    pieces, late = in_pieces(tmp_path / "pieces", whole, parts)
    found, expected = (
        CheckpointStore(tmp_path / name, filesystem=examples.Unsynced(), clock=examples.clock).save(snapshot)
        for name, snapshot in (("late", late.owned()), ("whole", whole))
    )
    pieces.close()
    files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in (found, expected)]
    assert files[0] == files[1]
    assert late.state_hash() == whole.state_hash()


def test_nothing_is_read_before_all_pieces_have_arrived(tmp_path: Path) -> None:
    arrived: list[bool] = []
    tensor = PieceFolder(tmp_path / "pieces", lambda: arrived.append(True)).tensors({NORM: (4,)})[NORM]
    assert (tensor.shape, tensor.nbytes, arrived) == ((4,), 16, [])
    cut(tmp_path / "pieces", {NORM: np.arange(4, dtype=np.float32)}, 2)
    for _ in range(2):
        assert b"".join(bytes(block) for block in tensor.blocks()) == np.arange(4, dtype=np.float32).tobytes()
    assert arrived == [True]


def read(folder: Path, shape: tuple[int, ...] = (4,)) -> None:
    list(PieceFolder(folder).tensors({NORM: shape})[NORM].blocks())


@pytest.mark.parametrize(
    ("rows", "first", "after"),
    [(2, 0, 2), (2, 2, 0), (5, 0, 0), (2, 1, 0)],
    ids=["the end is missing", "the beginning is missing", "too long", "shifted"],
)
def test_rows_that_do_not_add_up_are_refused(tmp_path: Path, rows: int, first: int, after: int) -> None:
    piece = {NORM: np.ones(rows, np.float32)}
    write(tmp_path / "shard-0.safetensors", piece, {NORM: {"saved_offsets": [first]}})
    if rows == 5:
        after = 5
    with pytest.raises(HybridError, match=f"do not add up to its 4 rows: after row {after} there is a gap"):
        read(tmp_path)


def test_rows_that_are_there_twice_are_refused(tmp_path: Path) -> None:
    for file in ("shard-0.safetensors", "shard-1.safetensors"):
        write(tmp_path / file, {NORM: np.ones(4, np.float32)}, {NORM: {"saved_offsets": [0]}})
    with pytest.raises(HybridError, match="after row 4 there is a gap or an overlap"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("array", "offsets", "message"),
    [
        (np.ones(4, np.float32), {}, "do not say where its pieces belong"),
        (np.ones(4, np.float32), [], "do not say where its pieces belong"),
        (np.ones(4, np.float64), {NORM: {"saved_offsets": [0]}}, "not made of whole rows in float32"),
        (np.ones((4, 1), np.float32), {NORM: {"saved_offsets": [0, 1]}}, "not made of whole rows in float32"),
    ],
    ids=["no offset", "no object", "another type", "columns"],
)
def test_files_that_are_no_pieces_are_refused(tmp_path: Path, array: Any, offsets: Any, message: str) -> None:
    write(tmp_path / "shard-0.safetensors", {NORM: array}, offsets)
    with pytest.raises(HybridError, match=message):
        read(tmp_path)


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "shard-0.safetensors", {NORM: np.ones(4, np.float32)}, {NORM: {"saved_offsets": [0]}})
    tensor = PieceFolder(tmp_path).tensors({NORM: (4,)})[NORM]
    assert len(list(tensor.blocks())) == 1
    with (tmp_path / "shard-0.safetensors").open("r+b") as file:
        file.truncate((tmp_path / "shard-0.safetensors").stat().st_size - 4)
    with pytest.raises(HybridError, match=f"it ends inside tensor '{NORM}'"):
        list(tensor.blocks())
