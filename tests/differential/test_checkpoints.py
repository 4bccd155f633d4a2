"""A checkpoint of either language is one for the other, byte for byte, and damage is refused by the same error."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint import examples, zips
from checkpoint.hostile import HOSTILE, NAMES, TEXTS, put, relist, rewrite, tensor_bytes
from contracts.vectors import load as vectors
from differential.both import Node
from hybrid.checkpoint import archive, finding, huggingface, safetensors
from hybrid.checkpoint.canonical import render
from hybrid.checkpoint.loading import load
from hybrid.checkpoint.snapshot import CheckpointSnapshot
from hybrid.checkpoint.store import CheckpointStore
from hybrid.checkpoint.zip_entries import read_entries
from hybrid.errors import HybridError

pytestmark = pytest.mark.node

UNIX_MS = int(examples.TIME * 1000)
GPT2 = replace(
    examples.TINY,
    norm="layer_norm",
    positions="learned",
    activation="gelu",
    bias=True,
    kv_heads=2,
    layers=2,
    schedule=(),
)
LOOPED = replace(examples.TINY, layers=2, schedule=(0, 1, 0, 1), window=4, tied_embeddings=False, activation="relu2")


def save(folder: Path, snapshot: CheckpointSnapshot) -> Path:
    store = CheckpointStore(folder, clock=examples.clock, filesystem=examples.Unsynced())
    return store.save(snapshot)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def digests(folder: Path) -> dict[str, list[Any]]:
    tensors = {}
    for name in ("model.safetensors", "optimizer.safetensors"):
        file = safetensors.read_file(folder / name)
        tensors |= {entry.name: [list(entry.shape), file.sha256[entry.name]] for entry in file.header.entries}
    return tensors


def only(answers: list[dict[str, Any]]) -> Any:
    (answer,) = answers
    assert "value" in answer, answer
    return answer["value"]


@pytest.mark.parametrize("cfg", [examples.TINY, GPT2, LOOPED], ids=["llama", "gpt2", "looped"])
def test_a_checkpoint_goes_to_javascript_and_back_without_a_byte_changed(node: Node, tmp_path: Path, cfg: Any) -> None:
    snapshot = examples.snapshot(cfg=cfg, runtime="browser")
    ours = save(tmp_path, snapshot)
    found = only(node.ask("load_checkpoint", [{"folder": str(ours)}]))
    manifest = load(ours).manifest
    assert found == {
        "checkpointHash": manifest.checkpoint_hash,
        "stateHash": manifest.state_hash,
        "tensors": digests(ours),
        "tokenizer": snapshot.tokenizer_json,
    }
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    case = {"source": str(ours), "target": str(theirs), "sequence": 1, "previous": None, "unixMs": UNIX_MS}
    assert only(node.ask("write_checkpoint", [case])) == manifest.checkpoint_hash
    assert contents(theirs) == contents(ours)
    loaded = load(theirs)
    assert examples.same(loaded.model, snapshot.model) and examples.same(loaded.optimizer, snapshot.optimizer)


def test_transformers_opens_what_javascript_wrote(node: Node, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    cfg = replace(examples.TINY, tied_embeddings=False)
    ours = save(tmp_path, examples.snapshot(cfg=cfg))
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    case = {"source": str(ours), "target": str(theirs), "sequence": 2, "previous": "a" * 64, "unixMs": 5}
    only(node.ask("write_checkpoint", [case]))
    manifest = load(theirs).manifest
    assert (manifest.lineage.runtime, manifest.lineage.sequence, manifest.timestamp_ms) == ("browser", 2, 5)
    assert manifest.lineage.previous_checkpoint_hash == "a" * 64
    model = transformers.LlamaForCausalLM.from_pretrained(theirs)
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items() if "rotary" not in name}
    assert examples.same(weights, load(theirs).model)


# --- damage

Damage = Callable[[Path], object]
NORM = "model.norm.weight"


def edit(name: str, change: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def flip(name: str, place: float) -> Damage:
    def change(data: bytes) -> bytes:
        at = min(int(len(data) * place), len(data) - 1)
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    return edit(name, change)


def tensors(name: str, change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(folder: Path) -> None:
        changed = dict(safetensors.read_file(folder / name).tensors)
        change(changed)
        relist(folder, name, tensor_bytes(changed))

    return damage


def config(**changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        document = huggingface.config_document(examples.TINY, {})
        document["hybrid"] = {**document["hybrid"], **changes}
        relist(folder, "config.json", render(document))

    return damage


def all_damage() -> Iterator[tuple[str, Damage, bool]]:
    """(name, what is done to a checkpoint, whether the message is the language's own: what its JSON parser says, or
    which fault it comes upon first).
    """
    files = ("checkpoint.json", "config.json", "generation_config.json", "tokenizer.json")
    for name in (*files, "model.safetensors", "optimizer.safetensors"):
        loose = name == "checkpoint.json" or name.endswith(".safetensors")
        for place in (0, 0.3, 0.6, 1):
            yield f"flip {name} {place}", flip(name, place), loose
        yield f"cut {name}", edit(name, lambda data: data[:-1]), loose
        yield f"empty {name}", edit(name, lambda data: b""), loose
        yield f"longer {name}", edit(name, lambda data: data + b"\n"), loose
        if name != "checkpoint.json":
            yield f"no {name}", lambda folder, name=name: (folder / name).unlink(), False
    yield "no manifest", lambda folder: (folder / "checkpoint.json").unlink(), False
    yield "wrong folder", lambda folder: rewrite(folder, put("progress/step", 6)), False
    for path, value, _ in HOSTILE:
        change = put(path, value)
        yield f"manifest {path} {value!r:.30}", lambda folder, change=change: rewrite(folder, change), False
    for number, (text, _) in enumerate(TEXTS):
        yield f"text {number}", edit("checkpoint.json", lambda _, text=text: text), True
    for name in (*NAMES, "CONFIG.json"):

        def listed(folder: Path, name: str = name) -> None:
            rewrite(folder, lambda document: document["files"].update({name: document["files"]["config.json"]}))

        yield f"name {name!r:.30}", listed, False
    whole = put("files/model.safetensors/sha256", "0" * 64)
    yield "whole sha256", lambda folder: rewrite(folder, whole), False

    ones = np.ones(4, np.float32)
    for file, prefix in (("model.safetensors", ""), ("optimizer.safetensors", "moment1/")):
        name = prefix + NORM
        yield f"{file} other value", tensors(file, lambda t, n=name: t.update({n: t[n] + 1})), False
        yield f"{file} shape", tensors(file, lambda t, n=name: t.update({n: ones.reshape(2, 2)})), False
        yield f"{file} dtype", tensors(file, lambda t, n=name: t.update({n: ones.astype(np.float16)})), False
        yield f"{file} lacks", tensors(file, lambda t, n=name: t.pop(n)), False
        yield f"{file} extra", tensors(file, lambda t: t.update({"it's": ones})), False
        yield f"{file} no parameter", tensors(file, lambda t: t.update({"moment1/x": ones})), False

    bad = vectors("safetensors_bad")
    for case in (*(one for one in bad["cases"] if one["expected"] == "error"), *bad["quirk_cases"]):
        data = base64.b64decode(case["base64"])
        loose = "json" in case.get("category", "") or "utf8" in case.get("category", "")
        yield f"vector {case['name']}", lambda folder, d=data: relist(folder, "model.safetensors", d), loose

    for data in (b"[]", b'{"a": 1}', b'{"hybrid": []}', b'{"hybrid": {}, "hybrid": {}}', b'{"a": NaN}', b"\xff", b""):
        yield f"config {data!r}", lambda folder, d=data: relist(folder, "config.json", d), True
    yield "config deep", lambda folder: relist(folder, "config.json", b"[" * 100_000), True
    for changes in (
        {"depth": 2}, {"layers": 0}, {"layers": 10**12}, {"layers": True}, {"vocabulary_size": 2**32}, {"width": -4},
        {"vocabulary_size": "11"}, {"context_length": None}, {"heads": 3}, {"kv_heads": 3}, {"head_width": 3},
        {"norm": "batch"}, {"positions": None}, {"activation": 7}, {"window": 0}, {"dropout": 1}, {"dropout": -0.5},
        {"norm_eps": 0}, {"rope_base": -1}, {"initializer_range": 0}, {"schedule": [1]}, {"schedule": [-1]},
        {"layers": 2, "schedule": [0]}, {"width": 6}, {"tied_embeddings": False}, {"bias": True}, {"layers": 2},
        {"activation": "gelu"}, {"positions": "learned"}, {"kv_heads": 0}, {"head_width": 4},
    ):  # fmt: skip
        # Python writes tuples, and where a tensor lacks the reason is the model that asks for it.
        yield f"config {changes}", config(**changes), "schedule" in changes or "layers" in changes
    for changes in ({"window": "x"}, {"dropout": None}, {"schedule": 7}, {"norm_eps": "x"}, {"heads": 2.5}):
        yield f"config {changes}", config(**changes), True
    yield "tokenizer not UTF-8", lambda folder: relist(folder, "tokenizer.json", b"\xff\xfe"), True


def refusal(action: Callable[[], object]) -> list[str] | None:
    try:
        action()
    except safetensors.SafetensorsError as error:
        return [f"SafetensorsError {error.category}", str(error)]
    except HybridError as error:
        return [type(error).__name__, str(error)]
    return None


def test_damage_is_refused_by_the_same_error(node: Node, tmp_path: Path) -> None:
    original = save(tmp_path / "original", examples.snapshot())
    cases = list(all_damage())
    assert len(cases) > 200
    folders = []
    for number, (_, damage, _) in enumerate(cases):
        folder = tmp_path / str(number) / original.name
        shutil.copytree(original, folder)
        damage(folder)
        folders.append(folder)
    answers = node.ask("load_checkpoint", [{"folder": str(folder)} for folder in folders])
    kinds = set()
    for (name, _, loose), folder, answer in zip(cases, folders, answers, strict=True):
        ours = refusal(lambda folder=folder: (finding.read_ref(folder), load(folder)))
        theirs = answer.get("error")
        if "refused" in answer.get("value", {}):
            category, message = answer["value"]["refused"]
            theirs = [f"SafetensorsError {category}", message]
        assert ours and theirs, f"{name}: Python says {ours}, JavaScript says {answer}"
        if name.startswith("flip") and name.split()[1].endswith(".safetensors"):
            ours[0] = "CheckpointCorrupt"  # Python reads the header first, JavaScript hashes the bytes first
        assert ours[0] == theirs[0], f"{name}: Python says {ours}, JavaScript says {theirs}"
        assert loose or ours[1] == theirs[1], name
        assert str(folder) in theirs[1], name
        kinds.add(ours[0])
    assert {"CheckpointCorrupt", "CheckpointNotFound"} < kinds and len(kinds) > 15


def test_the_newest_is_the_same_in_both_languages(node: Node, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, clock=examples.clock, filesystem=examples.Unsynced())
    case = {"folder": str(store.folder)}
    paths = [store.save(examples.snapshot(step)) for step in (1, 2)]

    def agree() -> str:
        (answer,) = node.ask("latest_checkpoint", [case])
        if "error" in answer:
            assert answer["error"] == refusal(store.latest)
            return answer["error"][0]
        ref = store.latest()
        facts = ref and [ref.path.name, ref.step, ref.sequence, ref.checkpoint_hash, ref.state_hash]
        assert answer["value"] == (facts and ref and [*facts, ref.timestamp_ms, ref.size])
        return answer["value"] and answer["value"][0]

    assert agree() == "step-00000002"
    manifest = (paths[1] / "checkpoint.json").rename(tmp_path / "taken")
    assert agree() == "step-00000001"
    (paths[1] / "checkpoint.json").write_bytes(manifest.read_bytes() + b" ")
    assert agree() == "CheckpointCorrupt"
    (paths[1] / "checkpoint.json").write_bytes(manifest.read_bytes())
    assert agree() == "step-00000002"
    for path in paths:
        shutil.rmtree(path)
    assert agree() is None


# --- archives


def test_archives_go_both_ways(node: Node, tmp_path: Path) -> None:
    ours = save(tmp_path / "ours", examples.snapshot())
    archive.pack(ours, tmp_path / "ours.hybrid")
    case = {"archive": str(tmp_path / "ours.hybrid"), "run": str(tmp_path / "theirs")}
    (tmp_path / "theirs").mkdir()
    name, checkpoint_hash = only(node.ask("unpack_checkpoint", [case]))
    assert (name, checkpoint_hash) == ("step-00000005", load(ours).manifest.checkpoint_hash)
    theirs = tmp_path / "theirs" / "checkpoints" / name
    assert contents(theirs) == contents(ours)

    case = {"folder": str(theirs), "archive": str(tmp_path / "theirs.hybrid")}
    said, size = only(node.ask("pack_checkpoint", [case]))
    assert said == size
    archive.unpack(tmp_path / "theirs.hybrid", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(ours)
    assert zips.names(tmp_path / "theirs.hybrid") == sorted(contents(ours))


FILES = {"checkpoint.json": b"{}\n", "config.json": b"[1, 2, 3]" * 9, "empty": b""}


def test_hostile_archives_are_refused_by_the_same_error(node: Node, tmp_path: Path) -> None:
    cases = [(name, data) for name, data, _ in zips.damaged(FILES)]
    good = zips.archive(FILES)
    cases += [(f"byte {at}", good[:at] + bytes([good[at] ^ 0x41]) + good[at + 1 :]) for at in range(len(good))]
    paths = []
    for number, (_, data) in enumerate(cases):
        paths.append(tmp_path / f"{number}.hybrid")
        paths[-1].write_bytes(data)
    refused = 0
    answers = node.ask("zip_entries", [{"archive": str(path)} for path in paths])
    for (name, _), path, answer in zip(cases, paths, answers, strict=True):
        ours = refusal(lambda path=path: zips.read_all(path))
        assert answer.get("error") == ours, name
        refused += ours is not None
    assert refused > 200


def test_files_beyond_4_gib_are_where_the_other_language_says(node: Node, tmp_path: Path) -> None:
    """A file with holes: nobody writes the gigabytes."""
    for number, sizes in enumerate(([2**32 - 1, 5], [5 * 2**32 + 3, 5], [2**31, 2**31, 2**31, 7])):
        packed = tmp_path / f"{number}.zip"
        size = only(node.ask("sparse_zip", [{"archive": str(packed), "sizes": sizes}]))
        assert packed.stat().st_size == size > 2**32
        with packed.open("rb") as stream:
            ours = [(entry.name, entry.size) for entry in read_entries("a", stream)]
        assert ours == zips.sizes(packed) == [(f"f{index}", size) for index, size in enumerate(sizes)]
    packed = tmp_path / "forced.zip"
    zips.forced_zip64(packed, {"a": b"12345", "b": b"6"})
    found = only(node.ask("zip_entries", [{"archive": str(packed)}]))
    assert [name for name, _ in found] == ["a", "b"]
