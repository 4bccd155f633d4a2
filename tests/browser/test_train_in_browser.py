"""`hybrid train --backend browser --headless`, with a real Chromium: the same run in a tab, and back and forth."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browser.harness import Chromium
from hybrid.bridge.launch import train_in_browser
from hybrid.bridge.launch.browser import HeadlessChromium
from hybrid.bridge.launch.watch import TabLost
from hybrid.checkpoint import finding, loading
from hybrid.checkpoint.loading import read_manifest
from hybrid.contracts.metrics import OPTIONAL_FIELDS
from hybrid.errors import AlertRaised, HybridError
from hybrid.models.initial_numpy import initial_values
from hybrid.resources import resource
from hybrid.training import metrics_log
from hybrid.training.metrics_log import read_rows
from hybrid.training.outcome import Outcome
from hybrid.training.parity.contract import CONTRACT
from hybrid.training.signals import StopFlag
from hybrid.training.start import Request, Services
from training import micro
from training.full_disk import full_after

pytestmark = pytest.mark.browser

# 17,472 parameters.
PATIENCE = 60.0  # seconds; a busy machine compiles slowly
SETTINGS = ("model.width=32", "model.feedForwardWidth=64", "run.logEvery=1", "evaluation.every=10")


@pytest.fixture(scope="session", autouse=True)
def built() -> None:
    try:
        resource("web/dist/launch.html")
    except HybridError:
        pytest.fail("the page is not built: run `make web`")


def in_a_tab(
    folder: Path, *assignments: str, run: str = "run", view: Any = None, opener: Any = None, **request: Any
) -> Outcome:
    config = micro.micro_config(folder, *SETTINGS, "backend.name=browser", *assignments)
    services = Services(view=view or micro.Recorder())
    return train_in_browser(Request(config, folder / run, **request), services, headless=True, opener=opener)


def here(folder: Path, backend: str, steps: int, run: str = "run") -> None:
    micro.run(folder, *SETTINGS, f"backend.name={backend}", f"run.steps={steps}", run=run)


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose `run` did ten steps in a tab, undisturbed."""
    folder = tmp_path_factory.mktemp("ten")
    assert in_a_tab(folder, "run.steps=10").message == f"finished at step 10: {folder / 'run'}"
    return folder


@pytest.fixture
def begun(ten: Path, tmp_path: Path) -> Path:
    """A copy of it, to go on with."""
    shutil.copytree(ten / "run", tmp_path / "run")
    return tmp_path


def test_ten_steps_leave_the_folder_that_they_leave_anywhere(ten: Path) -> None:
    here(ten, "reference", 10, "reference")
    ours, theirs = micro.entries(ten), micro.entries(ten, "reference")
    assert [row["step"] for row in ours] == list(range(1, 11))
    exact = ("epoch", "batch", "lr", "effective_lr", "scheduler_phase", "optimizer_step", "loss_scale", "overflow")
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys() - set(OPTIONAL_FIELDS)
        assert {key: mine[key] for key in exact} == {key: other[key] for key in exact}
        assert mine["supervised_token_count"] == other["supervised_token_count"]
        assert mine["total_loss"] == pytest.approx(other["total_loss"], rel=CONTRACT["loss"].limit)
    assert micro.steps_saved(ten) == [5, 10]
    facts = micro.run_file(ten)
    assert facts.keys() == micro.run_file(ten, "reference").keys()
    assert facts["status"] == "finished" and facts["backend"]["backend"] == "browser"
    assert {path.name for path in (ten / "run").iterdir()} == {path.name for path in (ten / "reference").iterdir()}
    rows = [list(read_rows(ten / run / "validation.jsonl")) for run in ("run", "reference")]
    assert rows[0][0]["loss"] == pytest.approx(rows[1][0]["loss"], rel=CONTRACT["loss"].limit)


@pytest.mark.webgpu
def test_the_relay_of_four_runtimes_is_one_run(begun: Path) -> None:
    here(begun, "webgpu", 20)
    here(begun, "reference", 30)
    in_a_tab(begun, "run.steps=40")
    here(begun, "reference", 40, "straight")

    ours, theirs = micro.entries(begun), micro.entries(begun, "straight")
    assert [row["step"] for row in ours] == list(range(1, 41))
    for mine, other in zip(ours, theirs, strict=True):
        for key in ("epoch", "batch", "lr", "optimizer_step", "supervised_token_count", "ignored_target_count"):
            assert mine[key] == other[key], key
        assert mine["total_loss"] == pytest.approx(other["total_loss"], rel=CONTRACT["loss"].limit), mine["step"]

    chain = [read_manifest(status.path) for status in finding.scan(begun / "run" / "checkpoints")]
    assert [link.progress.step for link in chain] == list(range(5, 41, 5))
    runtimes = [link.lineage.runtime for link in chain]
    assert runtimes == ["browser"] * 2 + ["webgpu"] * 2 + ["reference"] * 2 + ["browser"] * 2
    assert [link.lineage.sequence for link in chain] == list(range(1, 9))
    hashes = [None, *(link.checkpoint_hash for link in chain)]
    assert [link.lineage.previous_checkpoint_hash for link in chain] == hashes[:-1]
    assert len({link.lineage.run_id for link in chain}) == 1

    mine, other = (loading.load(finding.resolve(begun / run).path) for run in ("run", "straight"))
    assert mine.manifest.progress == other.manifest.progress and mine.manifest.cursor == other.manifest.cursor
    start = initial_values(mine.model_config, mine.manifest.seed)
    updates = [{name: loaded.model[name] - start[name] for name in start} for loaded in (mine, other)]
    assert cosine_distance(*(np.concatenate([a.ravel() for a in u.values()]) for u in updates)) <= 1e-6
    for name in start:
        assert cosine_distance(updates[0][name], updates[1][name]) <= CONTRACT["update_worst"].limit, name


def cosine_distance(a: Any, b: Any) -> float:
    a, b = (x.ravel().astype(np.float64) / np.linalg.norm(x.astype(np.float64)) for x in (a, b))
    return float(np.sum((a - b) ** 2) / 2)


def test_a_browser_that_is_killed_costs_no_more_than_the_steps_since_the_last_save(ten: Path, tmp_path: Path) -> None:
    opened: list[HeadlessChromium] = []

    def opener(url: str) -> HeadlessChromium:
        opened.append(HeadlessChromium(url))
        return opened[0]

    def kill(kind: str, facts: Any) -> None:
        if kind == "checkpoint" and facts["step"] >= 3:
            with contextlib.suppress(ProcessLookupError):
                os.kill(opened[0].pid, signal.SIGKILL)

    with pytest.raises(
        TabLost, match=r"the browser has ended .*; the same command goes on from the checkpoint of"
    ) as lost:
        in_a_tab(tmp_path, "run.steps=10", "checkpoint.every=1", view=micro.Recorder(kill), opener=opener)
    assert micro.run_file(tmp_path)["status"] == "failed"
    saved = finding.resolve(tmp_path / "run").step
    assert 3 <= saved < 10 and str(lost.value).endswith(f"step {saved}")
    view = micro.Recorder()
    in_a_tab(tmp_path, "run.steps=10", view=view)
    assert view.of("run")[0]["step"] == saved and len(micro.entries(tmp_path)) == 10
    assert micro.state_hash(tmp_path) == micro.state_hash(ten), "bitwise: the same runtime on the same device"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for processes in /proc")
def test_a_page_that_crashes_is_noticed_at_once(tmp_path: Path) -> None:
    opened: list[HeadlessChromium] = []

    def opener(url: str) -> HeadlessChromium:
        opened.append(HeadlessChromium(url))
        return opened[0]

    def crash(kind: str, facts: Any) -> None:
        if kind == "checkpoint":
            for process in renderers(opened[0].pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    begun = time.monotonic()
    with pytest.raises(TabLost, match=r"the page has crashed \(.*\); the same command goes on from the checkpoint of"):
        in_a_tab(tmp_path, "run.steps=100000", "checkpoint.every=1", view=micro.Recorder(crash), opener=opener)
    assert time.monotonic() - begun < PATIENCE
    assert micro.run_file(tmp_path)["status"] == "failed"


def renderers(browser: int) -> list[int]:
    """The processes of a Chromium that show its pages."""
    found = []
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            group, words = os.getpgid(int(path.name)), (path / "cmdline").read_bytes()
            if group == os.getpgid(browser) and b"--type=renderer" in words:
                found.append(int(path.name))
    return found


def test_a_full_disk_fails_the_run_and_its_checkpoints_are_whole(tmp_path: Path, ten: Path) -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(HybridError, match="No space left on device; checkpoints"),
    ):
        patch.setattr(metrics_log, "FileIO", full_after(7))
        in_a_tab(tmp_path, "run.steps=10", "checkpoint.every=1")
    assert micro.run_file(tmp_path)["status"] == "failed"
    saved = micro.steps_saved(tmp_path)
    assert saved and finding.resolve(tmp_path / "run").step == saved[-1] <= 7
    in_a_tab(tmp_path, "run.steps=10")
    assert micro.state_hash(tmp_path) == micro.state_hash(ten)


class Command:
    """`hybrid train` on the command line, its browser's files in a folder of their own."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.temporary = Path(tempfile.mkdtemp())  # near the root, for Chromium's sockets have short names only
        micro.config_file(folder)
        settings = [word for setting in SETTINGS for word in ("--set", setting)]
        command = [
            sys.executable,
            "-m",
            "hybrid",
            "train",
            "micro.json",
            "--backend",
            "browser",
            "--headless",
            "--json",
        ]
        self.process = subprocess.Popen(
            [*command, *settings, "--run-dir", "run", *words], cwd=folder, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "TMPDIR": str(self.temporary)},
        )  # fmt: skip

    def until(self, event: str) -> dict[str, Any]:
        """The next event of this kind."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            facts: dict[str, Any] = json.loads(line)
            if facts["event"] == event:
                return facts
        raise AssertionError(f"it ended without {event!r}")

    def browsers(self) -> list[int]:
        """Processes whose command line names this command's folder for temporary files."""
        found = []
        for path in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if path.name.isdigit() and f"={self.temporary}/".encode() in (path / "cmdline").read_bytes():
                    found.append(int(path.name))
        return found


def test_ctrl_c_saves_in_the_tab_and_the_same_command_goes_on(ten: Path, tmp_path: Path) -> None:
    command = Command(tmp_path, "--steps", "1000000", "--set", "evaluation.every=0")
    command.until("step")
    command.process.send_signal(signal.SIGINT)
    end = command.until("end")
    assert command.process.wait(30) == 75
    assert (end["status"], end["exitCode"]) == ("stopped", 75) and "SIGINT received" in end["message"]
    assert micro.run_file(tmp_path)["status"] == "stopped"
    step = end["step"]
    assert finding.resolve(tmp_path / "run").step == step and len(micro.entries(tmp_path)) == step
    assert command.browsers() == []
    command.temporary.rmdir()  # nothing is left behind

    again = Command(tmp_path, "--steps", str(step + 3), "--set", "evaluation.every=0")
    assert again.until("run")["step"] == step
    assert again.until("end")["step"] == step + 3 and again.process.wait(30) == 0
    assert [row["step"] for row in micro.entries(tmp_path)] == list(range(1, step + 4))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for processes in /proc")
def test_a_process_that_is_killed_takes_its_browser_along(tmp_path: Path) -> None:
    command = Command(tmp_path, "--steps", "1000000")
    command.until("step")
    assert command.browsers()
    command.process.kill()
    command.process.wait(30)
    deadline = time.monotonic() + 20
    while command.browsers() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert command.browsers() == []


def test_an_alert_in_the_tab_ends_the_run_before_the_step_is_applied(begun: Path) -> None:
    alerts = ("telemetry.alerts.enabled=true", "telemetry.alerts.failOnAlert=true")
    with pytest.raises(AlertRaised, match=r"telemetry alert\(s\): max_gradient_norm_exceeded at step 11\.") as raised:
        in_a_tab(begun, "run.steps=12", *alerts, "telemetry.alerts.thresholds.maxGradientNorm=1e-9")
    assert raised.value.exit_code == 4
    assert micro.run_file(begun)["status"] == "alert" and micro.steps_saved(begun) == [5, 10]
    assert micro.entries(begun)[-1]["telemetry_alerts"] == ["max_gradient_norm_exceeded"]


def test_a_browser_without_an_adapter_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "HYBRID_CHROMIUM_FLAGS", "--disable-gpu --disable-software-rasterizer --use-webgpu-adapter=default"
    )
    with pytest.raises(HybridError, match="WebGPU") as raised:
        in_a_tab(tmp_path, "run.steps=2")
    assert type(raised.value).__name__ == "NoAdapter" and raised.value.exit_code == 1


def test_half_precision_that_the_adapter_lacks_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(HybridError, match="shader-f16"):
        in_a_tab(tmp_path, "run.steps=2", "precision.type=mixed-f16")


class Shown:
    """The launched page in the tests' own browser."""

    is_ours = False

    def __init__(self, chromium: Chromium) -> None:
        self._chromium = chromium
        self._pages: list[Any] = []

    def __call__(self, url: str) -> Shown:
        self.url = url
        self.show()
        return self

    def show(self) -> Any:
        """The page once more, in a browser profile of its own."""
        self._pages.append(self._chromium.run(lambda: self._chromium.browser.new_context().new_page()))
        self._chromium.run(lambda: self._pages[-1].goto(self.url))
        return self._pages[-1]

    def problem(self) -> str | None:
        return None

    def says(self) -> str:
        return ""

    def close(self) -> None:
        for page in self._pages:
            self._chromium.run(page.context.close)


def test_a_second_tab_says_that_the_run_is_open_and_leaves_it_alone(tmp_path: Path, chromium: Chromium) -> None:
    stop, begun, shown = StopFlag(), threading.Event(), Shown(chromium)
    texts: list[str] = []

    def second() -> None:
        try:
            assert begun.wait(60)
            page = shown.show()
            chromium.run(lambda: page.wait_for_selector("#status.error", timeout=60_000))
            texts.append(chromium.run(lambda: page.inner_text("#status")))
        finally:
            stop.request("seen")

    watcher = threading.Thread(target=second)
    watcher.start()
    view = micro.Recorder(lambda kind, facts: begun.set() if kind == "step" else None)
    config = micro.micro_config(tmp_path, *SETTINGS, "backend.name=browser", "run.steps=1000000", "evaluation.every=0")
    services = Services(view=view, stop=stop)
    outcome = train_in_browser(Request(config, tmp_path / "run"), services, opener=shown)
    watcher.join()
    assert texts == ["ConfigError: this run is already open in another tab: close that one, or this one"]
    assert outcome.status == "stopped" and len(view.of("run")) == 1
    assert [row["step"] for row in micro.entries(tmp_path)] == list(range(1, outcome.step + 1))
