"""Archives that are damaged or hostile, made from a good one byte by byte, and what the refusal says."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from hybrid.checkpoint.zip_entries import read_content, read_entries

Files = dict[str, bytes]


def archive(files: Files) -> bytes:
    """A zip of the files without compression."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as target:
        for name, data in files.items():
            target.writestr(zipfile.ZipInfo(name), data)
    return out.getvalue()


def raw(files: list[tuple[str, bytes]], **options: int) -> bytes:
    """A zip with what `zipfile` would not write: names twice or of any kind, and the given header values."""
    out = bytearray()
    directory = bytearray()
    for name, data in files:
        fields = {"flags": 0, "method": 0, "crc": zlib.crc32(data), "packed": len(data), "size": len(data), **options}
        common = struct.pack(
            "<HHHHIII", fields["flags"], fields["method"], 0, 33, fields["crc"], fields["packed"], fields["size"]
        )
        text = name.encode("utf-8")
        offset = options.get("offset", len(out))
        out += struct.pack("<IH", 0x04034B50, 20) + common + struct.pack("<HH", len(text), 0) + text + data
        directory += struct.pack("<IHH", 0x02014B50, 20, 20) + common
        directory += struct.pack("<HHHHHII", len(text), 0, 0, 0, 0, 0, offset) + text
    begin = len(out)
    out += directory
    out += struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, len(files), len(files), len(directory), begin, 0)
    return bytes(out)


def damaged(files: Files) -> Iterator[tuple[str, bytes, str]]:
    """(name of the case, archive, part of the message)."""
    good = archive(files)
    first, content = next(iter(files.items()))
    listed = list(files.items())
    begin = struct.unpack("<I", good[-6:-2])[0]  # of the table of contents

    yield "nothing", b"", "0 bytes are no archive"
    yield "text", b"hello, this is a text and no archive at all", "cut, damaged, or no archive"
    yield "cut", good[:-1], "cut, damaged, or no archive"
    yield "cut in front", good[7:], "is not where"
    yield "more behind", good + b"x", "cut, damaged, or no archive"
    yield "more in front", b"x" + good, "is not where"
    yield "comment", good[:-2] + b"\x01\x00x", "cut, damaged, or no archive"
    for name in ("../a", "/etc/passwd", "a/b", "a\\b", "..", "", ".hidden", "C:evil", "nul", "é", "a\n", "folder/"):
        yield f"name {name!r}", raw([*listed, (name, b"x")]), "a file has the name"
    yield "twice", raw([*listed, (first, content)]), f"two files have the name {first!r}"
    yield "twice on some systems", raw([*listed, (first.upper(), content)]), "two files have the name"
    yield "many", raw([(f"f{index}", b"") for index in range(65)]), "65 files; at most 64"
    yield "compressed", raw(listed, method=8), "is compressed"
    yield "encrypted", raw(listed, flags=1), "is encrypted"
    yield "size behind", raw(listed, flags=8), "without its size in front"
    yield "two sizes", raw(listed, size=5), "has two sizes"
    yield "too long", raw([(first, content)], size=10**6, packed=10**6), "reaches into the table of contents"
    yield "all in one place", raw(listed, offset=0), "differs from the table of contents"
    yield "nowhere", raw(listed, offset=10**6), "lies beyond its end"
    yield "no header there", raw(listed, offset=3), "is not where the table of contents says"
    yield "overlapping", overlapping(), "begins inside another"
    yield "checksum", raw(listed, crc=7), "CRC-32"
    yield "zip64 without a field", raw([(first, content)], size=2**32 - 1, packed=2**32 - 1), "lacks a size"
    yield "zip64 without an end", changed(good, -10, "<I", 2**32 - 1), "zip64 end is damaged"
    yield "fewer than said", changed(good, -14, "<HH", 5, 5), "table of contents is damaged"
    yield "more than said", changed(good, -14, "<HH", 1, 1), "has more in it than files"
    yield "two numbers of files", changed(good, -14, "<HH", 1, 2), "cut, damaged, or no archive"
    yield "of two disks", changed(good, -18, "<H", 1), "cut, damaged, or no archive"
    yield "size changed in front", changed(good, 22, "<I", 4), "differs from the table of contents"
    yield "name changed in front", changed(good, 30, "<B", 0x41), "differs from the table of contents"
    yield "an endless extra field", changed(good, begin + 30, "<H", 4), ""


def changed(data: bytes, at: int, form: str, *values: int) -> bytes:
    """The archive with other numbers at a place (from the end, if it is negative)."""
    place = at if at >= 0 else len(data) + at
    packed = struct.pack(form, *values)
    return data[:place] + packed + data[place + len(packed) :]


def overlapping() -> bytes:
    """A file whose bytes are another file, header and all."""
    inner = raw([("inner", b"12345")])
    local = inner[: 30 + 5 + 5]
    outer = struct.pack("<IHHHHHIIIHH", 0x04034B50, 20, 0, 0, 0, 33, zlib.crc32(local), len(local), len(local), 5, 0)
    body = outer + b"outer" + local
    directory = b""
    for name, data, offset in ((b"outer", local, 0), (b"inner", b"12345", 35)):
        directory += struct.pack("<IHHHHHHIII", 0x02014B50, 20, 20, 0, 0, 0, 33, zlib.crc32(data), len(data), len(data))
        directory += struct.pack("<HHHHHII", len(name), 0, 0, 0, 0, 0, offset) + name
    return body + directory + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 2, 2, len(directory), len(body), 0)


def read_all(path: Path) -> dict[str, bytes]:
    """The files that our reader finds."""
    with path.open("rb") as stream:
        entries = sorted(read_entries(str(path), stream), key=lambda entry: entry.name)
        return {entry.name: b"".join(read_content(str(path), stream, entry)) for entry in entries}


def names(path: Path) -> list[str]:
    """The files that Python's own reader finds, each of them read and compared with its checksum."""
    with zipfile.ZipFile(path) as opened:
        assert opened.testzip() is None
        return sorted(opened.namelist())


def sizes(path: Path) -> list[tuple[str, int]]:
    """The files and their sizes as Python's own reader sees them."""
    with zipfile.ZipFile(path) as opened:
        return [(info.filename, info.file_size) for info in opened.infolist()]


def forced_zip64(path: Path, files: Files) -> None:
    """An archive with the headers of files beyond 4 GiB."""
    with zipfile.ZipFile(path, "w") as target:
        for name, data in files.items():
            with target.open(name, "w", force_zip64=True) as sink:
                sink.write(data)
