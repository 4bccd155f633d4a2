"""A checkpoint that is read tensor by tensor gives what loading gives, refuses what loading refuses, and is never in
memory as a whole."""

from __future__ import annotations

import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint import examples
from hybrid.checkpoint import loading
from hybrid.checkpoint.loading import CheckpointStream
from hybrid.checkpoint.store import CheckpointStore
from hybrid.errors import CheckpointCorrupt


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return CheckpointStore(tmp_path_factory.mktemp("saved"), clock=examples.clock).save(examples.snapshot())


def test_every_tensor_comes_once_in_the_order_that_was_told(saved: Path) -> None:
    stream, loaded = CheckpointStream(saved), loading.load(saved)
    found: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
    order: list[tuple[str, str]] = []

    def take(group: str, name: str, array: Any) -> None:
        order.append((group, name))
        found[group][name] = array

    stream.pour(take)
    assert order == stream.names
    assert examples.same(found["model"], loaded.model) and examples.same(found["optimizer"], loaded.optimizer)
    assert stream.about.manifest == loaded.manifest and stream.about.tokenizer_json == loaded.tokenizer_json


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_a_byte_that_changed_is_found(saved: Path, tmp_path: Path, file: str) -> None:
    """At the latest behind the last tensor of its file; until then the others have been given out."""
    copy = shutil.copytree(saved, tmp_path / saved.name)
    examples.flip(copy / file, (copy / file).stat().st_size - 2)
    with pytest.raises(CheckpointCorrupt, match=file):
        CheckpointStream(copy).pour(lambda group, name, array: None)


def test_a_wrong_state_hash_is_found(saved: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(saved, tmp_path / saved.name)
    manifest = replace(loading.read_manifest(copy), state_hash="0" * 64)
    (copy / "checkpoint.json").write_bytes(manifest.render())
    with pytest.raises(CheckpointCorrupt, match="stateHash is 0000"):
        CheckpointStream(copy).pour(lambda group, name, array: None)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_small_files_are_verified_at_once(saved: Path, tmp_path: Path, file: str) -> None:
    copy = shutil.copytree(saved, tmp_path / saved.name)
    examples.flip(copy / file, 5)
    with pytest.raises(CheckpointCorrupt, match=file):
        CheckpointStream(copy)


def test_a_file_of_another_model_is_refused_before_anything_is_given_out(saved: Path, tmp_path: Path) -> None:
    other = examples.snapshot(cfg=replace(examples.TINY, vocabulary_size=12))
    copy = shutil.copytree(saved, tmp_path / saved.name)
    theirs = CheckpointStore(tmp_path / "other", clock=examples.clock).save(other)
    shutil.copy(theirs / "model.safetensors", copy)
    with pytest.raises(CheckpointCorrupt):
        CheckpointStream(copy)


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    cfg = replace(examples.TINY, vocabulary_size=20_000, width=16, layers=1)
    table = 4 * cfg.vocabulary_size * cfg.width
    path = CheckpointStore(tmp_path, clock=examples.clock).save(examples.snapshot(cfg=cfg))
    stream = CheckpointStream(path)
    tracemalloc.start()
    try:
        stream.pour(lambda group, name, array: None)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert table < most < 1.3 * table
    assert sum(np.prod(array.shape) for array in loading.load(path).optimizer.values()) * 4 > 2 * table
