"""The files in an uncompressed zip, read strictly, because archives come from strangers.

Plain names, each once; nothing compressed or encrypted; every header says the same as the table of contents; no two
files lie in the same bytes. Files beyond 4 GiB use zip64. The layout is that of PKWARE's APPNOTE 6.3.3, sections 4.3
to 4.5. (`zipfile` is made to open as much as possible, and believes the table of contents alone.)
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

from hybrid.checkpoint.manifest import name_problem
from hybrid.errors import CheckpointCorrupt

_LOCAL: Final = 0x04034B50
_CENTRAL: Final = 0x02014B50
_END: Final = 0x06054B50
_END64: Final = 0x06064B50
_LOCATOR: Final = 0x07064B50
_ZIP64: Final = 1  # the extra field with sizes beyond 32 bits
_MAX32: Final = 2**32 - 1
_MAX16: Final = 2**16 - 1
_UTF8_NAME: Final = 0x800

_BLOCK_BYTES: Final = 1024 * 1024
_MAX_ENTRIES: Final = 64
_MAX_DIRECTORY_BYTES: Final = 1 << 20
_MAX_SAFE_INTEGER: Final = 2**53 - 1


@dataclass(frozen=True)
class Entry:
    """One file in a zip. start: where its bytes begin; crc: their CRC-32."""

    name: str
    size: int
    crc: int
    start: int


@dataclass(frozen=True)
class _Listed:
    """One file as the table of contents has it. offset: of its header."""

    name: str
    size: int
    crc: int
    offset: int
    flags: int


def read_entries(source: str, stream: BinaryIO) -> list[Entry]:
    """The files of a zip, in the order of their bytes. `source`: its name in messages. Errors: CheckpointCorrupt."""
    return _Archive(source, stream).entries()


def read_content(source: str, stream: BinaryIO, entry: Entry) -> Iterator[bytes]:
    """The bytes of a file in blocks; after the last one they are compared with their checksum. Errors:
    CheckpointCorrupt.
    """
    stream.seek(entry.start)
    left, crc = entry.size, 0
    while left:
        block = stream.read(min(left, _BLOCK_BYTES))
        if not block:
            raise CheckpointCorrupt(f"{source}: it ended while it was read")
        left -= len(block)
        crc = zlib.crc32(block, crc)
        yield block
    if crc != entry.crc:
        raise CheckpointCorrupt(
            f"{source}/{entry.name}: CRC-32 {crc:08x}, but the archive says {entry.crc:08x}: it was changed or damaged"
        )


class _Archive:
    def __init__(self, source: str, stream: BinaryIO) -> None:
        self._source = source
        self._stream = stream
        self._size = stream.seek(0, os.SEEK_END)

    def entries(self) -> list[Entry]:
        count, begin, end = self._directory()
        if count > _MAX_ENTRIES:
            raise self._refuse(f"{count} files; at most {_MAX_ENTRIES} are read")
        if begin > end or end - begin > _MAX_DIRECTORY_BYTES:
            raise self._refuse("its table of contents has an impossible size")
        directory = self._read(begin, end - begin)
        listed: list[_Listed] = []
        names: set[str] = set()
        for _ in range(count):
            one = self._central(directory)
            if one.name.lower() in names:
                raise self._refuse(f"two files have the name {one.name!r}")
            names.add(one.name.lower())
            listed.append(one)
        if directory.left:
            raise self._refuse("its table of contents has more in it than files")
        entries: list[Entry] = []
        position = 0
        for one in sorted(listed, key=lambda one: one.offset):
            start = self._local(one)
            if one.offset < position:
                raise self._refuse(f"file {one.name!r} begins inside another")
            position = start + one.size
            if position > begin:
                raise self._refuse(f"file {one.name!r} reaches into the table of contents")
            entries.append(Entry(one.name, one.size, one.crc, start))
        return entries

    def _directory(self) -> tuple[int, int, int]:
        """How many files there are, and where the table of contents begins and ends."""
        if self._size < 22:
            raise self._refuse(f"{self._size} bytes are no archive")
        tail = self._read(self._size - 22, 22)
        signature = tail.u32()
        disk, first, here, count = tail.u16(), tail.u16(), tail.u16(), tail.u16()
        length, begin, end = tail.u32(), tail.u32(), self._size - 22
        if signature != _END or tail.u16() or disk or first or here != count:
            raise self._refuse(
                "does not end like a packed checkpoint: it is cut, damaged, or no archive; copy or download it again"
            )
        if count == _MAX16 or begin == _MAX32 or length == _MAX32:
            locator = self._read(self._size - 42, 20)
            mark, part, end, parts = locator.u32(), locator.u32(), locator.u64(), locator.u32()
            if mark != _LOCATOR or part or parts != 1 or end + 56 != self._size - 42:
                raise self._refuse("its zip64 end is damaged")
            wide = self._read(end, 56)
            mark, rest = wide.u32(), wide.u64()
            wide.take(12)
            here, count, length, begin = wide.u64(), wide.u64(), wide.u64(), wide.u64()
            if mark != _END64 or rest != 44 or here != count:
                raise self._refuse("its zip64 end is damaged")
        if begin + length != end:
            raise self._refuse("its table of contents is not where its end says: cut or damaged")
        return count, begin, end

    def _central(self, directory: _Bytes) -> _Listed:
        if directory.left < 46 or directory.u32() != _CENTRAL:
            raise self._refuse("its table of contents is damaged")
        directory.take(4)
        flags, method = directory.u16(), directory.u16()
        directory.take(4)
        crc, packed, size = directory.u32(), directory.u32(), directory.u32()
        name_length, extra_length, comment_length = directory.u16(), directory.u16(), directory.u16()
        disk = directory.u16()
        directory.take(6)
        offset = directory.u32()
        if directory.left < name_length + extra_length + comment_length:
            raise self._refuse("its table of contents is damaged")
        name = directory.text(name_length)
        if problem := name_problem(name):
            raise self._refuse(f"a file has the name {name!r:.200}: {problem}")
        file = f"file {name!r}"
        size, packed, offset = self._wide(directory.take(extra_length), (size, packed, offset), file)
        directory.take(comment_length)
        if method:
            raise self._refuse(f"{file} is compressed: archives of checkpoints are not")
        if flags & ~_UTF8_NAME or disk:
            raise self._refuse(f"{file} is encrypted, in parts, or without its size in front")
        if size != packed:
            raise self._refuse(f"{file} has two sizes, {size} and {packed}")
        return _Listed(name, size, crc, offset, flags)

    def _local(self, listed: _Listed) -> int:
        """Where the bytes of a file begin; its own header must agree with the table of contents."""
        file = f"file {listed.name!r}"
        head = self._read(listed.offset, 30)
        if head.u32() != _LOCAL:
            raise self._refuse(f"{file} is not where the table of contents says")
        head.take(2)
        flags, method = head.u16(), head.u16()
        head.take(4)
        crc, packed, size, name_length, extra_length = head.u32(), head.u32(), head.u32(), head.u16(), head.u16()
        rest = self._read(listed.offset + 30, name_length + extra_length)
        name = rest.text(name_length)
        sizes = self._wide(rest.take(extra_length), (size, packed), file)
        same = (name, flags, method, crc) == (listed.name, listed.flags, 0, listed.crc)
        if not same or sizes != [listed.size, listed.size]:
            raise self._refuse(f"{file} has a header that differs from the table of contents")
        return listed.offset + 30 + name_length + extra_length

    def _wide(self, extra: _Bytes, values: tuple[int, ...], file: str) -> list[int]:
        """Values of 32 bits, or what the zip64 extra field says where they are full."""
        found: _Bytes | None = None
        while extra.left:
            identity, length = (0, _MAX32) if extra.left < 4 else (extra.u16(), extra.u16())
            if length > extra.left:
                raise self._refuse(f"{file} has a damaged extra field")
            field = extra.take(length)
            if identity == _ZIP64:
                if found is not None:
                    raise self._refuse(f"{file} has two zip64 fields")
                found = field
        full = []
        for value in values:
            if value == _MAX32:
                value = found.u64() if found is not None and found.left >= 8 else -1
                if not 0 <= value <= _MAX_SAFE_INTEGER:
                    raise self._refuse(f"{file} lacks a size that fits into a zip64 field")
            full.append(value)
        return full

    def _read(self, begin: int, length: int) -> _Bytes:
        if begin < 0 or begin + length > self._size:
            raise self._refuse("a part of it lies beyond its end: cut or damaged")
        self._stream.seek(begin)
        data = self._stream.read(length)
        if len(data) != length:
            raise self._refuse("it ended while it was read")
        return _Bytes(data)

    def _refuse(self, detail: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(f"{self._source}: {detail}")


class _Bytes:
    """Little-endian numbers one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, count: int) -> _Bytes:
        self._at += count
        return _Bytes(self._data[self._at - count : self._at])

    def u16(self) -> int:
        return self._number(2)

    def u32(self) -> int:
        return self._number(4)

    def u64(self) -> int:
        return self._number(8)

    def text(self, count: int) -> str:
        """Each byte a character: names beyond ASCII are refused later."""
        return self.take(count)._data.decode("latin-1")

    def _number(self, count: int) -> int:
        return int.from_bytes(self.take(count)._data, "little")
