"""Token stores, samples and batches are the same in both languages: files byte for byte, batches number for number,
refusals word for word."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from differential.both import Node, agree, draw
from differential.inputs import text as any_text
from hybrid.config.tree import DataSection
from hybrid.data import loader
from hybrid.data.batch import Batch
from hybrid.data.bpe import train_bpe
from hybrid.data.corpus import Document, TextFiles
from hybrid.data.loader import BatchPlan, DataLoader, evaluation_batches
from hybrid.data.manifest import content_fingerprint, seal
from hybrid.data.packing import PackedDataset
from hybrid.data.prepare import prepare
from hybrid.data.split import SplitRule
from hybrid.data.store import TokenStore, build_store
from hybrid.data.tokenizers import ByteTokenizer, CharacterTokenizer, load_tokenizer
from hybrid.data.windows import WindowDataset
from hybrid.errors import DataContractError

pytestmark = pytest.mark.node

BPE = train_bpe(["the quick brown fox jumps over the lazy dog, Grüße 0123\n" * 4], 300).to_json()
WORDS = ("the ", "fox", " jumps", "Grüße", "東京", "🙂", "\n", "0", "12", "<|endoftext|>", "\x00", "\ufeff", '"\\')


def random_documents(random: Random, most: int = 12) -> list[dict[str, str]]:
    """Empty ones, ones of one token, short and long ones."""
    documents = []
    for number in range(random.randrange(most)):
        length = random.choice((0, 1, 1, 2, random.randrange(12), random.randrange(12), random.randrange(80)))
        documents.append({"name": f"document {number}", "text": "".join(random.choices(WORDS, k=length))})
    return documents


def rule_of(random: Random) -> dict[str, Any]:
    share = random.choice((0.0, 0.1, 0.25, 0.5, 0.9, 0.9999, random.random(), 1e-5))
    return {"by": random.choice(("document", "share")), "validationShare": share, "seed": random.randrange(5)}


def python_rule(rule: dict[str, Any]) -> SplitRule:
    return SplitRule(by=rule["by"], validation_share=rule["validationShare"], seed=rule["seed"])


def built(case: dict[str, Any], path: Path) -> TokenStore:
    documents = [Document(**document) for document in case["documents"]]
    tokenizer = {
        "bytes": ByteTokenizer,
        "characters": lambda: CharacterTokenizer.from_texts([document.text for document in documents]),
    }.get(case["tokenizer"], lambda: load_tokenizer(case["tokenizer"]))()
    rule = python_rule(case["split"])
    return build_store(documents, tokenizer, path, split=rule, source=case["source"], replace=True).store


def test_stores_are_the_same_files(node: Node, tmp_path: Path) -> None:
    random = draw("stores")
    cases = []
    for _ in range(80):
        documents = random_documents(random)
        if random.random() < 0.1:
            documents.append(
                {"name": "a half", "text": any_text(random, lone=False) + random.choice(("\ud83d", "\udcff"))}
            )
        cases.append(
            {
                "documents": documents,
                "tokenizer": random.choice(("bytes", "characters", BPE, CharacterTokenizer(list("abc 0")).to_json())),
                "split": rule_of(random),
                "source": random.choice(
                    ({}, {"type": "files", "paths": ["a b.txt"], "field": "text", "maxBytes": None})
                ),
                "path": str(tmp_path / "store"),
            }
        )

    def python(case: dict[str, Any]) -> dict[str, Any]:
        store = built(case, Path(case["path"]))
        files = {path.name: base64.b64encode(path.read_bytes()).decode() for path in sorted(store.path.iterdir())}
        return {"files": files, "fingerprint": store.fingerprint, "hash": store.manifest["manifestHash"]}

    counts = agree(node, "build_store", cases, python)
    assert counts["value"] > 40 and counts["DataContractError"] > 5


def test_a_store_of_several_chunks(node: Node, tmp_path: Path) -> None:
    case = {
        "documents": [{"name": str(n), "text": "the quick brown fox " * 1000 * n} for n in (0, 1, 150, 3, 100)],
        "tokenizer": "bytes",
        "split": {"by": "document", "validationShare": 0.1, "seed": 0},
        "source": {},
        "path": str(tmp_path / "store"),
    }
    store = built(case, Path(case["path"]))
    assert len(store.manifest["files"]["tokens.bin"]["chunks"]) == 2
    [theirs] = node.ask("build_store", [case])
    written = base64.b64decode(theirs["value"]["files"]["manifest.json"])
    assert written == (store.path / "manifest.json").read_bytes()
    assert agree(node, "open_store", [case], lambda _: store.manifest) == {"value": 1}


def stores(random: Random, folder: Path, count: int) -> list[Path]:
    made: list[Path] = []
    while len(made) < count:
        documents = random_documents(random, 40)
        if any(document["text"] for document in documents):
            tokenizer = random.choice(("bytes", "bytes", "characters", BPE))
            case = {"documents": documents, "tokenizer": tokenizer, "split": rule_of(random), "source": {}}
            made.append(built(case, folder / f"store-{len(made)}").path)
    return made


def test_samples(node: Node, tmp_path: Path) -> None:
    random = draw("samples")
    paths = stores(random, tmp_path, 20)
    cases = []
    for _ in range(300):
        sequence = random.choice((1, 2, 3, 4, 7, 16, 64, 200, random.randrange(-1, 40)))
        cases.append(
            {
                "path": str(random.choice(paths)),
                "rule": rule_of(random),
                "part": random.choice(
                    ("train", "train", "validation", "all", "test" if random.random() < 0.1 else "all")
                ),
                "sequence": sequence,
                "mode": random.choice(("windows", "packed")),
                "stride": random.choice((None, None, 1, sequence, random.randrange(1, max(2, sequence + 2)))),
                "isolate": random.random() < 0.7,
                "indices": [random.randrange(10**6) for _ in range(8)] + [0, *range(max(0, -sequence))],
            }
        )

    def python(case: dict[str, Any]) -> list[Any]:
        view = TokenStore.open(case["path"]).split(case["part"], python_rule(case["rule"]))
        if case["mode"] == "packed":
            dataset: Any = PackedDataset(view, case["sequence"])
        else:
            dataset = WindowDataset(view, case["sequence"], stride=case["stride"], isolate_documents=case["isolate"])
        chosen = [index % len(dataset) for index in case["indices"]]
        samples = [dataset.sample(index) for index in chosen]
        return [
            dataset.describe(),
            dataset.fingerprint,
            dataset.target_counts(np.array(chosen)).tolist(),
            [[row.tolist() for row in (one.ids, one.targets, one.positions, one.segment_ids)] for one in samples],
            view.read(0, len(view)).tolist(),
        ]

    counts = agree(node, "sample_sets", cases, python)
    assert counts["value"] > 100
    assert counts["DataContractError"] > 2 and counts["ConfigError"] > 2


def rows_of(batch: Batch) -> list[Any]:
    arrays = (batch.ids, batch.targets, batch.positions, batch.segment_ids, batch.sample_ids)
    return [list(batch.ids.shape), *(array.ravel().tolist() for array in arrays), batch.target_tokens]


def test_batches(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Python shuffles ahead by this many samples, which of tiny data sets are very many epochs.
    monkeypatch.setattr(loader, "ORDER_BLOCK", 64)
    random = draw("batches of stores")
    paths = stores(random, tmp_path, 20)
    cases = []
    for _ in range(200):
        global_batch = random.choice((1, 2, 4, 6, 12))
        microbatch = random.choice([size for size in (0, 1, 2, 3, 4, 6, 12) if size and global_batch % size == 0] + [5])
        limit = random.choice((None, None, random.randrange(0, 60)))
        steps = [random.randrange(1, 30) for _ in range(3)]
        start = random.randrange(1, 8)
        cases.append(
            {
                "path": str(random.choice(paths)),
                "data": {
                    "split": {
                        "by": random.choice(("document", "share")),
                        "validationShare": random.choice((0, 0.1, 0.4)),
                    },
                    "samples": {
                        "mode": random.choice(("windows", "windows", "packed")),
                        "stride": random.choice((None, None, 1, 2)),
                        "isolateDocuments": random.random() < 0.7,
                    },
                    "sequenceLength": random.choice((1, 2, 5, 16, 50)),
                },
                "plan": {"globalBatch": global_batch, "seed": random.randrange(2**53), "limit": limit},
                "microbatch": microbatch,
                "prefetch": random.randrange(4),
                "steps": [*range(start, start + 4), *steps]
                if limit is None
                else [1, 2, *steps][: random.randrange(1, 4)],
                "evaluation": [random.choice((0, 1, 2, 3, 8)), random.choice((None, None, 1, 2, 5, 0))],
            }
        )

    def python(case: dict[str, Any]) -> list[Any]:
        section = DataSection.model_validate({"store": case["path"], **case["data"]})
        data = prepare(section)
        plan = case["plan"]
        batches = BatchPlan(len(data.train), plan["globalBatch"], plan["seed"], plan["limit"])
        made = []
        with DataLoader(data.train, batches, case["microbatch"], prefetch=case["prefetch"]) as loading:
            for step in case["steps"]:
                microbatches = loading.step(step)
                made.append(
                    [
                        loading.target_tokens(step),
                        loading.cursor(step),
                        batches.indices(step).tolist(),
                        [rows_of(batch) for batch in microbatches],
                    ]
                )
        size, most = case["evaluation"]
        evaluated = evaluation_batches(data.validation or data.train, size, batches=most)
        validation = data.validation and data.validation.fingerprint
        return [
            data.fingerprint,
            validation,
            data.tokenizer.kind,
            batches.steps,
            made,
            [rows_of(batch) for batch in evaluated],
        ]

    loader._order.cache_clear()
    counts = agree(node, "batches", cases, python)
    loader._order.cache_clear()
    assert counts["value"] > 50
    assert counts["DataContractError"] > 2 and counts["ConfigError"] > 2


def hostile_manifests(manifest: dict[str, Any]) -> list[bytes]:
    """Every field of a manifest changed, removed or joined by another, sealed anew so that only this is wrong."""
    found = []
    junk: tuple[Any, ...] = (None, True, 0, -1, 1.5, 256.0, 2**53, "", "x", [], ["a"], {}, {"é": [1.0]}, 2**60)

    def walk(value: Any, path: tuple[Any, ...]) -> None:
        for key in value if isinstance(value, dict) else range(len(value)):
            for other in (*junk, "0" * 64):
                found.append(changed(path, key, other))
            if isinstance(value, dict):
                found.append(changed(path, key, None, remove=True))
                found.append(changed(path, "more", 1))
            if isinstance(value[key], dict | list):
                walk(value[key], (*path, key))

    def changed(path: tuple[Any, ...], key: Any, other: Any, remove: bool = False) -> bytes:
        copy = json.loads(json.dumps(manifest))
        place = copy
        for step in path:
            place = place[step]
        if remove:
            del place[key]
        else:
            place[key] = other
        with contextlib.suppress(Exception):  # what cannot be sealed is refused before its seal
            copy["fingerprint"] = content_fingerprint(copy)
        with contextlib.suppress(Exception):
            copy = seal(copy)
        return json.dumps(copy).encode()

    walk({key: value for key, value in manifest.items() if key != "manifestHash"}, ())
    return found


def test_hostile_manifests(node: Node, tmp_path: Path) -> None:
    case = {"documents": [{"name": "a", "text": "hello"}, {"name": "b", "text": "world!"}], "tokenizer": "bytes"}
    store = built(
        {**case, "split": {"by": "share", "validationShare": 0.1, "seed": 0}, "source": {"a": 1}}, tmp_path / "s"
    )
    texts = hostile_manifests(store.manifest)
    plain = json.dumps(store.manifest)
    texts += [
        *(b"[]", b"3", b'"x"', b"null", b"{}", b'{"format": "other"}', b'{"format": "hybrid.tokens", "version": 2}'),
        *(b'{"format": "hybrid.tokens", "version": true}', b'{"format": "hybrid.tokens", "version": 1}'),
        *(b'{"a": \xff}', b"\xe6\x97", b"ab\xf0\x9f\x99", b"\xed\xa0\x80", b'{"a": "\xc3\xa9\xc3"}'),
        plain.replace('"documents": 2', '"documents": 2, "documents": 2').encode(),
        plain.replace('"kind"', '"hash": "", "kind"').encode(),
        json.dumps({**store.manifest, "manifestHash": "0" * 64}).encode(),
        json.dumps({**store.manifest, "source": {"changed": 1}}).encode(),
        json.dumps(
            seal({**store.manifest, "source": {"any": ["thing", None, 2**60, 1e-7, {"10": 1, "2": 2}]}})
        ).encode(),
    ]
    folders = []
    for number, text in enumerate(texts):
        folder = tmp_path / f"hostile-{number}"
        shutil.copytree(store.path, folder, copy_function=os.link)
        (folder / "manifest.json").unlink()
        (folder / "manifest.json").write_bytes(text)
        folders.append({"path": str(folder)})

    def python(case: dict[str, Any]) -> dict[str, Any]:
        opened = TokenStore.open(case["path"])
        opened.verify()
        return opened.manifest

    counts = agree(node, "open_store", folders, python)
    assert counts["DataContractError"] > 300 and counts["value"] > 0
    assert counts["DataContractError"] + counts["value"] == len(texts)


def test_text_that_is_no_json_is_refused_at_the_same_place(node: Node, tmp_path: Path) -> None:
    """The reason is in each parser's own words."""
    store = built(
        {
            "documents": [{"name": "a", "text": "hello"}],
            "tokenizer": "bytes",
            "split": {"by": "share", "validationShare": 0, "seed": 0},
            "source": {},
        },
        tmp_path / "store",
    )
    for text in (b"", b"{", b'{"a" 1}', b'{"a": }', b"[1, 2", b'{"a": 1} x', b"\xef\xbb\xbf{}", b"[" * 100_000):
        (store.path / "manifest.json").write_bytes(text)
        with pytest.raises(DataContractError) as error:
            TokenStore.open(store.path)
        [theirs] = node.ask("open_store", [{"path": str(store.path)}])
        name, message = theirs["error"]
        assert name == "DataContractError"
        assert message.split(": ")[0] == str(error.value).split(": ")[0] == f"{store.path}/manifest.json"
        assert message.split(": ")[1].startswith("not JSON")


def test_hostile_files(node: Node, tmp_path: Path) -> None:
    case = {"documents": [{"name": n, "text": t} for n, t in (("a", "first"), ("b", ""), ("c", "zweites"))]}
    rule = {"by": "share", "validationShare": 0.1, "seed": 0}
    store = built({**case, "tokenizer": "bytes", "split": rule, "source": {}}, tmp_path / "store")
    folders: list[Path] = []

    def copy() -> Path:
        folder = tmp_path / f"copy-{len(folders)}"
        shutil.copytree(store.path, folder)
        folders.append(folder)
        return folder

    (copy() / "manifest.json").unlink()
    for name in ("tokens.bin", "documents.bin", "tokenizer.json"):
        (copy() / name).unlink()
        os.truncate(copy() / name, 3)
        with (copy() / name).open("ab") as file:
            file.write(b"xy")
        size = (store.path / name).stat().st_size
        for offset in range(0, size, 1 + size // 12):
            data = bytearray((store.path / name).read_bytes())
            data[offset] ^= 1
            (copy() / name).write_bytes(data)
    for offsets in ([1, 5, 5, 12], [0, 6, 5, 12], [0, 5, 5, 11], [0, 2**63 + 5, 5, 12], [0, 5, 5, 2**64 - 1]):
        (copy() / "documents.bin").write_bytes(np.array(offsets, dtype="<u8").tobytes())
    for files in (
        {"tokens.bin": np.array([1, 2, 300, 256, *range(8)], dtype="<u2").tobytes()},
        {"tokenizer.json": CharacterTokenizer(["a", "b"]).to_json().encode()},
        {"tokenizer.json": b"{}"},
        {"tokenizer.json": b"\xff"},
    ):
        resealed(copy(), files)
    resealed(copy(), {"tokens.bin": store.tokens_path.read_bytes()}, {"vocabularySize": 300})
    resealed(copy(), {}, {"tokenizer": {"kind": "bytes", "hash": "0" * 64}})
    manifest = json.loads((store.path / "manifest.json").read_text())
    manifest["files"]["tokens.bin"]["sha256"] = "0" * 64
    resealed(copy(), {}, {"files": manifest["files"]})

    def python(case: dict[str, Any]) -> dict[str, Any]:
        opened = TokenStore.open(case["path"])
        opened.verify()
        return opened.manifest

    asked = [{"path": str(folder)} for folder in folders]
    counts = agree(node, "open_store", asked, python)
    assert counts == {"DataContractError": len(asked)}


def resealed(folder: Path, files: dict[str, bytes], change: dict[str, Any] | None = None) -> None:
    """Write files and the manifest that lists them, as a forger would."""
    manifest = {**json.loads((folder / "manifest.json").read_text(encoding="utf-8")), **(change or {})}
    for name, data in files.items():
        (folder / name).write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        manifest["files"][name] = {"bytes": len(data), "sha256": digest, "chunks": [digest]}
    manifest["fingerprint"] = content_fingerprint(manifest)
    (folder / "manifest.json").write_text(json.dumps(seal(manifest)), encoding="utf-8")


def test_where_text_is_not_utf8(node: Node) -> None:
    random = draw("utf8")
    cases = []
    for _ in range(600):
        data = bytearray(any_text(random, 6, lone=False).encode())
        for _ in range(random.randrange(3)):
            data.insert(random.randrange(len(data) + 1), random.randrange(0x70, 0x100))
        cases.append(base64.b64encode(bytes(data)).decode())

    def python(case: str) -> dict[str, Any]:
        try:
            return {"text": base64.b64decode(case).decode()}
        except UnicodeDecodeError as error:
            return {"offset": error.start}

    assert agree(node, "utf8", cases, python) == {"value": 600}


def test_files_of_text(node: Node, tmp_path: Path) -> None:
    random = draw("files of text")
    cases = []
    for number in range(200):
        files = []
        for name in random.sample(("a.txt", "b.md", "c.jsonl", "d.jsonl"), random.randrange(1, 4)):
            if name.endswith(".jsonl"):
                lines = [json.dumps({"body": any_text(random, lone=False), "n": n}) for n in range(random.randrange(4))]
                if random.random() < 0.3:
                    lines.append(
                        random.choice(("", "  ", "\r", "[1]", '{"text": 1}', '{"body": null}', '{"b": 1, "a": 2}', "3"))
                    )
                data = "\n".join(lines).encode() + random.choice((b"", b"\n"))
            else:
                data = any_text(random, 30, lone=False).encode()
            data = random.choice((b"", b"", b"\xef\xbb\xbf")) + data
            files.append((name, base64.b64encode(data).decode()))
        most = random.choice((None, None, random.randrange(1, 60)))
        cases.append({"files": files, "field": random.choice(("body", "body", "text")), "maxBytes": most, "n": number})

    def python(case: dict[str, Any]) -> list[list[str]]:
        folder = tmp_path / str(case["n"])
        folder.mkdir()
        for name, data in case["files"]:
            (folder / name).write_bytes(base64.b64decode(data))
        before = Path.cwd()
        os.chdir(folder)
        try:
            source = TextFiles(
                tuple(name for name, _ in case["files"]), field=case["field"], max_bytes=case["maxBytes"]
            )
            return [[document.name, document.text] for document in source.documents()]
        finally:
            os.chdir(before)

    counts = agree(node, "corpus", cases, python)
    assert counts["value"] > 100 and counts["DataContractError"] > 10
