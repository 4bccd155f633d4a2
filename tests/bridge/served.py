"""`hybrid serve` for tests: its application without a network, and the whole of it in a thread."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from hybrid.bridge.server.app import MOST_BYTES, serve_app
from hybrid.bridge.server.hub import Hub
from hybrid.bridge.server.imports import Imports
from hybrid.bridge.server.login import TokenGate
from hybrid.bridge.server.pages import Site
from hybrid.bridge.server.plans import PlanShelf
from hybrid.bridge.server.runs import RunFolders
from hybrid.bridge.server.serve import Options, Place, serving
from hybrid.checkpoint.archive import pack

TOKEN = "a-token-for-the-tests"
PORT = 8321
HOST = f"127.0.0.1:{PORT}"
BASE = f"http://{HOST}"
LOGIN = {"authorization": f"token {TOKEN}"}
MOST_UPLOAD = 2**20


@dataclass
class Served:
    """The application behind its gate. `ask` shows the token."""

    client: TestClient
    runs: Path
    data: Path
    imports: Imports
    site: Site

    def ask(self, method: str, path: str, status: int = 200, **options: Any) -> Any:
        headers = {**LOGIN, **options.pop("headers", {})}
        answer = self.client.request(method, f"{BASE}{path}", headers=headers, **options)
        assert answer.status_code == status, (method, path, answer.status_code, answer.text[:500])
        return answer

    def json(self, path: str, **options: Any) -> Any:
        return self.ask("GET", path, **options).json()

    def error(self, method: str, path: str, status: int, **options: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.ask(method, path, status, **options).json()
        assert set(answer["error"]) >= {"name", "message"}
        return answer["error"]


def small_export(out: Path) -> None:
    """In place of the page and Python for it, which are large."""
    (out / "plans").mkdir(parents=True)
    (out / "index.html").write_text("<!doctype html><title>hybrid</title>")
    (out / "app.js").write_text("// app")
    (out / "site.json").write_text("{}")


def build_pages(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Pages that are built, in `folder`."""
    for name in ("app", "watch"):
        place = folder / "web" / "dist" / name
        place.mkdir(parents=True)
        (place / "index.html").write_text(f"<!doctype html><title>{name}</title>")
        (place / f"{name}.js").write_text(f"// {name}")
    patch.setattr("hybrid.bridge.server.pages.resource", lambda name: folder / name)
    return folder / "web" / "dist"


@contextmanager
def served_in(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Served]:
    patch.setattr("os.fsync", lambda handle: None)  # a disk takes milliseconds for each
    runs, data = folder / "runs", folder / "stores"
    runs.mkdir()
    data.mkdir()
    dist = build_pages(folder / "built", patch)
    shelf, site = PlanShelf(), Site(small_export)
    imports = Imports(runs, MOST_UPLOAD)
    app = serve_app(RunFolders(runs), data, Hub(), imports, shelf, site, dist / "watch")
    client = TestClient(
        TokenGate(app, TOKEN, "127.0.0.1", PORT, MOST_BYTES),
        base_url=BASE,
        raise_server_exceptions=False,
        follow_redirects=False,
    )
    yield Served(client, runs, data, imports, site)
    shelf.close()
    site.close()


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pages that are built."""
    return build_pages(tmp_path / "built", monkeypatch)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """The application with folders of its own."""
    with served_in(tmp_path, monkeypatch) as here:
        yield here


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The application for tests that change nothing in its folders; making one takes a while."""
    with pytest.MonkeyPatch.context() as patch, served_in(tmp_path_factory.mktemp("asked"), patch) as here:
        yield here


@contextmanager
def running(tmp_path: Path, **options: Any) -> Iterator[Place]:
    """The server in a thread, on a free port; its runs are in `tmp_path`/runs."""
    chosen = {"runs": tmp_path / "runs", "data": tmp_path / "stores", "token": TOKEN, "port": 0, **options}
    with serving(Options(**chosen), small_export) as place:
        yield place


def client_of(place: Place) -> httpx.Client:
    return httpx.Client(base_url=f"http://127.0.0.1:{place.port}", headers=LOGIN, timeout=60)


def row(step: int, **more: Any) -> dict[str, Any]:
    """A row of metrics.jsonl."""
    return {
        "schemaVersion": 1,
        "step": step,
        "total_loss": 5 - step / 1000,
        "lr": 1e-3,
        "step_time_ms": step * 1.5,
        **more,
    }


def write_run(runs: Path, name: str, rows: int = 0, **facts: Any) -> Path:
    """A run folder with so many rows of metrics, and a validation row for each tenth."""
    folder = runs / name
    folder.mkdir(parents=True, exist_ok=True)
    record = {"format": "hybrid.run", "version": 1, "name": name, "status": "running", "steps": 100, **facts}
    (folder / "run.json").write_text(json.dumps(record))
    append(folder, *(row(step) for step in range(1, rows + 1)))
    held = ({"step": step, "split": "validation", "loss": 4.5} for step in range(10, rows + 1, 10))
    append(folder, *held, file="validation.jsonl")
    return folder


def append(folder: Path, *rows: dict[str, Any], file: str = "metrics.jsonl") -> None:
    with (folder / file).open("ab") as target:
        for one in rows:
            target.write(json.dumps(one, separators=(",", ":")).encode() + b"\n")
            target.flush()


def copy_run(recording: Path, runs: Path, name: str) -> Path:
    shutil.copytree(recording, runs / name)
    return runs / name


def packed(recording: Path, folder: Path, step: int = 10) -> Path:
    """A checkpoint of the recording as one file."""
    file = folder / f"run-step-{step:08d}.hybrid"
    pack(recording / "checkpoints" / f"step-{step:08d}", file)
    return file


def declaration(file: Path) -> dict[str, Any]:
    data = file.read_bytes()
    return {"name": file.name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


__all__ = ["asked", "built", "served"]
