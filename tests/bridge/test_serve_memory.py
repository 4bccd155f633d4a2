"""A checkpoint of a gigabyte comes in, is verified and becomes a run, and the server does not grow with it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from bridge.served import LOGIN, TOKEN
from bridge.test_serve_live import PROGRAM
from hybrid.checkpoint import state
from hybrid.checkpoint.digests import Digester, FileDigest, digest_bytes
from hybrid.checkpoint.loading import read_manifest
from hybrid.checkpoint.manifest import MODEL_FILE, OPTIMIZER_FILE
from hybrid.checkpoint.store import small_files
from hybrid.config.loading import to_settings
from hybrid.config.problems import parse_config
from hybrid.config.resolve import model_config, resolve
from hybrid.models.parameters import parameter_specs

PIECE = 8 * 2**20
MIB = 2**20

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
def test_a_small_upload_does_not_make_the_server_grow(tmp_path: Path, built: Path, recording: Path) -> None:
    """The same with 24 MiB, for every day."""
    assert grown(tmp_path, recording, width=256) < 24


@linux
@pytest.mark.acceptance
def test_a_gigabyte_does_not_make_the_server_grow(
    tmp_path: Path, built: Path, recording: Path, record_property: Callable[[str, object], None]
) -> None:
    mib = grown(tmp_path, recording, width=1696, least=2**30)
    record_property("growth_mib", round(mib, 1))
    assert mib < 64


def grown(folder: Path, recording: Path, width: int, least: int = 0) -> float:
    """By how many MiB the memory of a server grew while a model of this width came in."""
    archive = folder / "large.hybrid"
    size = write_archive(archive, recording, width)
    assert size >= least
    program = folder / "program.py"
    program.write_text(PROGRAM.format(built=str(folder / "built")))
    words = ["serve", "--port", "0", "--runs", str(folder / "runs"), "--data", str(folder), "--no-browser"]
    server = subprocess.Popen(
        [sys.executable, str(program), *words], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "HYBRID_TOKEN": TOKEN, "PYTHONPATH": str(Path(__file__).parents[1])},
    )  # fmt: skip
    try:
        assert server.stdout is not None
        match = re.search(r"http://127\.0\.0\.1:([0-9]+)", server.stdout.readline())
        assert match is not None
        with httpx.Client(base_url=match[0], headers=LOGIN, timeout=600) as client:
            # What is loaded once: modules, threads, the first pieces.
            small = folder / "small.hybrid"
            write_archive(small, recording, 16)
            send(client, small)
            before = peak(server.pid)
            answer = send(client, archive)
            assert answer["step"] == 10 and answer["received"] == size
            model = folder / "runs" / answer["run"] / "checkpoints" / "step-00000010" / MODEL_FILE
            assert client.get("/api/runs").json()["runs"]
            assert received(client, f"/api/runs/{answer['run']}/checkpoints/step-00000010/{MODEL_FILE}") == (
                model.stat().st_size
            )
            return (peak(server.pid) - before) / MIB
    finally:
        server.terminate()
        server.wait(20)


def send(client: httpx.Client, archive: Path) -> dict[str, object]:
    declared = {"name": archive.name, "size": archive.stat().st_size, "sha256": sha256(archive)}
    upload = client.post("/api/uploads", json=declared).json()["id"]
    offset = 0
    for piece in pieces(archive):
        answer = client.put(f"/api/uploads/{upload}?offset={offset}", content=piece)
        assert answer.status_code == 200, answer.text
        offset = answer.json()["received"]
    done = client.post(f"/api/uploads/{upload}/commit")
    assert done.status_code == 200, done.text
    answer_of: dict[str, object] = done.json()
    return answer_of


def received(client: httpx.Client, path: str) -> int:
    with client.stream("GET", path) as answer:
        return sum(len(block) for block in answer.iter_bytes())


def peak(pid: int) -> int:
    """The most memory that a process has had so far, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+([0-9]+) kB", status)[1]) * 1024  # type: ignore[index]


def pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            yield piece


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    for piece in pieces(path):
        digest.update(piece)
    return digest.hexdigest()


def write_archive(archive: Path, recording: Path, width: int) -> int:
    """A packed checkpoint of the recording's run with a wider model, all of whose numbers are 0.5; its size."""
    source = recording / "checkpoints" / "step-00000010"
    manifest = read_manifest(source)
    settings = {**manifest.config}
    settings["model"] = {
        **settings["model"], "width": width, "feedForwardWidth": 4 * width, "headWidth": width // 2, "kvHeads": 2,
        "layers": 2, "schedule": [0, 1],
    }  # fmt: skip
    config = resolve(parse_config(settings), 256, 1)
    model = model_config(config)
    names = [(spec.name, spec.shape) for spec in parameter_specs(model)]
    moments = [(f"{slot}/{name}", shape) for slot in ("moment1", "moment2") for name, shape in names]
    tokenizer = (source / "tokenizer.json").read_text(encoding="utf-8")
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as target:
        files: dict[str, FileDigest] = {}
        digests: dict[str, state.TensorDigests] = {}
        for file, tensors in ((MODEL_FILE, names), (OPTIMIZER_FILE, moments)):
            files[file], digests[file] = write_tensors(target, file, tensors)
        for file, data in small_files(model, {}, tokenizer).items():
            files[file] = digest_bytes(data)
            target.writestr(zipfile.ZipInfo(file), data)
        whole = replace(
            manifest,
            config=to_settings(config),
            files=files,
            fingerprints=replace(manifest.fingerprints, contract={}),
            state_hash=state.state_hash(
                digests[MODEL_FILE], digests[OPTIMIZER_FILE], optimizer_step=manifest.optimizer_step,
                progress=manifest.progress.to_json(), scaler=manifest.scaler, cursor=manifest.cursor,
            ),
        )  # fmt: skip
        target.writestr(zipfile.ZipInfo("checkpoint.json"), whole.render())
    return archive.stat().st_size


def write_tensors(
    target: zipfile.ZipFile, file: str, tensors: list[tuple[str, tuple[int, ...]]]
) -> tuple[FileDigest, state.TensorDigests]:
    """A safetensors file in the archive, without holding it."""
    digester = Digester()
    found: state.TensorDigests = {}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in tensors:
        end = position + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    block = np.full(PIECE // 4, 0.5, np.float32).tobytes()
    info = zipfile.ZipInfo(file)
    info.file_size = 8 + len(text) + position
    with target.open(info, "w") as sink:
        for part in (len(text).to_bytes(8, "little"), text):
            sink.write(part)
            digester.update(memoryview(part))
        for name, shape in tensors:
            own, left = hashlib.sha256(), 4 * int(np.prod(shape))
            while left:
                piece = memoryview(block)[: min(left, len(block))]
                sink.write(piece)
                digester.update(piece)
                own.update(piece)
                left -= len(piece)
            found[name] = state.tensor_digest("F32", shape, own.hexdigest())
    return digester.result(), found
