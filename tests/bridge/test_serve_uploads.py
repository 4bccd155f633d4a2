"""Packed checkpoints that come in by pieces, and become runs only when every byte of them is right."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import struct
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from bridge.served import MOST_UPLOAD, Served, declaration, packed, write_run
from checkpoint.examples import flip
from hybrid.bridge.server import imports as imports_module
from hybrid.bridge.server.imports import FOLDER, KEPT_SECONDS, LEFT_SECONDS, MOST_OPEN, Imports
from hybrid.bridge.server.refusals import Refusal
from hybrid.checkpoint import finding
from hybrid.checkpoint.digests import digest_bytes
from hybrid.checkpoint.loading import read_manifest
from hybrid.resources import resource
from training import micro


def declare(served: Served, file: Path, status: int = 200, **changes: Any) -> Any:
    return served.ask("POST", "/api/uploads", status, json={**declaration(file), **changes}).json()


def put(served: Served, upload: str, offset: int, data: Any, status: int = 200) -> Any:
    return served.ask("PUT", f"/api/uploads/{upload}?offset={offset}", status, content=data).json()


def commit(served: Served, upload: str, status: int = 200) -> Any:
    return served.ask("POST", f"/api/uploads/{upload}/commit", status).json()


def send(served: Served, file: Path, status: int = 200) -> Any:
    """A whole file, declared, sent and committed."""
    upload = declare(served, file)["id"]
    put(served, upload, 0, file.read_bytes())
    return commit(served, upload, status)


def nothing_is_left(served: Served) -> bool:
    return served.json("/api/runs") == {"runs": []} and not list((served.runs / FOLDER).glob("*"))


# --- the way in


def test_a_file_comes_by_pieces_and_becomes_a_run(served: Served, recording: Path, tmp_path: Path) -> None:
    file = packed(recording, tmp_path)
    data = file.read_bytes()
    upload = declare(served, file)
    assert (upload["received"], upload["run"], upload["size"]) == (0, None, len(data))
    place = f"/api/uploads/{upload['id']}"
    half = len(data) // 2
    assert put(served, upload["id"], 0, data[:half]) == {"received": half}
    assert served.json(place)["received"] == half
    assert served.ask("HEAD", place).headers["upload-offset"] == str(half)
    assert served.json("/api/runs") == {"runs": []}, "nobody sees half a run"
    put(served, upload["id"], half, data[half:])
    done = commit(served, upload["id"])
    original = finding.read_ref(recording / "checkpoints" / "step-00000010")
    assert done == {
        **upload, "received": len(data), "run": "micro", "checkpoint": "step-00000010", "step": 10,
        "checkpointHash": original.checkpoint_hash,
    }  # fmt: skip
    (run,) = served.json("/api/runs")["runs"]
    assert (run["name"], run["status"], run["step"], run["steps"]) == ("micro", "stopped", 10, 20)
    assert run["problem"] is None and "uploaded as" in run["message"]
    assert finding.resolve(served.runs / "micro").state_hash == original.state_hash
    assert not (served.runs / FOLDER / upload["id"] / "archive.hybrid").exists(), "the file itself is not kept"


def test_a_run_that_came_in_goes_on_to_the_same_end(served: Served, recording: Path, tmp_path: Path) -> None:
    run = send(served, packed(recording, tmp_path))["run"]
    (tmp_path / "corpus.txt").write_text(micro.corpus())
    shutil.move(served.runs / run, tmp_path / "run")
    micro.run(tmp_path, "evaluation.every=10")
    assert micro.state_hash(tmp_path) == finding.resolve(recording).state_hash
    assert micro.run_file(tmp_path)["runId"] == json.loads((recording / "run.json").read_text())["runId"]


def test_names_of_runs_are_not_taken_twice(served: Served, recording: Path, tmp_path: Path) -> None:
    write_run(served.runs, "micro", 1)
    assert send(served, packed(recording, tmp_path, 5))["run"] == "micro-2"
    assert send(served, packed(recording, tmp_path, 15))["run"] == "micro-3"


def test_what_was_sent_survives_a_lost_answer_and_a_new_server(served: Served, recording: Path, tmp_path: Path) -> None:
    file = packed(recording, tmp_path)
    data = file.read_bytes()
    upload = declare(served, file)["id"]
    put(served, upload, 0, data[:1000])
    error = put(served, upload, 0, data[:1000], 409)
    assert error["size"] == 1000 and "1000 bytes are there" in error["error"]["message"]
    for offset in (999, 1001, 10**15):
        assert put(served, upload, offset, b"x", 409)["size"] == 1000
    assert commit(served, upload, 409)["size"] == 1000, "half an upload"
    again = Imports(served.runs, MOST_UPLOAD)
    assert again.declare(**declaration(file))["received"] == 1000, "as a server that was started again would say"
    put(served, upload, 1000, data[1000:])
    first = commit(served, upload)
    assert commit(served, upload) == first, "the answer was lost"
    assert declare(served, file) == first, "the same file once more"
    assert put(served, upload, len(data), b"x", 409)["size"] == len(data)
    shutil.rmtree(served.runs / first["run"])
    assert declare(served, file)["received"] == 0, "the run was removed since: it comes in again"


def test_a_newer_piece_takes_over_from_one_that_hangs(served: Served, recording: Path, tmp_path: Path) -> None:
    file = packed(recording, tmp_path)
    data = file.read_bytes()
    upload = declare(served, file)["id"]
    hanging = served.imports.begin(upload, 0)
    hanging.write(data[:100])
    newer = served.imports.begin(upload, 100)
    newer.write(data[100:200])
    with pytest.raises(Refusal, match="another request") as caught:
        hanging.write(b"late")
    assert caught.value.status == HTTPStatus.CONFLICT
    newer.write(data[200:])
    assert commit(served, upload)["run"] == "micro"


def test_an_upload_can_be_forgotten(served: Served, recording: Path, tmp_path: Path) -> None:
    upload = declare(served, packed(recording, tmp_path))["id"]
    served.ask("DELETE", f"/api/uploads/{upload}", 204)
    for method, path in (("GET", ""), ("DELETE", ""), ("PUT", "?offset=0"), ("POST", "/commit")):
        served.error(method, f"/api/uploads/{upload}{path}", 404)
    assert nothing_is_left(served)


def test_old_and_many_uploads_do_not_fill_the_disk(served: Served, recording: Path, tmp_path: Path) -> None:
    file = packed(recording, tmp_path)
    uploads = [declare(served, file, name=f"{index}.hybrid")["id"] for index in range(MOST_OPEN)]
    assert declare(served, file, 409)["error"]["name"] == "LimitExceeded"
    age(served.runs / FOLDER / uploads[0], LEFT_SECONDS)
    declare(served, file)
    served.error("GET", f"/api/uploads/{uploads[0]}", 404)
    served.ask("DELETE", f"/api/uploads/{uploads[1]}", 204)
    age(served.runs / FOLDER / uploads[2], LEFT_SECONDS)
    age(served.runs / FOLDER / uploads[3], KEPT_SECONDS)
    declare(served, file, name="more.hybrid")
    served.ask("GET", f"/api/uploads/{uploads[2]}")  # there was place enough
    served.error("GET", f"/api/uploads/{uploads[3]}", 404)


def age(folder: Path, seconds: float) -> None:
    """As if nobody had touched it for longer."""
    old = time.time() - seconds - 60
    for path in (*folder.iterdir(), folder):
        os.utime(path, (old, old))


# --- what is refused


@pytest.mark.parametrize(
    "change",
    [
        {"size": 0}, {"size": -1}, {"size": 2**60}, {"size": "7"}, {"size": 1.5}, {"size": True}, {"sha256": "x" * 64},
        {"sha256": "A" * 64}, {"sha256": "a" * 63}, {"name": ""}, {"name": "../x"}, {"name": "a/b"}, {"name": ".h"},
        {"name": "a\n"}, {"name": "x" * 201}, {"name": "\ud800"}, {"more": 1}, {"name": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_declaration_is_plain(asked: Served, change: dict[str, Any]) -> None:
    body = json.dumps({"name": "a.hybrid", "size": 5, "sha256": "a" * 64, **change})
    error = asked.error("POST", "/api/uploads", 422, content=body, headers={"content-type": "application/json"})
    assert error["name"] == "ConfigError"


def test_a_document_without_its_header_is_told_which(asked: Served) -> None:
    sent = asked.ask(
        "POST", "/api/uploads", 422, content=b'{"name": "a.hybrid"}', headers={"content-type": "text/plain"}
    )
    assert "Content-Type: application/json; it is 'text/plain'" in sent.json()["error"]["message"]


@pytest.mark.parametrize("upload", ["x", "0" * 31, "0" * 33, "g" * 32, "%00", "0" * 32])
def test_only_what_was_declared_is_an_upload(asked: Served, upload: str) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("PUT", "?offset=0"), ("POST", "/commit")):
        answer = asked.ask(method, f"/api/uploads/{upload}{path}", 404 if upload == "0" * 32 else 422)
        assert answer.json()["error"]["name"]


@pytest.mark.parametrize(
    "offset", ["", "?offset=", "?offset=-1", "?offset=1.5", "?offset=x", "?offset=9999999999999999999"]
)
def test_an_offset_is_a_number_of_bytes(asked: Served, offset: str) -> None:
    asked.error("PUT", f"/api/uploads/{'0' * 32}{offset}", 422, content=b"x")


def test_too_much_is_refused_wherever_it_comes(served: Served, recording: Path, tmp_path: Path) -> None:
    file = packed(recording, tmp_path)
    error = declare(served, file, 413, size=MOST_UPLOAD + 1)["error"]
    assert error["name"] == "LimitExceeded" and "--max-upload" in error["message"]
    upload = declare(served, file, size=10)["id"]
    assert put(served, upload, 0, b"x" * 11, 413)["error"]["name"] == "LimitExceeded"
    assert put(served, upload, 0, b"x" * 10) == {"received": 10}
    assert put(served, upload, 10, b"x", 413)["error"]["name"] == "LimitExceeded"
    whole = declare(served, file, name="b.hybrid")["id"]
    over = b"x" * (8 * 2**20 + 1)
    assert put(served, whole, 0, over, 413)["error"]["name"] == "LimitExceeded"
    assert put(served, whole, 0, iter([over]), 413)["error"]["name"] == "LimitExceeded"


def test_a_full_disk_is_said_so_and_costs_nothing(
    served: Served, recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = packed(recording, tmp_path)
    usage = shutil._ntuple_diskusage(1, 1, 1000)  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(imports_module.shutil, "disk_usage", lambda path: usage)
        assert "no room" in declare(served, file, 507)["error"]["message"]
    assert nothing_is_left(served)
    upload = declare(served, file)["id"]
    data = file.read_bytes()
    put(served, upload, 0, data[:100])
    with monkeypatch.context() as patch:
        opened = Path.open

        def full(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if mode == "r+b":
                raise OSError(28, "No space left on device")
            return opened(path, mode, *arguments, **options)

        patch.setattr(Path, "open", full)
        assert "No space left" in put(served, upload, 100, b"x", 507)["error"]["message"]
    assert served.json(f"/api/uploads/{upload}")["received"] == 100
    put(served, upload, 100, data[100:])
    assert commit(served, upload)["run"] == "micro"


def test_a_disk_that_fills_up_while_a_run_is_made_costs_no_upload(
    served: Served, recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = packed(recording, tmp_path)
    upload = declare(served, file)["id"]
    put(served, upload, 0, file.read_bytes())

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        assert "No space left" in commit(served, upload, 507)["error"]["message"]
    assert served.json("/api/runs") == {"runs": []}
    assert commit(served, upload)["run"] == "micro"


# --- what is no checkpoint


def rezipped(file: Path, compression: int = zipfile.ZIP_STORED, **contents: bytes) -> None:
    """The archive anew, with other contents for some files."""
    with zipfile.ZipFile(file) as old:
        parts = {name: old.read(name) for name in old.namelist()}
    parts.update({name.replace("__", "."): data for name, data in contents.items()})
    with zipfile.ZipFile(file, "w", compression) as new:
        for name, data in parts.items():
            new.writestr(zipfile.ZipInfo(name), data, compression)


def bomb(file: Path) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as target:
        target.writestr("model.safetensors", b"\0" * (512 * 2**20 // 64))


def nested(file: Path) -> None:
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as target:
        target.writestr("checkpoint.json", b"{}")
    rezipped(file, checkpoint__json=inner.getvalue())


def grown(file: Path) -> None:
    """Sizes in the table of contents that no file has."""
    data = bytearray(file.read_bytes())
    at = data.index(b"PK\x01\x02")
    struct.pack_into("<II", data, at + 20, 2**31, 2**31)
    file.write_bytes(bytes(data))


def overlapping(file: Path) -> None:
    data = bytearray(file.read_bytes())
    first = data.index(b"PK\x01\x02")
    second = data.index(b"PK\x01\x02", first + 4)
    struct.pack_into("<I", data, second + 42, 0)
    file.write_bytes(bytes(data))


def named(name: str) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        with zipfile.ZipFile(file, "a") as target:
            target.writestr(name, b"x")

    return change


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


HOSTILE: dict[str, Callable[[Path], None]] = {
    "nothing like a zip": lambda file: file.write_bytes(b"x" * 1000),
    "one byte": lambda file: file.write_bytes(b"P"),
    "cut": cut,
    "a bomb": bomb,
    "compressed": lambda file: rezipped(file, zipfile.ZIP_DEFLATED),
    "a zip in a zip": nested,
    "sizes that no file has": grown,
    "files in the same bytes": overlapping,
    "a way out": named("../../escaped"),
    "an absolute way out": named("/escaped"),
    "a way out for others": named("..\\escaped"),
    "a file twice": named("CONFIG.json"),
    "a flipped byte": lambda file: flip(file, file.stat().st_size // 2),
    "no manifest": lambda file: zipfile.ZipFile(file, "w").close(),
    "a manifest that is none": lambda file: rezipped(file, checkpoint__json=b"[" * 100_000),
    "another model": lambda file: rezipped(file, config__json=b"{}"),
    "no tokenizer": lambda file: rezipped(file, tokenizer__json=b"{}"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_no_checkpoint_becomes_no_run(served: Served, recording: Path, tmp_path: Path, kind: str) -> None:
    file = packed(recording, tmp_path)
    HOSTILE[kind](file)
    error = send(served, file, 422)["error"]
    assert error["name"] in ("CheckpointCorrupt", "CheckpointNotFound") and file.name in error["message"]
    assert str(served.runs) not in error["message"]
    assert nothing_is_left(served) and not list(tmp_path.rglob("escaped*"))


def test_another_file_than_the_declared_one_is_refused(served: Served, recording: Path, tmp_path: Path) -> None:
    file = packed(recording, tmp_path)
    upload = declare(served, file, sha256="0" * 64)["id"]
    put(served, upload, 0, file.read_bytes())
    assert "was declared" in commit(served, upload, 422)["error"]["message"]
    assert nothing_is_left(served)


VECTORS = json.loads(resource("bridge/vectors/safetensors_bad.json").read_text(encoding="utf-8"))
BAD = [case for case in VECTORS["cases"] if case["expected"] == "error"] + VECTORS["quirk_cases"]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case["name"])
def test_hostile_tensors_become_no_run(asked: Served, recording: Path, tmp_path: Path, case: dict[str, Any]) -> None:
    """With a manifest that has their right hashes: what refuses them is what they are."""
    file = hostile_archive(recording, tmp_path, base64.b64decode(case["base64"]))
    error = send(asked, file, 422)["error"]
    assert error["name"] in ("CheckpointCorrupt", "SafetensorsError")
    assert "model.safetensors" in error["message"] and "sha256" not in error["message"]
    assert nothing_is_left(asked)


def hostile_archive(recording: Path, folder: Path, tensors: bytes) -> Path:
    source = recording / "checkpoints" / "step-00000010"
    manifest = read_manifest(source)
    listed = {**manifest.files, "model.safetensors": digest_bytes(tensors)}
    file = folder / "hostile.hybrid"
    with zipfile.ZipFile(file, "w") as target:
        target.writestr("checkpoint.json", replace(manifest, files=listed).render())
        for name in manifest.files:
            target.writestr(name, tensors if name == "model.safetensors" else (source / name).read_bytes())
    return file


def test_settings_that_no_run_can_have_become_no_run(served: Served, recording: Path, tmp_path: Path) -> None:
    file = packed(recording, tmp_path)
    manifest = read_manifest(recording / "checkpoints" / "step-00000010")
    config = {**manifest.config, "run": {**manifest.config["run"], "name": "../x"}}
    rezipped(file, checkpoint__json=replace(manifest, config=config).render())
    assert "run.name" in send(served, file, 422)["error"]["message"]
    assert nothing_is_left(served)
