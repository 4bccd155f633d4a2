"""Examining a checkpoint finds all that loading it finds, without holding it."""

from __future__ import annotations

import io
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from checkpoint.examples import Unsynced, flip, snapshot
from hybrid.checkpoint import loading, safetensors
from hybrid.checkpoint.manifest import CONFIG_FILE, MANIFEST_NAME, MODEL_FILE, OPTIMIZER_FILE, TOKENIZER_FILE
from hybrid.checkpoint.store import CheckpointStore
from hybrid.errors import CheckpointCorrupt, HybridError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return CheckpointStore(tmp_path, filesystem=Unsynced()).save(snapshot())


def test_a_good_checkpoint_is_told_of_as_loading_does(folder: Path) -> None:
    loaded, whole = loading.load(folder), loading.examine(folder)
    assert (whole.manifest, whole.model_config) == (loaded.manifest, loaded.model_config)
    assert (whole.path, whole.tokenizer_json) == (loaded.path, loaded.tokenizer_json)


@pytest.mark.parametrize("name", [CONFIG_FILE, MANIFEST_NAME, MODEL_FILE, OPTIMIZER_FILE, TOKENIZER_FILE])
@pytest.mark.parametrize("place", [0, 8, 0.3, 0.6, -1])
def test_a_changed_byte_is_named_as_loading_names_it(folder: Path, name: str, place: float) -> None:
    size = (folder / name).stat().st_size
    flip(folder / name, int(place * size) if isinstance(place, float) else place % size)
    with pytest.raises(HybridError) as one:
        loading.load(folder)
    with pytest.raises(type(one.value)) as other:
        loading.examine(folder)
    assert str(other.value) == str(one.value)


@pytest.mark.parametrize("name", [MODEL_FILE, OPTIMIZER_FILE, CONFIG_FILE])
def test_a_file_that_is_cut_or_gone_is_damage(folder: Path, name: str) -> None:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:-1])
    with pytest.raises(CheckpointCorrupt, match="cut or changed"):
        loading.examine(folder)
    (folder / name).unlink()
    with pytest.raises(CheckpointCorrupt, match="missing"):
        loading.examine(folder)


def test_a_scan_says_what_reading_says() -> None:
    parts: list[bytes] = []
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([True, False]), "c": np.zeros((0, 4))}
    safetensors.write(lambda piece: parts.append(bytes(piece)), tensors)
    data = b"".join(parts)
    read = safetensors.read_stream("file", io.BytesIO(data), len(data))
    scanned = safetensors.scan_stream("file", io.BytesIO(data), len(data))
    assert (scanned.header, scanned.sha256, scanned.digest) == (read.header, read.sha256, read.digest)
    start = next(entry.start for entry in read.header.entries if entry.name == "b") + read.header.data_start
    bad = data[:start] + b"\x02" + data[start + 1 :]
    for look in (safetensors.read_stream, safetensors.scan_stream):
        with pytest.raises(safetensors.SafetensorsError, match="neither 0 nor 1"):
            look("file", io.BytesIO(bad), len(bad))


def test_a_scan_holds_a_few_megabytes_whatever_the_size(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        safetensors.write(file.write, {"w": np.zeros(2**24, np.float32)})  # 64 MiB
    tracemalloc.start()
    safetensors.scan_file(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 2**20
