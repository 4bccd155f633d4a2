"""The safetensors reader refuses what the format forbids, by rule and by name; everybody opens what the writer
writes.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hybrid.checkpoint import safetensors as ours
from hybrid.checkpoint.digests import CHUNK_BYTES, FileDigest, digest_bytes
from hybrid.errors import CheckpointCorrupt, CheckpointNotFound, HybridError

VECTORS = json.loads(
    (Path(__file__).resolve().parents[2] / "bridge" / "vectors" / "safetensors_bad.json").read_text(encoding="utf-8")
)
CASES: list[dict[str, Any]] = VECTORS["cases"]
QUIRKS: list[dict[str, Any]] = VECTORS["quirk_cases"]

# What other readers let pass and we refuse, because two readers could disagree about it (docs/formats/checkpoint.md).
QUIRK_CATEGORIES = {
    "integral float shape (JSON.parse cannot tell 1.0 from 1)": "shape_invalid",
    "unknown extra member in a tensor entry": "tensor_info_schema",
    "empty tensor with a huge other dimension": "size_overflow",
    "metadata is null": "metadata_not_string",
    "empty tensor name": "name_empty",
}


def read(data: bytes) -> ours.TensorFile:
    return ours.read_stream("file.safetensors", io.BytesIO(data), len(data))


def written(tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> bytes:
    out = io.BytesIO()
    ours.write(out.write, tensors, metadata)
    return out.getvalue()


def plain(array: Any) -> list[Any]:
    """Values as the vectors list them: 64-bit integers as text."""
    values = array.reshape(-1).tolist()
    return [str(value) for value in values] if array.dtype.itemsize == 8 and array.dtype.kind in "iu" else values


def test_every_vector_is_run() -> None:
    assert (len(CASES), len(QUIRKS)) == (59, 5)
    assert sum(case["expected"] == "error" for case in CASES) == 52
    assert set(QUIRK_CATEGORIES) == {case["name"] for case in QUIRKS}


@pytest.mark.parametrize("case", [case for case in CASES if case["expected"] == "error"], ids=lambda case: case["name"])
def test_a_malformed_file_is_refused_for_the_right_reason(case: dict[str, Any]) -> None:
    with pytest.raises(ours.SafetensorsError) as caught:
        read(base64.b64decode(case["base64"]))
    assert caught.value.category in [case["category"], *case["also_acceptable"]]
    assert str(caught.value).startswith("file.safetensors: ")


@pytest.mark.parametrize("case", [case for case in CASES if case["expected"] == "ok"], ids=lambda case: case["name"])
def test_a_good_file_gives_its_values(case: dict[str, Any]) -> None:
    file = read(base64.b64decode(case["base64"]))
    assert file.header.metadata == case["metadata"]
    found = {
        entry.name: (entry.dtype, list(entry.shape), plain(file.tensors[entry.name])) for entry in file.header.entries
    }
    assert found == {t["name"]: (t["dtype"], t["shape"], t["values"]) for t in case["tensors"]}


@pytest.mark.parametrize("case", QUIRKS, ids=lambda case: case["name"])
def test_what_readers_disagree_about_is_refused(case: dict[str, Any]) -> None:
    with pytest.raises(ours.SafetensorsError) as caught:
        read(base64.b64decode(case["base64"]))
    assert caught.value.category == QUIRK_CATEGORIES[case["name"]]


def header_only(header: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_nothing_is_allocated_for_a_tensor_the_file_does_not_hold() -> None:
    """A petabyte in a header of 100 bytes is refused while it is still a number."""
    size = 2**50
    with pytest.raises(ours.SafetensorsError, match="truncated"):
        read(header_only({"huge": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}))


def test_nesting_deeper_than_the_interpreter_bears_is_refused() -> None:
    text = b'{"a":' + b"[" * 200_000
    with pytest.raises(ours.SafetensorsError, match="nested too deeply"):
        read(len(text).to_bytes(8, "little") + text)


@pytest.mark.parametrize(
    ("header", "category"),
    [
        (b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', "duplicate_name"),
        (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"\\u0061":{}}', "duplicate_name"),
        (b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', "header_not_json"),
        (b'{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}', "shape_invalid"),
        (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[-0,1]}}', "offsets_invalid"),
        (b'{"a":{"dtype":"U8","shape":[1e999],"data_offsets":[0,1]}}', "header_not_json"),
        (b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,1]}}', "header_not_json"),
        (b'{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}', "dtype_unknown"),
        (b'{"a":{"dtype":"BOOL","shape":[1],"data_offsets":[0,1]}}', "bool_invalid"),
    ],
)
def test_more_that_is_refused(header: bytes, category: str) -> None:
    with pytest.raises(ours.SafetensorsError) as caught:
        read(len(header).to_bytes(8, "little") + header + b"\x07")
    assert caught.value.category == category


def test_an_absent_file_and_an_unreadable_one_are_different_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="no such file"):
        ours.read_file(tmp_path / "absent.safetensors")
    with pytest.raises(CheckpointCorrupt, match="not a regular file"):
        ours.read_file(tmp_path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.safetensors")
        with pytest.raises(CheckpointCorrupt, match="not a regular file"):
            ours.read_file(tmp_path / "pipe.safetensors")


def example() -> dict[str, Any]:
    return {
        "z.bias": np.arange(3, dtype=np.float16),
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.asarray(7.5, dtype=np.float64),
        "flags": np.array([True, False]),
        "empty": np.zeros((0, 4), np.float32),
        "ids": np.array([2**63 + 1], np.uint64),
    }


def test_the_package_opens_what_we_write(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(written(example(), {"format": "pt"}))
    theirs = safetensors.numpy.load_file(path)
    for name, array in example().items():
        assert theirs[name].dtype == array.dtype and np.array_equal(theirs[name], array)
    with safetensors.safe_open(path, framework="np") as file:
        assert file.metadata() == {"format": "pt"}


def test_we_open_what_the_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(example(), path)
    found = ours.read_file(path).tensors
    assert {name: array.tolist() for name, array in found.items()} == {n: a.tolist() for n, a in example().items()}


def test_order_of_insertion_does_not_change_a_byte() -> None:
    tensors = example()
    assert written(tensors) == written(dict(reversed(tensors.items())))
    layout = read(written(tensors)).header
    assert all(entry.start % np.dtype(tensors[entry.name].dtype).itemsize == 0 for entry in layout.entries)
    assert layout.data_start % 8 == 0


def test_a_view_is_written_as_its_own_elements() -> None:
    """Not its backing storage: the file has exactly the bytes of header and elements."""
    base = np.arange(10_000, dtype=np.float32).reshape(100, 100)
    tensors = {"view": base[::2, 1:3], "transposed": base[:4, :3].T}
    data = written(tensors)
    assert len(data) == ours.file_size(tensors) < 1000 + 4 * (100 + 12)
    back = read(data).tensors
    assert all(np.array_equal(back[name], array) for name, array in tensors.items())


def test_big_endian_arrays_are_written_little_endian() -> None:
    assert written({"a": np.arange(3, dtype=">f4")}) == written({"a": np.arange(3, dtype="<f4")})


def test_what_cannot_be_written_is_an_error_naming_the_tensor() -> None:
    shared = np.ones(4, np.float32)
    with pytest.raises(HybridError, match="'head' and 'table' are the same memory"):
        written({"table": shared, "head": shared})
    with pytest.raises(HybridError, match="'t': dtype complex128"):
        written({"t": np.ones(1, np.complex128)})
    for name in ("", "__metadata__", "\ud800"):
        with pytest.raises(HybridError, match="cannot be named"):
            written({name: np.ones(1, np.float32)})


def test_digests_are_of_the_whole_of_each_chunk_and_of_each_tensor(tmp_path: Path) -> None:
    big = np.arange(CHUNK_BYTES // 4 + 1000, dtype=np.float32)
    tensors = {"big": big, "small": np.ones(2, np.float32)}
    data = written(tensors)
    file = read(data)
    chunks = tuple(hashlib.sha256(data[i : i + CHUNK_BYTES]).hexdigest() for i in range(0, len(data), CHUNK_BYTES))
    assert len(chunks) == 2
    assert file.digest == FileDigest(len(data), hashlib.sha256(data).hexdigest(), chunks)
    assert file.digest == digest_bytes(data)
    out = io.BytesIO()
    assert ours.write(out.write, tensors) == file.sha256
    assert file.sha256 == {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in tensors.items()}
    assert digest_bytes(b"").chunks == () and len(digest_bytes(bytes(CHUNK_BYTES)).chunks) == 1


def test_one_tensor_is_read_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(written(example()))
    header = ours.read_header(path)
    assert np.array_equal(ours.read_tensor(path, header, "b"), example()["b"])
    with pytest.raises(CheckpointCorrupt, match="no tensor 'c'"):
        ours.read_tensor(path, header, "c")


NUMPY_TYPES = ["f2", "f4", "f8", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "?", "c8"]
ARRAYS = hnp.arrays(
    dtype=st.sampled_from(NUMPY_TYPES).map(np.dtype),
    shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
NAMES = st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__" and name.isprintable())
METADATA = st.none() | st.dictionaries(st.text(max_size=5).filter(str.isprintable), st.just("v"), max_size=2)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(NAMES, ARRAYS, max_size=5), METADATA)
def test_every_set_of_tensors_survives_a_round_trip(tensors: dict[str, Any], metadata: dict[str, str] | None) -> None:
    data = written(tensors, metadata)
    file = read(data)
    assert file.header.metadata == metadata and len(data) == ours.file_size(tensors, metadata)
    assert {n: (a.dtype, a.shape, a.tobytes()) for n, a in file.tensors.items()} == {
        n: (a.dtype, a.shape, a.tobytes()) for n, a in tensors.items()
    }
    theirs = safetensors.numpy.load(data)
    assert {n: a.tobytes() for n, a in theirs.items()} == {n: a.tobytes() for n, a in tensors.items()}


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_file_gives_an_error_or_the_same_layout_but_never_a_crash(data: st.DataObject) -> None:
    good = written(example(), {"format": "pt"})
    position = data.draw(st.integers(0, len(good) - 1))
    cut = data.draw(st.booleans())
    bad = good[:position] if cut else good[:position] + bytes([data.draw(st.integers(0, 255))]) + good[position + 1 :]
    try:
        file = read(bad)
    except CheckpointCorrupt:
        return
    assert not cut and sum(array.nbytes for array in file.tensors.values()) == file.header.data_size
