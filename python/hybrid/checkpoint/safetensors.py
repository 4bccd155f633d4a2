"""safetensors files, read strictly and written deterministically.

A file is an 8-byte little-endian length, that many bytes of JSON header, then the tensors' raw little-endian bytes
without a gap:

    {"__metadata__": {"format": "pt"}, "model.norm.weight": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}}

Reading checks the whole header against the file's size before it allocates for a single tensor, hashes every byte as
it goes by, and returns either everything or an error that names the tensor. Why this is our own code:
docs/decisions/0002-safetensors-reader.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hybrid.checkpoint import digests, strict_json
from hybrid.checkpoint.digests import Digester, FileDigest
from hybrid.errors import CheckpointCorrupt, CheckpointNotFound, HybridError

MAX_HEADER_BYTES: Final = 100_000_000  # the format's own limit
_MAX_SAFE_INTEGER: Final = 2**53 - 1  # sizes above it are beyond exact numbers in JavaScript, and beyond any file
_BLOCK_BYTES: Final = 4 * 1024 * 1024

# Stored type -> NumPy type of the raw bytes. BF16 is widened on reading; types narrower than a byte and F8 have no
# NumPy form.
_NUMPY_TYPES: Final[dict[str, str]] = {
    "BOOL": "|u1", "U8": "|u1", "I8": "|i1", "U16": "<u2", "I16": "<i2", "F16": "<f2", "BF16": "<u2",
    "U32": "<u4", "I32": "<i4", "F32": "<f4", "U64": "<u8", "I64": "<i8", "F64": "<f8", "C64": "<c8",
}  # fmt: skip
_STORED_TYPES: Final[dict[str, str]] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "float16": "F16", "uint32": "U32",
    "int32": "I32", "float32": "F32", "uint64": "U64", "int64": "I64", "float64": "F64", "complex64": "C64",
}  # fmt: skip

TensorArray = NDArray[Any]


class LateTensor(Protocol):
    """A tensor that is to be written, but is not in memory."""

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    def blocks(self) -> Iterator[memoryview]:
        """The little-endian bytes of its elements, in row-major order. A block is good until the next is asked for."""
        ...


class SafetensorsError(CheckpointCorrupt):
    """A file that breaks the format. `category` names the rule (the list is in docs/formats/checkpoint.md)."""

    def __init__(self, source: str, category: str, detail: str) -> None:
        super().__init__(f"{source}: {detail}")
        self.category = category


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a header: stored dtype name, shape, and its byte range within the data part."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """A checked header. `entries` are in the order of their bytes; `data_start` is where the data part begins."""

    entries: tuple[TensorEntry, ...]
    metadata: dict[str, str] | None
    data_start: int
    data_size: int


@dataclass(frozen=True)
class ScannedFile:
    """A whole file that was read and hashed. header: dtypes and shapes as stored. sha256: of each tensor's raw bytes as
    stored. digest: of the whole file.
    """

    header: Header
    sha256: dict[str, str]
    digest: FileDigest


@dataclass(frozen=True)
class TensorFile(ScannedFile):
    """A whole file in memory. tensors: by name, as `decode` gives them, each owning its memory."""

    tensors: dict[str, TensorArray]


_File = TypeVar("_File", bound=ScannedFile)


# --- the header ----------------------------------------------------------------------------------------------------


def header_length(source: str, prefix: bytes, file_size: int) -> int:
    """The length of the header from the first 8 bytes of a file of `file_size` bytes. Errors: SafetensorsError."""
    if file_size < 8 or len(prefix) < 8:
        raise SafetensorsError(source, "file_too_small", f"{file_size} bytes, but a safetensors file has at least 8")
    length = int.from_bytes(prefix[:8], "little")
    if length > MAX_HEADER_BYTES:
        detail = f"the header claims {length} bytes; at most {MAX_HEADER_BYTES} are allowed"
        raise SafetensorsError(source, "header_too_large", detail)
    if 8 + length > file_size:
        detail = f"the header claims {length} bytes, but {file_size - 8} follow: truncated?"
        raise SafetensorsError(source, "header_beyond_file", detail)
    return length


def parse_header(source: str, header: bytes, data_size: int) -> Header:
    """Check a header against the size of the data part behind it. Allocates nothing of that size.

    Errors: SafetensorsError.
    """
    if header[:1] in (b" ", b"\t", b"\n", b"\r"):
        raise SafetensorsError(source, "header_start", "the header must begin with '{', not with white space")
    try:
        document = strict_json.parse(header)
    except strict_json.StrictJsonError as error:
        category = {"utf8": "header_not_utf8", "syntax": "header_not_json", "duplicate": "duplicate_name"}[error.kind]
        raise SafetensorsError(source, category, f"the header is refused: {error}") from None
    if not isinstance(document, dict):
        raise SafetensorsError(source, "header_not_object", "the header must be a JSON object")
    metadata = _metadata(source, document.pop("__metadata__")) if "__metadata__" in document else None
    entries = [_entry(source, name, info, data_size) for name, info in document.items()]
    entries.sort(key=lambda entry: (entry.start, entry.end))
    position = 0
    for entry in entries:
        if entry.start < position:
            detail = f"tensor {entry.name!r} begins at byte {entry.start}, inside its neighbour"
            raise SafetensorsError(source, "offsets_overlap", detail)
        if entry.start > position:
            detail = f"bytes {position} to {entry.start - 1} before tensor {entry.name!r} belong to none"
            raise SafetensorsError(source, "hole", detail)
        position = entry.end
    if position != data_size:
        raise SafetensorsError(source, "trailing_bytes", f"{data_size - position} bytes follow the last tensor")
    return Header(tuple(entries), metadata, 8 + len(header), data_size)


def _metadata(source: str, value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise SafetensorsError(source, "metadata_not_string", "__metadata__ must be an object of strings")
    for key, text in value.items():
        if not isinstance(text, str) or strict_json.has_lone_surrogate(text):
            detail = f"__metadata__.{key} must be a string, not {text!r:.60}"
            raise SafetensorsError(source, "metadata_not_string", detail)
    return value


def _entry(source: str, name: str, info: object, data_size: int) -> TensorEntry:
    def refuse(category: str, detail: str) -> SafetensorsError:
        return SafetensorsError(source, category, f"tensor {name!r:.200}: {detail}")

    if not name:
        raise refuse("name_empty", "a tensor needs a name")
    if not isinstance(info, dict) or set(info) != {"dtype", "shape", "data_offsets"}:
        keys = sorted(info) if isinstance(info, dict) else type(info).__name__
        raise refuse("tensor_info_schema", f"expected dtype, shape and data_offsets, found {keys!r:.200}")
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _NUMPY_TYPES:
        raise refuse("dtype_unknown", f"dtype {dtype!r:.60} is none of {', '.join(_NUMPY_TYPES)}")
    if not isinstance(shape, list) or not all(_is_size(dimension) for dimension in shape):
        raise refuse("shape_invalid", f"shape {shape!r:.120} must be a list of integers of at least 0")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise refuse("offsets_invalid", f"data_offsets {offsets!r:.120} must be two integers of at least 0")
    start, end = offsets
    if start > end:
        raise refuse("offsets_invalid", f"data_offsets {offsets} run backwards")
    # The dimensions other than 0 must make sense by themselves: array libraries multiply them before they notice the
    # 0.
    size, empty = np.dtype(_NUMPY_TYPES[dtype]).itemsize, False
    for dimension in shape:
        size, empty = size * (dimension or 1), empty or dimension == 0
        if size > _MAX_SAFE_INTEGER:
            raise refuse("size_overflow", f"{dtype} of shape {shape} is more than {_MAX_SAFE_INTEGER} bytes")
    size = 0 if empty else size
    if size != end - start:
        detail = f"{dtype} of shape {shape} takes {size} bytes, but data_offsets {offsets} give {end - start}"
        raise refuse("shape_size_mismatch", detail)
    if end > data_size:
        detail = f"data_offsets {offsets} lie beyond the {data_size} bytes of data: truncated?"
        raise refuse("offsets_beyond_data", detail)
    return TensorEntry(name, dtype, tuple(shape), start, end)


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0


# --- reading -------------------------------------------------------------------------------------------------------


def read_file(path: Path, expected: FileDigest | None = None, source: str | None = None) -> TensorFile:
    """Read every tensor of `path`, hashing as it goes; with `expected`, the file's size and digests must be those.

    `source` is the file's name in messages. Errors: CheckpointNotFound (no such file), SafetensorsError,
    CheckpointCorrupt.
    """
    return _whole_file(path, expected, source, read_stream)


def scan_file(path: Path, expected: FileDigest | None = None, source: str | None = None) -> ScannedFile:
    """All that `read_file` checks, in a few megabytes of memory: no tensor is kept."""
    return _whole_file(path, expected, source, scan_stream)


def pour_file(path: Path, expected: FileDigest, take: Callable[[str, TensorArray], None]) -> ScannedFile:
    """Like `read_file`, but `take` is given each tensor once it has been read, in the order of the file, and nothing is
    kept. Whether the file is the expected one turns out behind the last tensor.
    """

    def read(source: str, stream: BinaryIO, size: int) -> ScannedFile:
        return _read(source, stream, size, lambda entry: _into_array(source, entry, take))

    return _whole_file(path, expected, None, read)


def read_stream(source: str, stream: BinaryIO, size: int) -> TensorFile:
    """Like `read_file`, from an open stream of exactly `size` bytes."""
    tensors: dict[str, TensorArray] = {}
    found = _read(source, stream, size, lambda entry: _into_array(source, entry, tensors.__setitem__))
    return TensorFile(found.header, found.sha256, found.digest, tensors)


def _into_array(source: str, entry: TensorEntry, take: Callable[[str, TensorArray], None]) -> Iterator[memoryview]:
    raw = np.empty(entry.end - entry.start, np.uint8)
    yield from _blocks(raw.data)
    take(entry.name, decode(source, entry, raw))


def scan_stream(source: str, stream: BinaryIO, size: int) -> ScannedFile:
    """Like `scan_file`, from an open stream of exactly `size` bytes."""
    block = np.empty(_BLOCK_BYTES, np.uint8)

    def room(entry: TensorEntry) -> Iterator[memoryview]:
        for start in range(entry.start, entry.end, _BLOCK_BYTES):
            piece = block[: min(_BLOCK_BYTES, entry.end - start)]
            yield piece.data
            _check_values(source, entry, piece)

    return _read(source, stream, size, room)


def _whole_file(
    path: Path, expected: FileDigest | None, source: str | None, read: Callable[[str, BinaryIO, int], _File]
) -> _File:
    source = source or str(path)
    with open_regular(path, source) as stream:
        size = os.fstat(stream.fileno()).st_size
        if expected is not None and size != expected.size:
            raise CheckpointCorrupt(f"{source}: {size} bytes, but the manifest says {expected.size}: cut or changed")
        try:
            result = read(source, stream, size)
        except OSError as error:
            raise CheckpointCorrupt(f"{source}: cannot be read: {error.strerror or error}") from error
    if expected is not None:
        digests.expect(source, result.digest, expected)
    return result


def _read(source: str, stream: BinaryIO, size: int, room: Callable[[TensorEntry], Iterable[memoryview]]) -> ScannedFile:
    """Read and hash a stream. room: the pieces of memory for the bytes of a tensor, each taken when the one before is
    full."""
    prefix = _read_exactly(source, stream, min(8, size))
    text = _read_exactly(source, stream, header_length(source, prefix, size))
    header = parse_header(source, text, size - 8 - len(text))
    digester = Digester()
    digester.update(memoryview(prefix))
    digester.update(memoryview(text))
    sha256: dict[str, str] = {}
    for entry in header.entries:
        own = hashlib.sha256()
        for piece in room(entry):
            if _read_into(stream, piece) != len(piece):
                raise SafetensorsError(source, "truncated", f"tensor {entry.name!r}: the file ends inside it")
            digester.update(piece)
            own.update(piece)
        sha256[entry.name] = own.hexdigest()
    return ScannedFile(header, sha256, digester.result())


def decode(source: str, entry: TensorEntry, raw: NDArray[np.uint8]) -> TensorArray:
    """The array of one tensor from its raw bytes: the stored type, except BF16, which is widened to float32
    (exactly).
    """
    _check_values(source, entry, raw)
    stored = raw.view(_NUMPY_TYPES[entry.dtype])
    if entry.dtype == "BOOL":
        stored = stored.view(np.bool_)
    elif entry.dtype == "BF16":
        stored = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored.reshape(entry.shape)


def _check_values(source: str, entry: TensorEntry, raw: NDArray[np.uint8]) -> None:
    if entry.dtype == "BOOL" and raw.size and int(raw.max()) > 1:
        raise SafetensorsError(source, "bool_invalid", f"tensor {entry.name!r}: a BOOL byte is neither 0 nor 1")


def read_header(path: Path, source: str | None = None) -> Header:
    """The checked header of a file, without its tensors."""
    source = source or str(path)
    with open_regular(path, source) as stream:
        return _stream_header(source, stream)


def read_tensor(path: Path, header: Header, name: str) -> TensorArray:
    """One tensor of a file whose header was read before. For looking at files; `read_file` verifies digests."""
    entry = next((entry for entry in header.entries if entry.name == name), None)
    if entry is None:
        raise CheckpointCorrupt(f"{path}: there is no tensor {name!r}")
    with open_regular(path, str(path)) as stream:
        stream.seek(header.data_start + entry.start)
        raw = np.empty(entry.end - entry.start, np.uint8)
        if _read_into(stream, raw.data) != raw.size:
            raise SafetensorsError(str(path), "truncated", f"tensor {name!r}: the file ends inside it")
    return decode(str(path), entry, raw)


def open_regular(path: Path, source: str) -> BinaryIO:
    """Open a regular file for reading. A pipe or a device would block or never end, so both are refused."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointCorrupt(f"{source}: not a regular file")
        return path.open("rb", buffering=0)
    except FileNotFoundError:
        raise CheckpointNotFound(f"{source}: there is no such file") from None
    except OSError as error:
        raise CheckpointCorrupt(f"{source}: cannot be read: {error.strerror or error}") from error


def _stream_header(source: str, stream: BinaryIO) -> Header:
    size = os.fstat(stream.fileno()).st_size
    text = _read_exactly(source, stream, header_length(source, _read_exactly(source, stream, min(8, size)), size))
    return parse_header(source, text, size - 8 - len(text))


def _read_exactly(source: str, stream: BinaryIO, count: int) -> bytes:
    buffer = bytearray(count)
    if _read_into(stream, memoryview(buffer)) != count:
        raise SafetensorsError(source, "truncated", "the file ends inside the header")
    return bytes(buffer)


def _read_into(stream: BinaryIO, view: memoryview) -> int:
    done = 0
    while done < len(view):
        count = stream.readinto(view[done:])  # type: ignore[attr-defined]  # RawIOBase and BytesIO both have it
        if not count:
            break
        done += count
    return done


def _blocks(view: memoryview) -> Iterable[memoryview]:
    return (view[start : start + _BLOCK_BYTES] for start in range(0, len(view), _BLOCK_BYTES))


# --- writing -------------------------------------------------------------------------------------------------------


def write(
    sink: Callable[[memoryview], object],
    tensors: Mapping[str, TensorArray | LateTensor],
    metadata: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Write a file through `sink`, piece by piece; the result is each tensor's sha256 of raw bytes.

    The same tensors always give the same bytes: entries are ordered by item size (largest first, so that every tensor
    is aligned), then by name. A view is written as its own elements, never its backing storage. Errors: HybridError
    naming the tensor (a dtype without a stored form, an empty or reserved name, two names for one piece of memory: a
    tied tensor is saved once).
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    sink(memoryview(_header_bytes(order, tensors, metadata)))
    sha256: dict[str, str] = {}
    for name in order:
        own = hashlib.sha256()
        for piece in blocks_of(tensors[name]):
            own.update(piece)
            sink(piece)
        sha256[name] = own.hexdigest()
    return sha256


def stored_dtype(name: str, array: TensorArray | LateTensor) -> str:
    """The stored type's name, such as `F32`. Errors: HybridError."""
    stored = _STORED_TYPES.get(array.dtype.name)
    if stored is None:
        expected = ", ".join(_STORED_TYPES)
        raise HybridError(f"tensor {name!r}: dtype {array.dtype} has no safetensors form; expected one of {expected}")
    return stored


def blocks_of(tensor: TensorArray | LateTensor) -> Iterable[memoryview]:
    """The bytes of a tensor as `LateTensor.blocks` gives them."""
    return _blocks(raw_bytes(tensor)) if isinstance(tensor, np.ndarray) else tensor.blocks()


def raw_bytes(array: TensorArray) -> memoryview:
    """The little-endian bytes of the elements in row-major order; a copy only where the array is not that already."""
    plain = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return plain.reshape(-1).view(np.uint8).data


def file_size(tensors: Mapping[str, TensorArray | LateTensor], metadata: Mapping[str, str] | None = None) -> int:
    """How many bytes `write` will write."""
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    return len(_header_bytes(order, tensors, metadata)) + sum(tensors[name].nbytes for name in order)


def _header_bytes(
    order: list[str], tensors: Mapping[str, TensorArray | LateTensor], metadata: Mapping[str, str] | None
) -> bytes:
    document: dict[str, object] = {}
    if metadata is not None:
        document["__metadata__"] = {key: metadata[key] for key in sorted(metadata)}
    position = 0
    memory: dict[tuple[int, int], str] = {}
    for name in order:
        array = tensors[name]
        if not name or name == "__metadata__" or strict_json.has_lone_surrogate(name):
            raise HybridError(f"a tensor cannot be named {name!r}")
        if isinstance(array, np.ndarray) and array.nbytes:
            other = memory.setdefault((array.__array_interface__["data"][0], array.nbytes), name)
            if other != name:
                raise HybridError(f"tensors {other!r} and {name!r} are the same memory: a tied tensor is saved once")
        end = position + array.nbytes
        document[name] = {
            "dtype": stored_dtype(name, array),
            "shape": list(array.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise HybridError(
            f"a header of {len(text)} bytes for {len(order)} tensors: the format allows {MAX_HEADER_BYTES}"
        )
    return len(text).to_bytes(8, "little") + text
