"""A byte that changed, a file that is short, missing or of another shape: refused, and the message names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint import examples
from checkpoint.hostile import CONFIG, HOSTILE, NAMES, TEXTS, put, relist, rewrite, tensor_bytes
from hybrid.checkpoint import finding, manifest, safetensors
from hybrid.checkpoint.loading import load
from hybrid.checkpoint.store import CheckpointStore
from hybrid.errors import CheckpointCorrupt

FILES = (
    "checkpoint.json", "config.json", "generation_config.json", "model.safetensors", "optimizer.safetensors",
    "tokenizer.json",
)  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damage")
    store = CheckpointStore(folder, clock=examples.clock, filesystem=examples.Unsynced())
    return store.save(examples.snapshot())


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    copy = tmp_path / original.name
    copy.mkdir()
    for path in original.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_anywhere_is_refused_by_name(checkpoint: Path, name: str) -> None:
    """A sample of positions; the acceptance run takes all of them."""
    refuse_flips(checkpoint, name, step=13 if name.endswith(".safetensors") else 5, masks=1)


@pytest.mark.acceptance
@pytest.mark.parametrize("name", FILES)
def test_every_flipped_byte_is_refused_by_name(checkpoint: Path, name: str) -> None:
    refuse_flips(checkpoint, name, step=1, masks=3)


def refuse_flips(checkpoint: Path, name: str, step: int, masks: int) -> None:
    """Flip one bit, the bit between upper and lower case, or all bits, at every `step`-th byte."""
    path = checkpoint / name
    good = path.read_bytes()
    for position in range(0, len(good), step):
        for mask in range(masks):
            bits = (0x01, 0x20, 0xFF)[(position + mask) % 3]
            path.write_bytes(good[:position] + bytes([good[position] ^ bits]) + good[position + 1 :])
            with pytest.raises(CheckpointCorrupt) as caught:
                load(checkpoint)
            assert name in str(caught.value), (position, bits, str(caught.value))
    path.write_bytes(good)
    load(checkpoint)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_short_long_or_missing_is_refused_by_name(checkpoint: Path, name: str) -> None:
    path = checkpoint / name
    good = path.read_bytes()
    for bad in (b"", good[:1], good[: len(good) // 2], good[:-1], good + b"\n", good + good):
        path.write_bytes(bad)
        with pytest.raises(CheckpointCorrupt, match=name):
            load(checkpoint)
    if name != "checkpoint.json":  # without a manifest there is no checkpoint
        path.unlink()
        with pytest.raises(CheckpointCorrupt, match=f"{name}: the manifest lists this file, but it is missing"):
            load(checkpoint)


def test_white_space_in_the_manifest_counts(checkpoint: Path) -> None:
    path = checkpoint / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=4))
    with pytest.raises(CheckpointCorrupt, match="not in canonical form at byte"):
        load(checkpoint)


def test_a_rewritten_manifest_with_right_hashes_is_accepted(checkpoint: Path) -> None:
    """So the refusals below are for what they say."""
    rewrite(checkpoint, lambda document: document["session"].update({"elapsedMs": 99}))
    assert load(checkpoint).manifest.session["elapsedMs"] == 99


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), f"lacks the tensor '{NORM}' of shape (4,)"),
        (lambda t: t.update(extra=np.ones(1, np.float32)), "has the tensor 'extra', which the model does not have"),
        (lambda t: t.update({NORM: t[NORM].astype(np.float16)}), f"tensor '{NORM}' is F16, expected F32"),
        (lambda t: t.update({NORM: t[NORM].reshape(2, 2)}), f"'{NORM}' has shape (2, 2), but the model needs (4,)"),
        (lambda t: t.update({NORM: t[NORM] + 1}), "stateHash is"),
        (lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}), "the tensor 'lm_head.weight'"),
    ],
)
def test_a_model_file_of_another_content_is_refused_by_tensor(checkpoint: Path, change: Any, message: str) -> None:
    tensors = dict(safetensors.read_file(checkpoint / "model.safetensors").tensors)
    change(tensors)
    relist(checkpoint, "model.safetensors", tensor_bytes(tensors))
    with pytest.raises(CheckpointCorrupt) as caught:
        load(checkpoint)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        (f"moment1/{NORM}", np.ones(3, np.float32), f"optimizer tensor 'moment1/{NORM}' has shape (3,)"),
        ("moment1/nothing", np.ones(4, np.float32), "optimizer tensor 'moment1/nothing': expected <slot>/<parameter"),
        (NORM, np.ones(4, np.float32), f"optimizer tensor '{NORM}': expected <slot>/<parameter"),
        (f"moment1/{NORM}", np.ones(4, np.float64), f"tensor 'moment1/{NORM}' is F64, expected F32"),
    ],
)
def test_an_optimizer_file_of_another_content_is_refused(checkpoint: Path, name: str, array: Any, message: str) -> None:
    tensors = dict(safetensors.read_file(checkpoint / "optimizer.safetensors").tensors)
    relist(checkpoint, "optimizer.safetensors", tensor_bytes({**tensors, name: array}))
    with pytest.raises(CheckpointCorrupt) as caught:
        load(checkpoint)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[]", "the object 'hybrid' is missing"),
        (b'{"hybrid": {"layers": 1}}', "describes no model"),
        (b'{"hybrid": {"layers": 1, "depth": 2}}', "unknown key(s) depth"),
        (b'{"a": 1, "a": 2}', "the key 'a' appears twice"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b"\xff", "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_model_configuration_that_is_none_is_refused(checkpoint: Path, data: bytes, message: str) -> None:
    relist(checkpoint, "config.json", data)
    with pytest.raises(CheckpointCorrupt) as caught:
        load(checkpoint)
    assert "config.json" in str(caught.value) and message in str(caught.value)


def test_without_verification_the_structure_is_still_checked(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    examples.flip(path, -1)
    load(checkpoint, verify=False)
    path.write_bytes(path.read_bytes()[:-4] + bytes(8))
    with pytest.raises(CheckpointCorrupt, match=r"model\.safetensors"):
        load(checkpoint, verify=False)


# --- hostile manifests


@pytest.mark.parametrize("name", NAMES)
def test_a_file_name_that_leaves_the_folder_or_is_not_portable_is_refused(checkpoint: Path, name: str) -> None:
    rewrite(checkpoint, lambda document: document["files"].update({name: document["files"]["config.json"]}))
    with pytest.raises(CheckpointCorrupt, match="files has the name"):
        load(checkpoint)


def test_two_names_that_are_one_on_some_systems_are_refused(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda document: document["files"].update({"CONFIG.json": document["files"]["config.json"]}))
    with pytest.raises(CheckpointCorrupt, match=r"one name on some systems"):
        load(checkpoint)


@pytest.mark.parametrize(("path", "value", "message"), HOSTILE, ids=[f"{p}={v!r:.20}" for p, v, _ in HOSTILE])
def test_a_hostile_manifest_is_refused_naming_file_and_field(
    checkpoint: Path, path: str, value: object, message: str
) -> None:
    rewrite(checkpoint, put(path, value))
    with pytest.raises(CheckpointCorrupt) as caught:
        load(checkpoint)
    assert message in str(caught.value)
    assert "checkpoint.json" in str(caught.value) or path.startswith(CONFIG)


@pytest.mark.parametrize(("text", "message"), TEXTS)
def test_a_manifest_that_is_no_document_is_refused(checkpoint: Path, text: bytes, message: str) -> None:
    (checkpoint / "checkpoint.json").write_bytes(text)
    with pytest.raises(CheckpointCorrupt) as caught:
        load(checkpoint)
    assert message in str(caught.value) and "checkpoint.json" in str(caught.value)


def test_a_manifest_nested_beyond_reason_is_refused(checkpoint: Path) -> None:
    nested: Any = {}
    for _ in range(100):
        nested = {"a": nested}
    text = (
        (checkpoint / "checkpoint.json")
        .read_bytes()
        .replace(b'"session": {', b'"session": ' + json.dumps(nested).encode() + b',"x": {')
    )
    (checkpoint / "checkpoint.json").write_bytes(text)
    with pytest.raises(CheckpointCorrupt, match="nested more than 64 levels"):
        load(checkpoint)


def test_an_endless_manifest_is_not_read_to_its_end(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(CheckpointCorrupt, match="more than 100 bytes"):
        load(checkpoint)


def test_a_folder_in_place_of_a_file_is_refused(checkpoint: Path) -> None:
    size = (checkpoint / "tokenizer.json").stat().st_size
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tokenizer.json").mkdir()
    with pytest.raises(CheckpointCorrupt, match=r"tokenizer\.json"):
        load(checkpoint)
    assert size > 0


def test_a_damaged_checkpoint_is_reported_by_every_way_in(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    for way in (finding.read_ref, finding.resolve, load):
        with pytest.raises(CheckpointCorrupt, match=r"model\.safetensors"):
            way(checkpoint)
    assert [status.status for status in finding.scan(checkpoint.parent)] == ["damaged"]
