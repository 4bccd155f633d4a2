"""A tab without a browser: speaks the protocol of a launched run, and replays what another run has recorded.

The recording is a micro run of the reference backend. What a tab would compute is the same, so its rows and checkpoints
pass for the tab's own once they name it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from checkpoint.examples import Unsynced
from hybrid.bridge.launch import train_in_browser
from hybrid.checkpoint.loading import read_manifest
from hybrid.checkpoint.manifest import MANIFEST_NAME, Lineage, Manifest
from hybrid.training.metrics_log import read_rows
from hybrid.training.outcome import Outcome
from hybrid.training.signals import StopFlag
from hybrid.training.start import Request, Services
from training import micro

PIECE = 8 * 1024 * 1024
DEFAULTS = ("evaluation.every=10",)


@pytest.fixture(scope="session")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of 20 steps, saved every 5 and evaluated every 10."""
    folder = tmp_path_factory.mktemp("recording")
    micro.run(folder, *DEFAULTS)
    return folder / "run"


def config_here(folder: Path, *assignments: str) -> Any:
    """The recording's settings, for the browser."""
    return micro.micro_config(folder, *DEFAULTS, "backend.name=browser", *assignments)


class Tab:
    """One load of the page. Every call raises for an answer that is not 200, unless it says otherwise."""

    def __init__(self, url: str, recording: Path, name: str = "tab-1", client: Any = None) -> None:
        self.url = url
        self.recording = recording
        self.client = client or httpx.Client(timeout=60)
        self.headers = {"x-hybrid-tab": name}
        self.sequence = 0
        self.job: dict[str, Any] = {}
        self.parent: str | None = None
        self.saves = 0
        self.stop: str | None = None

    def ask(self, method: str, path: str, status: int = 200, **options: Any) -> Any:
        headers = {**self.headers, **options.pop("headers", {})}
        answer = self.client.request(method, self.url + path, headers=headers, **options)
        assert answer.status_code == status, (method, path, answer.status_code, answer.text)
        return answer

    def claim(self) -> dict[str, Any]:
        self.job = self.ask("GET", "job.json").json()
        resume = self.job["resume"]
        self.parent = resume["checkpointHash"] if resume else None
        self.saves = self.sequence = 0
        return self.job

    @property
    def begun_at(self) -> int:
        return self.job["resume"]["step"] if self.job["resume"] else 0

    def report(self, *events: dict[str, Any], status: int = 200) -> Any:
        self.sequence += 1
        body = {"sequence": self.sequence, "events": list(events)}
        answer = self.ask("POST", "events", status, json=body).json()
        self.stop = answer.get("stop")
        return answer

    def begin(self) -> None:
        """What a runner reports before its first step."""
        self.report(*({"kind": "phase", "phase": phase} for phase in ("data", "warm-up")))
        self.report(*[{"kind": "cut", "file": name, "step": self.begun_at} for name in ("metrics", "validation")])
        self.report(
            {"kind": "record", "facts": {"backend": {"backend": "browser"}, "environment": {"runtime": "browser"},
                                         "provenance": None, "step": self.begun_at, "runId": "not its business"}},
            {"kind": "run", "name": "micro", "runId": self.job["runId"], "runDir": None, "step": self.begun_at,
             "steps": self.job["steps"], "backend": "browser", "adapter": "none", "precision": "f32",
             "parameters": self.job["parameters"], "trainTokens": 1, "tokensPerStep": 64, "memory": {"total": 1},
             "resumedFrom": None},
            {"kind": "phase", "phase": "train"},
        )  # fmt: skip

    def steps(self, first: int, last: int) -> None:
        """Rows of these steps, and a summary of each."""
        for row in read_rows(self.recording / "metrics.jsonl"):
            if first <= row["step"] <= last:
                self.report({"kind": "entry", "row": row}, {"kind": "step", **summary(row)})
        for row in read_rows(self.recording / "validation.jsonl"):
            if first <= row["step"] <= last:
                self.report({"kind": "validation", "row": row})

    def manifest(self, step: int, **changes: Any) -> Manifest:
        """The manifest that a tab would write for the recording's checkpoint of this step."""
        found = read_manifest(self.folder(step))
        lineage = Lineage(self.job["runId"], self.job["lastSequence"] + self.saves + 1, self.parent, "browser")
        return replace(found, **{"lineage": lineage, "config": self.job["config"], **changes})

    def folder(self, step: int) -> Path:
        return self.recording / "checkpoints" / f"step-{step:08d}"

    def upload(self, step: int, piece: int = PIECE) -> None:
        name = f"step-{step:08d}"
        for path in sorted(self.folder(step).iterdir()):
            if path.name != MANIFEST_NAME:
                data = path.read_bytes()
                for offset in range(0, max(1, len(data)), piece):
                    self.put(name, path.name, offset, data[offset : offset + piece])

    def put(self, name: str, file: str, offset: int, piece: bytes, status: int = 200) -> Any:
        return self.ask("PUT", f"checkpoints/{name}/{file}?offset={offset}", status, content=piece).json()

    def commit(self, step: int, status: int = 200, **changes: Any) -> Any:
        text = self.manifest(step, **changes).render()
        answer = self.ask("POST", f"checkpoints/step-{step:08d}/commit", status, content=text).json()
        if status == 200:
            self.parent = answer["checkpointHash"]
            self.saves += 1
            self.report({"kind": "checkpoint", "step": step})
        return answer

    def save(self, step: int) -> None:
        self.upload(step)
        self.commit(step)

    def end(self, status: str, step: int) -> None:
        self.report({"kind": "end", "status": status, "step": step, "message": f"{status} in the tab"})

    def train(self, last: int | None = None) -> None:
        """Claim the run and take it to its end (or to `last`, and leave it there), stopping when that is asked for."""
        self.claim()
        self.begin()
        steps = self.job["steps"]
        for step in range(self.begun_at + 1, (last or steps) + 1):
            self.steps(step, step)
            if step % 5 == 0:
                self.save(step)
                if self.stop is not None:
                    return self.end("stopped", step)
        if last is None:
            self.end("finished", steps)


def summary(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "step": row["step"], "steps": 20, "epoch": row["epoch"], "loss": row["total_loss"], "lr": row["lr"],
        "gradNorm": row["gradient_norm_unclipped"], "lossScale": row["loss_scale"], "skipped": 0,
        "tokensPerSecond": 1000.0, "stepMs": 5, "memoryBytes": 1, "etaSeconds": None, "alerts": [],
    }  # fmt: skip


Script = Callable[[Tab], None]


class ScriptedBrowser:
    """Opens the address in a thread, where `script` plays the tab. What goes wrong there is kept in `failure`."""

    is_ours = True

    def __init__(self, recording: Path, script: Script | None) -> None:
        self.failure: BaseException | None = None
        self.gone: str | None = None
        self.closed = False
        self._recording = recording
        self._script = script

    def __call__(self, url: str) -> ScriptedBrowser:
        self.url = url
        self._thread = threading.Thread(target=self._run, args=(url,), daemon=True)
        self._thread.start()
        return self

    def _run(self, url: str) -> None:
        if self._script is not None:
            try:
                self._script(Tab(url, self._recording))
            except BaseException as error:
                self.failure = error

    def problem(self) -> str | None:
        return self.gone

    def says(self) -> str:
        return ""

    def close(self) -> None:
        self.closed = True

    def join(self) -> None:
        self._thread.join(60)
        if self.failure is not None:
            raise self.failure


def train_in_tab(
    folder: Path,
    recording: Path,
    script: Script | None,
    *assignments: str,
    view: micro.Recorder | None = None,
    stop: StopFlag | None = None,
    clock: Callable[[], float] | None = None,
    browser: ScriptedBrowser | None = None,
    **request: Any,
) -> Outcome:
    """A whole launched run in `folder`/run, with `script` for a tab."""
    clocks = {} if clock is None else {"clock": clock}
    services = Services(view=view or micro.Recorder(), stop=stop or StopFlag(), filesystem=Unsynced(), **clocks)
    browser = browser or ScriptedBrowser(recording, script)
    wanted = Request(config_here(folder, *assignments), folder / "run", **request)
    outcome = train_in_browser(wanted, services, headless=True, opener=browser)
    browser.join()
    return outcome


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page that is built."""
    folder = tmp_path / "site"
    (folder / "parts").mkdir(parents=True)
    (folder / "launch.html").write_text("<!doctype html><title>hybrid</title>")
    (folder / "launch.js").write_text("// script")
    (folder / "parts" / "worker.js").write_text("// worker")
    monkeypatch.setattr("hybrid.bridge.server.files.web_build", lambda: folder)
    return folder
