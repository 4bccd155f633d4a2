"""show, verify, diff and list say what there is, as plain JSON values."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint import examples
from hybrid.checkpoint import diff
from hybrid.checkpoint.store import CheckpointStore
from hybrid.errors import CheckpointCorrupt, CheckpointNotFound


def save(folder: Path, **changes: Any) -> Path:
    return CheckpointStore(folder, filesystem=examples.Unsynced(), clock=examples.clock).save(
        examples.snapshot(**changes)
    )


def test_a_listing_has_every_folder_with_its_status(tmp_path: Path) -> None:
    first, second = save(tmp_path, step=1), save(tmp_path, step=2)
    (first / "model.safetensors").unlink()
    damaged, complete = diff.list_checkpoints(tmp_path)
    assert (damaged["status"], damaged["step"]) == ("damaged", 1) and "model.safetensors" in damaged["detail"]
    assert (
        complete["path"] == str(second) and complete["sequence"] == 2 and complete["timestamp_ms"] == 1_700_000_000_250
    )
    assert complete["size"] == sum(p.stat().st_size for p in second.iterdir() if p.name != "checkpoint.json")
    assert diff.list_checkpoints(tmp_path / "checkpoints") == [damaged, complete]
    with pytest.raises(CheckpointNotFound, match="no such run folder"):
        diff.list_checkpoints(tmp_path / "other")


def test_showing_gives_the_manifest_and_the_tensors(tmp_path: Path) -> None:
    path = save(tmp_path)
    (path / "notes.txt").write_text("mine")
    shown = diff.show(tmp_path)
    assert shown == json.loads(json.dumps(shown)), "plain values"
    assert shown["manifest"] == json.loads((path / "checkpoint.json").read_text())
    assert shown["tensors"]["model.safetensors"]["model.norm.weight"] == {"dtype": "F32", "shape": [4]}
    assert shown["parameters"] == sum(array.size for array in examples.snapshot().model.values())
    assert shown["unlisted"] == ["notes.txt"]


def test_verifying_reads_everything(tmp_path: Path) -> None:
    path = save(tmp_path)
    report = diff.verify(path)
    assert report["ok"] and report["tensors"] == 3 * len(examples.snapshot().model)
    assert sorted(report["files"]) == sorted(p.name for p in path.iterdir() if p.name != "checkpoint.json")
    examples.flip(path / "optimizer.safetensors", -1)
    with pytest.raises(CheckpointCorrupt, match=r"optimizer\.safetensors: bytes 0 to .* have sha256"):
        diff.verify(path)
    diff.show(path)  # does not hash


def test_equal_checkpoints_have_no_differences(tmp_path: Path) -> None:
    a, b = save(tmp_path / "a"), save(tmp_path / "b")
    found = diff.diff(a, b)
    assert found["same_state"] and found["values"] == {}
    assert found["tensors"] == {"model.safetensors": {}, "optimizer.safetensors": {}}


def test_differences_are_named_with_both_values(tmp_path: Path) -> None:
    base = examples.snapshot()
    norm = base.model["model.norm.weight"]
    other = replace(
        base,
        seed=7,
        config={**base.config, "optimizer": {"learning_rate": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8}},
        model={**base.model, "model.norm.weight": norm + np.array([0, 0.5, -2, 0], np.float32)},
        optimizer={name: array for name, array in base.optimizer.items() if name != "moment2/model.norm.weight"},
    )
    a = save(tmp_path / "a")
    b = CheckpointStore(tmp_path / "b", clock=examples.clock).save(other)
    found = diff.diff(a, b)
    assert not found["same_state"]
    assert found["values"] == {
        "config.optimizer.eps": ["<absent>", 1e-8],
        "config.optimizer.learning_rate": [3e-4, 1e-3],
        "seed": [1337, 7],
    }
    assert found["tensors"]["optimizer.safetensors"] == {"moment2/model.norm.weight": {"only_in": "a"}}
    (change,) = found["tensors"]["model.safetensors"].items()
    assert change[0] == "model.norm.weight" and change[1]["max_abs_diff"] == pytest.approx(2.0)


def test_models_of_other_shapes_are_compared_by_shape(tmp_path: Path) -> None:
    wider = replace(examples.TINY, feed_forward_width=7)
    found = diff.diff(save(tmp_path / "a"), save(tmp_path / "b", cfg=wider))
    name = "model.layers.0.mlp.down_proj.weight"
    assert found["tensors"]["model.safetensors"][name] == {"shape": [[4, 6], [4, 7]]}
    assert found["values"]["config.model.feed_forward_width"] == [6, 7]


def test_not_a_number_is_a_difference_without_a_size(tmp_path: Path) -> None:
    base = examples.snapshot()
    broken = {**base.model, "model.norm.weight": np.full(4, np.nan, np.float32)}
    found = diff.diff(save(tmp_path / "a"), save(tmp_path / "b", model=broken))
    assert found["tensors"]["model.safetensors"] == {"model.norm.weight": {"max_abs_diff": None}}
    again = diff.diff(save(tmp_path / "b", model=broken), save(tmp_path / "c", model=broken))
    assert again["same_state"] and again["tensors"]["model.safetensors"] == {}
