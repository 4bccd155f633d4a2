"""Digests of a file as its bytes go by: size, sha256 of the whole, sha256 of each 8 MiB chunk.

Chunk digests exist for those who cannot hash a stream: a browser hashes whole buffers only, and an interrupted upload
continues at the first chunk that differs.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from hybrid.errors import CheckpointCorrupt

CHUNK_BYTES: Final = 8 * 1024 * 1024


@dataclass(frozen=True)
class FileDigest:
    """What a manifest says about one file: `size` in bytes, hexadecimal `sha256`, and the `chunks`' sha256 (the last
    may be shorter; an empty file has none).
    """

    size: int
    sha256: str
    chunks: tuple[str, ...]


class Digester:
    """Feed the bytes of one file in order to `update`, then ask for the `result`."""

    def __init__(self) -> None:
        self._size = 0
        self._whole = hashlib.sha256()
        self._chunk = hashlib.sha256()
        self._chunks: list[str] = []

    def update(self, data: memoryview) -> None:
        """`data` is one-dimensional and of bytes."""
        while len(data):
            room = CHUNK_BYTES - self._size % CHUNK_BYTES
            piece = data[:room]
            self._whole.update(piece)
            self._chunk.update(piece)
            self._size += len(piece)
            if len(piece) == room:
                self._chunks.append(self._chunk.hexdigest())
                self._chunk = hashlib.sha256()
            data = data[room:]

    def result(self) -> FileDigest:
        last = [self._chunk.hexdigest()] if self._size % CHUNK_BYTES else []
        return FileDigest(self._size, self._whole.hexdigest(), (*self._chunks, *last))


def digest_bytes(data: bytes) -> FileDigest:
    """The digest of bytes that are in memory."""
    digester = Digester()
    digester.update(memoryview(data))
    return digester.result()


def expect(source: str, found: FileDigest, expected: FileDigest) -> None:
    """CheckpointCorrupt naming `source` (and the first chunk that differs) unless the two digests are equal."""
    if found == expected:
        return
    if found.size != expected.size:
        raise CheckpointCorrupt(f"{source}: {found.size} bytes, but the manifest says {expected.size}: cut or changed")
    for index, (have, want) in enumerate(zip(found.chunks, expected.chunks, strict=False)):
        if have != want:
            first, last = index * CHUNK_BYTES, min(found.size, (index + 1) * CHUNK_BYTES) - 1
            raise CheckpointCorrupt(
                f"{source}: bytes {first} to {last} have sha256 {have}, but the manifest says {want}: the file was "
                f"changed or damaged; use another checkpoint"
            )
    raise CheckpointCorrupt(
        f"{source}: sha256 {found.sha256} and {len(found.chunks)} chunks, but the manifest says {expected.sha256} "
        f"and {len(expected.chunks)}: the file or the manifest was changed"
    )
