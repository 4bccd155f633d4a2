"""Tensors that lie in pieces: several processes have each written the rows that they have, into one folder.

The files are those of torch's `HuggingFaceStorageWriter`: safetensors, with a member DCP_SHARDING_INFO in the metadata
that says in JSON where in its tensor each piece begins: {"<name>": {"saved_offsets": [row, 0, ..]}, ..}. Nothing here
needs torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from hybrid.checkpoint import safetensors, strict_json
from hybrid.errors import HybridError

SHARDING: Final = "DCP_SHARDING_INFO"
BLOCK_BYTES: Final = 4 * 1024 * 1024
_MOST_OPEN: Final = 64  # files


@dataclass(frozen=True)
class _Piece:
    """Some rows of a tensor. start: where in the file their bytes begin."""

    path: Path
    start: int
    row: int
    shape: tuple[int, ...]


class PieceFolder:
    """The pieces in `folder`. arrived: returns when all of them are there; called once, before the first is read."""

    def __init__(self, folder: Path, arrived: Callable[[], object] = lambda: None) -> None:
        self.folder = folder
        self._arrived = arrived
        self._open: OrderedDict[Path, BinaryIO] = OrderedDict()

    def tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, PiecedTensor]:
        """Tensors of these names and shapes, in float32. Reads nothing yet."""
        return {name: PiecedTensor(self, name, shape) for name, shape in shapes.items()}

    def pieces(self, name: str, shape: tuple[int, ...]) -> list[_Piece]:
        """What a tensor consists of, in the order of its rows. HybridError unless they are all there, each once."""
        pieces = self._index.get(name, [])
        row = 0
        for piece in pieces:
            if piece.row != row or piece.shape[1:] != shape[1:]:
                break
            row += piece.shape[0]
        else:
            if row == shape[0]:
                return pieces
        raise HybridError(
            f"{self.folder}: the pieces of tensor {name!r} do not add up to its {shape[0]} rows: after row {row} there "
            "is a gap or an overlap; processes on several machines need one file system for the run folder"
        )

    def stream(self, path: Path) -> BinaryIO:
        """An open file; the ones used last stay open."""
        stream = self._open.pop(path, None)
        if stream is None:
            if len(self._open) >= _MOST_OPEN:
                self._open.popitem(last=False)[1].close()
            stream = safetensors.open_regular(path, str(path))
        self._open[path] = stream
        return stream

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    @cached_property
    def _index(self) -> dict[str, list[_Piece]]:
        self._arrived()
        index: dict[str, list[_Piece]] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            header = safetensors.read_header(path)
            offsets = _offsets(path, header)
            for entry in header.entries:
                if entry.dtype != "F32" or any(offsets[entry.name][1:]):
                    raise HybridError(f"{path}: tensor {entry.name!r} is not made of whole rows in float32")
                piece = _Piece(path, header.data_start + entry.start, offsets[entry.name][0], entry.shape)
                index.setdefault(entry.name, []).append(piece)
        for pieces in index.values():
            pieces.sort(key=lambda piece: piece.row)
        return index


@dataclass(frozen=True)
class PiecedTensor:
    """Implements `safetensors.LateTensor`."""

    folder: PieceFolder
    name: str
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float32)

    @property
    def nbytes(self) -> int:
        return 4 * int(np.prod(self.shape, dtype=np.int64))

    def blocks(self) -> Iterator[memoryview]:
        """Errors: HybridError when rows are missing; OSError."""
        pieces = self.folder.pieces(self.name, self.shape)
        buffer = memoryview(bytearray(min(BLOCK_BYTES, self.nbytes)))
        for piece in pieces:
            position, left = piece.start, 4 * int(np.prod(piece.shape, dtype=np.int64))
            while left:
                stream = self.folder.stream(piece.path)
                stream.seek(position)
                block = buffer[: min(left, len(buffer))]
                count = stream.readinto(block)  # type: ignore[attr-defined]  # raw files have it
                if not count:
                    raise HybridError(f"{piece.path}: it ends inside tensor {self.name!r}")
                position, left = position + count, left - count
                yield block[:count]


def _offsets(path: Path, header: safetensors.Header) -> dict[str, list[int]]:
    """Where in its tensor each piece of a file begins."""
    try:
        told = strict_json.parse((header.metadata or {})[SHARDING].encode("utf-8"))
        return {entry.name: told[entry.name]["saved_offsets"] for entry in header.entries}
    except (KeyError, TypeError, strict_json.StrictJsonError) as error:
        raise HybridError(f"{path}: its metadata do not say where its pieces belong ({SHARDING}): {error}") from error
