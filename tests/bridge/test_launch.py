"""A run in a tab: the same run folder as any other, and every way that it can end."""

from __future__ import annotations

import json
import os
import sys
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.replay import ScriptedBrowser, Tab, config_here, train_in_tab
from hybrid.bridge.launch import dry_run_in_browser, train_in_browser
from hybrid.bridge.launch.tab_errors import TabFailed
from hybrid.bridge.launch.watch import TabLost
from hybrid.checkpoint import finding
from hybrid.checkpoint.archive import pack
from hybrid.checkpoint.loading import read_manifest
from hybrid.errors import (
    AlertRaised,
    CheckpointCorrupt,
    ConfigError,
    ContractMismatch,
    DeviceLost,
    HybridError,
    MissingDependency,
    StopRequested,
)
from hybrid.training.metrics_log import read_rows
from hybrid.training.signals import StopFlag
from hybrid.training.start import Request, Services
from training.full_disk import full_after
from training.micro import NOT_IN_A_TAB, Recorder, entries, run, run_file, state_hash, steps_saved
from training.sessions import FakeClock

pytestmark = pytest.mark.usefixtures("site")


def test_the_run_folder_is_that_of_any_other_backend(tmp_path: Path, recording: Path) -> None:
    view = Recorder()
    outcome = train_in_tab(tmp_path, recording, Tab.train, view=view)
    assert (outcome.status, outcome.step, outcome.exit_code) == ("finished", 20, 0)
    assert entries(tmp_path) == list(read_rows(recording / "metrics.jsonl"))
    assert (tmp_path / "run" / "validation.jsonl").read_text() == (recording / "validation.jsonl").read_text()
    assert steps_saved(tmp_path) == [5, 10, 15, 20]
    assert state_hash(tmp_path) == finding.resolve(recording).state_hash
    assert "<polyline" in (tmp_path / "run" / "loss.svg").read_text()
    facts, theirs = run_file(tmp_path), json.loads((recording / "run.json").read_text())
    assert facts.keys() == theirs.keys()
    same = ("status", "steps", "step", "name", "hashes", "fingerprints", "parameters", "resumedFrom")
    assert {key: facts[key] for key in same} == {key: theirs[key] for key in same}
    assert facts["backend"] == {"backend": "browser"} and facts["environment"] == {"runtime": "browser"}
    assert facts["config"]["backend"]["name"] == "browser"
    assert {**facts["config"], "data": 0, "backend": 0} == {**theirs["config"], "data": 0, "backend": 0}
    assert {path.name for path in (tmp_path / "run").iterdir()} == {path.name for path in recording.iterdir()}


def test_a_validation_loss_that_is_not_the_models_is_kept_as_such(tmp_path: Path, recording: Path) -> None:
    def script(tab: Tab) -> None:
        tab.claim()
        tab.begin()
        row = {"step": 1, "split": "validation", "loss": 3.5, "perplexity": 33.1, "targetTokens": 9, "overflow": True}
        tab.report({"kind": "validation", "row": row})
        tab.report({"kind": "error", "name": "ConfigError", "message": "enough"})

    view = Recorder()
    with pytest.raises(ConfigError, match="enough"):
        train_in_tab(tmp_path, recording, script, view=view)
    rows = list(read_rows(tmp_path / "run" / "validation.jsonl"))
    assert rows == view.of("validation") and [row["overflow"] for row in rows] == [True]


def test_lineage_names_the_run_and_the_runtime(tmp_path: Path, recording: Path) -> None:
    train_in_tab(tmp_path, recording, Tab.train)
    chain = [read_manifest(status.path) for status in finding.scan(tmp_path / "run" / "checkpoints")]
    assert [link.lineage.runtime for link in chain] == ["browser"] * 4
    assert [link.lineage.sequence for link in chain] == [1, 2, 3, 4]
    assert {link.lineage.run_id for link in chain} == {run_file(tmp_path)["runId"]}
    hashes = [None, *(link.checkpoint_hash for link in chain)]
    assert [link.lineage.previous_checkpoint_hash for link in chain] == hashes[:-1]


def test_the_view_shows_what_a_run_here_would_show(tmp_path: Path, recording: Path) -> None:
    view, local = Recorder(), Recorder()
    train_in_tab(tmp_path, recording, Tab.train, view=view)
    run(tmp_path, "evaluation.every=10", "run.logEvery=1", run="local", view=local)

    def kinds(recorder: Recorder) -> list[str]:
        return [kind for kind, _ in recorder.events if kind in ("run", "step", "validation", "checkpoint", "end")]

    assert sorted(kinds(view)) == sorted(kinds(local))
    for kind in ("run", "step", "validation", "checkpoint", "end"):
        here = {tuple(key for key in facts if key not in NOT_IN_A_TAB) for facts in local.of(kind)}
        assert {tuple(facts) for facts in view.of(kind)} == here, kind
    assert view.of("run")[0]["runDir"] == str(tmp_path / "run")
    assert view.of("checkpoint")[0]["path"] == str(tmp_path / "run" / "checkpoints" / "step-00000005")
    assert [facts["phase"] for facts in view.of("phase")] == ["data", "warm-up", "train"]
    assert view.of("end")[0]["runDir"] == str(tmp_path / "run")


@pytest.mark.parametrize("first, second", [("browser", "reference"), ("reference", "browser")])
def test_a_run_goes_on_across_the_border(tmp_path: Path, recording: Path, first: str, second: str) -> None:
    for backend, steps in ((first, 10), (second, 20)):
        if backend == "reference":
            run(tmp_path, "evaluation.every=10", f"run.steps={steps}")
        else:
            train_in_tab(tmp_path, recording, Tab.train, f"run.steps={steps}")
    assert state_hash(tmp_path) == finding.resolve(recording).state_hash
    chain = [status.ref for status in finding.scan(tmp_path / "run" / "checkpoints")]
    assert [read_manifest(ref.path).lineage.runtime for ref in chain] == [first] * 2 + [second] * 2
    assert len(entries(tmp_path)) == 20
    assert run_file(tmp_path)["resumedFrom"]["step"] == 10


@pytest.mark.parametrize("form", ["folder", "archive"])
def test_a_branch_begins_from_a_checkpoint_that_lies_elsewhere(tmp_path: Path, recording: Path, form: str) -> None:
    folder = recording / "checkpoints" / "step-00000010"
    resume = folder
    if form == "archive":
        resume = tmp_path / "ten.hybrid"
        pack(folder, resume)
    seen: dict[str, Any] = {}

    def script(tab: Tab) -> None:
        job = tab.claim()
        seen["resume"] = job["resume"]
        name = job["resume"]["name"]
        seen["manifest"] = tab.ask("GET", f"checkpoints/{name}/checkpoint.json").content
        tab.ask("GET", "checkpoints/step-00000010/checkpoint.json", 404)
        tab.train()

    train_in_tab(tmp_path, recording, script, resume=resume)
    assert seen["resume"]["name"] == "resumed" and seen["resume"]["step"] == 10
    assert seen["manifest"] == (folder / "checkpoint.json").read_bytes()
    assert steps_saved(tmp_path) == [15, 20]


def test_a_checkpoint_that_lost_its_name_for_a_moment_has_it_back(tmp_path: Path, recording: Path) -> None:
    train_in_tab(tmp_path, recording, Tab.train, "run.steps=10")
    folder = tmp_path / "run" / "checkpoints"
    (folder / "step-00000010").rename(folder / ".replaced-step-00000010-1-a-1")

    def script(tab: Tab) -> None:
        tab.claim()
        assert tab.job["resume"]["name"] == "step-00000010"
        tab.ask("GET", "checkpoints/step-00000010/checkpoint.json")
        tab.train()

    assert train_in_tab(tmp_path, recording, script).status == "finished"


def test_a_finished_run_opens_no_browser(tmp_path: Path, recording: Path) -> None:
    train_in_tab(tmp_path, recording, Tab.train)
    request = Request(config_here(tmp_path), tmp_path / "run")

    def opener(url: str) -> Any:
        raise AssertionError("opened")

    assert train_in_browser(request, Services(), headless=True, opener=opener).status == "finished"


def test_after_a_reload_the_page_goes_on_from_the_newest_checkpoint(tmp_path: Path, recording: Path) -> None:
    view = Recorder()

    def script(tab: Tab) -> None:
        tab.train(last=7)
        tab.upload(10)  # half of a save
        again = Tab(tab.url, recording, tab.headers["x-hybrid-tab"])
        again.train()
        assert again.job["resume"]["step"] == 5 and again.job["lastSequence"] == 1

    outcome = train_in_tab(tmp_path, recording, script, view=view)
    assert outcome.status == "finished" and len(entries(tmp_path)) == 20
    assert [row["step"] for row in read_rows(tmp_path / "run" / "metrics.discarded.jsonl")] == [6, 7]
    assert "moved 2 metrics rows after step 5 to metrics.discarded.jsonl" in [f["text"] for f in view.of("note")]
    assert state_hash(tmp_path) == finding.resolve(recording).state_hash


def test_a_stop_request_reaches_the_tab_which_saves_and_ends(tmp_path: Path, recording: Path) -> None:
    stop = StopFlag()
    view = Recorder(lambda kind, facts: stop.request("SIGINT received") if kind == "step" else None)
    outcome = train_in_tab(tmp_path, recording, Tab.train, view=view, stop=stop)
    assert (outcome.status, outcome.step, outcome.exit_code) == ("stopped", 5, 75)
    assert "stopped (SIGINT received), saved at step 5" in outcome.message
    assert run_file(tmp_path)["status"] == "stopped" and run_file(tmp_path)["step"] == 5


def test_the_time_limit_is_a_stop_request(tmp_path: Path, recording: Path) -> None:
    clock = FakeClock()

    def script(tab: Tab) -> None:
        tab.claim()
        tab.begin()
        assert tab.report()["stop"] is None
        clock.seconds += 3601
        assert tab.report()["stop"] == "run.maxHours = 1 is over"
        tab.end("stopped", 0)

    outcome = train_in_tab(tmp_path, recording, script, stop=StopFlag(1.0, clock))
    assert outcome.exit_code == 75 and "nothing to save at step 0" in outcome.message


def test_a_stop_request_before_any_tab_is_there_ends_at_once(tmp_path: Path, recording: Path) -> None:
    stop = StopFlag()
    browser = ScriptedBrowser(recording, lambda tab: stop.request("SIGTERM received"))
    with pytest.raises(StopRequested, match="before the first step: SIGTERM received"):
        train_in_tab(tmp_path, recording, None, stop=stop, browser=browser)
    assert browser.closed and run_file(tmp_path)["status"] == "stopped"


ERRORS = [
    ("DeviceLost", DeviceLost, 1, "failed"),
    ("ConfigError", ConfigError, 2, "failed"),
    ("CheckpointCorrupt", CheckpointCorrupt, 3, "refused"),
    ("ContractMismatch", ContractMismatch, 3, "refused"),
    ("AlertRaised", AlertRaised, 4, "alert"),
    ("StopRequested", StopRequested, 75, "stopped"),
    ("MissingDependency", MissingDependency, 2, "failed"),
    ("HybridError", HybridError, 1, "failed"),
    ("NoAdapter", HybridError, 1, "failed"),
    ("TypeError", TabFailed, 1, "failed"),
]


@pytest.mark.parametrize(("name", "kind", "code", "status"), ERRORS, ids=[row[0] for row in ERRORS])
def test_an_error_in_the_tab_is_the_same_error_here(
    tmp_path: Path, recording: Path, name: str, kind: type[HybridError], code: int, status: str
) -> None:
    def script(tab: Tab) -> None:
        tab.train(last=6)
        event = {"kind": "error", "name": name, "message": "what \x1b[31mhappened", "exitCode": code}
        more = {"differences": [["contract.seed", 1, 2]], "alerts": ["x"], "step": 6, "stack": "at line 1"}
        tab.report({**event, **more})

    with pytest.raises(kind, match="what \ufffd\\[31mhappened") as raised:
        train_in_tab(tmp_path, recording, script)
    assert raised.value.exit_code == code and "at line 1" in raised.value.__notes__[0]
    assert run_file(tmp_path)["status"] == status and steps_saved(tmp_path) == [5]
    if isinstance(raised.value, ContractMismatch):
        assert raised.value.differences == (("contract.seed", 1, 2),)
    if isinstance(raised.value, AlertRaised):
        assert (raised.value.alerts, raised.value.step) == (("x",), 6)


def test_an_alert_that_ends_the_run_has_its_exit_code(tmp_path: Path, recording: Path) -> None:
    def script(tab: Tab) -> None:
        tab.claim()
        tab.report({"kind": "end", "status": "alert", "step": 3, "message": "", "alerts": ["a", "b"]})

    with pytest.raises(AlertRaised, match=r"training telemetry alert\(s\): a, b at step 3\."):
        train_in_tab(tmp_path, recording, script)
    assert run_file(tmp_path)["status"] == "alert"


def test_a_tab_that_falls_silent_is_given_up_after_half_a_minute(tmp_path: Path, recording: Path) -> None:
    clock = FakeClock()

    def script(tab: Tab) -> None:
        tab.train(last=6)
        for _ in range(3):
            clock.seconds += 29
            tab.report()  # still there
        clock.seconds += 31

    with pytest.raises(TabLost, match=r"for 30 s: .*; the same command goes on from the checkpoint of step 5"):
        train_in_tab(tmp_path, recording, script, clock=clock)
    assert run_file(tmp_path)["status"] == "failed"
    assert train_in_tab(tmp_path, recording, Tab.train).status == "finished", "the same command goes on"
    assert state_hash(tmp_path) == finding.resolve(recording).state_hash


def test_a_tab_that_says_that_it_goes_is_given_up_sooner(tmp_path: Path, recording: Path) -> None:
    clock = FakeClock()

    def script(tab: Tab) -> None:
        tab.train(last=6)
        tab.ask("POST", "leave")
        clock.seconds += 0.2
        tab.report()  # was on its way
        clock.seconds += 10

    with pytest.raises(TabLost, match=r"the tab was closed; the same command goes on from the checkpoint of step 5"):
        train_in_tab(tmp_path, recording, script, clock=clock)


def test_a_tab_that_goes_may_come_back(tmp_path: Path, recording: Path) -> None:
    clock = FakeClock()

    def script(tab: Tab) -> None:
        tab.train(last=6)
        tab.ask("POST", "leave")
        other = Tab(tab.url, recording, "tab-2", tab.client)
        other.claim()  # at once: nobody else is there
        tab.ask("POST", "leave", 409)
        other.ask("POST", "leave")
        clock.seconds += 5
        other.report()  # out of the browser's memory of pages
        clock.seconds += 25
        other.train()

    assert train_in_tab(tmp_path, recording, script, clock=clock).status == "finished"
    assert state_hash(tmp_path) == finding.resolve(recording).state_hash


def test_a_browser_that_ends_ends_the_run_at_once(tmp_path: Path, recording: Path) -> None:
    browser = ScriptedBrowser(recording, None)

    def script(tab: Tab) -> None:
        tab.train(last=4)
        browser.gone = "the browser has ended (code -9)"

    browser._script = script
    with pytest.raises(TabLost, match=r"ended \(code -9\); the same command goes on at step 0: nothing was saved yet"):
        train_in_tab(tmp_path, recording, None, browser=browser)


def test_a_browser_that_never_opens_the_page_is_given_up(tmp_path: Path, recording: Path) -> None:
    clock = FakeClock()

    def script(tab: Tab) -> None:
        tab.ask("GET", "")
        clock.seconds += 61

    with pytest.raises(TabLost, match="has not opened the page within 60 s"):
        train_in_tab(tmp_path, recording, script, clock=clock)


def test_the_users_own_browser_may_take_its_time(tmp_path: Path, recording: Path) -> None:
    clock, waited = FakeClock(), threading.Event()

    def script(tab: Tab) -> None:
        clock.seconds += 1000
        assert not waited.wait(0.5)
        tab.train()

    browser = ScriptedBrowser(recording, script)
    browser.is_ours = False
    assert train_in_tab(tmp_path, recording, None, clock=clock, browser=browser).status == "finished"


@pytest.mark.parametrize(
    ("end", "says"),
    [
        (("finished", 20), "finished at step 20 of 20, but its newest checkpoint is of step 5"),
        (("finished", 5), "finished at step 5 of 20"),
        (("stopped", 6), "stopped at step 6 of 20, but its newest checkpoint is of step 5"),
    ],
)
def test_an_end_that_cannot_be_true_is_a_failure(
    tmp_path: Path, recording: Path, end: tuple[str, int], says: str
) -> None:
    def script(tab: Tab) -> None:
        tab.train(last=6)
        tab.report({"kind": "end", "status": end[0], "step": end[1], "message": ""}, status=410)

    with pytest.raises(HybridError, match=says):
        train_in_tab(tmp_path, recording, script)


def test_a_row_that_breaks_the_schema_ends_the_run(tmp_path: Path, recording: Path) -> None:
    def script(tab: Tab) -> None:
        tab.train(last=2)
        assert tab.report({"kind": "entry", "row": {"step": 3}}, status=410)["error"]["name"] == "ContractMismatch"

    with pytest.raises(ContractMismatch, match="training metrics: "):
        train_in_tab(tmp_path, recording, script)
    assert len(entries(tmp_path)) == 2


def test_rows_come_in_order(tmp_path: Path, recording: Path) -> None:
    def script(tab: Tab) -> None:
        tab.train(last=3)
        row = entries(recording.parent)[1]
        tab.report({"kind": "entry", "row": row}, status=410)

    with pytest.raises(HybridError, match="a row of step 2 after one of step 3"):
        train_in_tab(tmp_path, recording, script)


def test_a_disk_that_is_full_ends_the_run_with_its_reason(
    tmp_path: Path, recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(tab: Tab) -> None:
        tab.claim()
        tab.begin()
        monkeypatch.setattr("hybrid.training.metrics_log.FileIO", full_after(2))
        for row in entries(recording.parent)[:2]:
            tab.report({"kind": "entry", "row": row})
        tab.report({"kind": "entry", "row": entries(recording.parent)[2]}, status=410)

    with pytest.raises(
        HybridError, match=r"metrics\.jsonl: could not be written: No space left on device; checkpoints"
    ):
        train_in_tab(tmp_path, recording, script)
    assert run_file(tmp_path)["status"] == "failed"


def test_tensorboard_is_written_here(tmp_path: Path, recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, int]] = []

    class Board:
        def __init__(self, run_dir: Path) -> None:
            self.run_dir = run_dir

        def entry(self, row: dict[str, Any], now: float) -> None:
            written.append(("entry", row["step"]))

        def validation(self, row: dict[str, Any], now: float) -> None:
            written.append(("validation", row["step"]))

        def close(self) -> None:
            written.append(("closed", 0))

    monkeypatch.setitem(sys.modules, "tensorboard", SimpleNamespace(__spec__=ModuleSpec("tensorboard", None)))
    monkeypatch.setattr("hybrid.training.tensorboard.TensorBoard", Board)
    train_in_tab(tmp_path, recording, Tab.train, "telemetry.tensorboard=true")
    expected = {*(("entry", step) for step in range(1, 21)), ("validation", 10), ("validation", 20), ("closed", 0)}
    assert set(written) == expected and len(written) == len(expected) and written[-1][0] == "closed"


def test_what_happens_while_it_ends_does_not_hide_why(
    tmp_path: Path, recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    def script(tab: Tab) -> None:
        tab.claim()
        tab.report({"kind": "error", "name": "DeviceLost", "message": "gone"})

    monkeypatch.setattr("hybrid.bridge.launch.run.draw_losses", broken)
    with pytest.raises(DeviceLost, match="gone") as raised:
        train_in_tab(tmp_path, recording, script)
    assert "while ending the run: [Errno 28]" in raised.value.__notes__[0]


def test_what_a_tab_cannot_do_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(config_here(tmp_path, "backend.adapter=llvmpipe"), tmp_path / "run")
    with pytest.raises(ConfigError, match="a browser chooses the adapter itself"):
        train_in_browser(request, Services())
    monkeypatch.setenv("HYBRID_CHROMIUM", str(tmp_path / "none"))
    request = Request(config_here(tmp_path), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"HYBRID_CHROMIUM is .*: there is no such file"):
        train_in_browser(request, Services(), headless=True)
    assert not (tmp_path / "run").exists()


def test_a_dry_run_compiles_for_any_browser_and_opens_none(tmp_path: Path) -> None:
    facts = dry_run_in_browser(Request(config_here(tmp_path), tmp_path / "run"), Services())
    assert facts["backend"] == {"backend": "browser", "precision": "f32"}
    assert facts["memory"]["total"] > 16 * facts["parameters"] and facts["step"] == 0
    assert not (tmp_path / "run").exists()


def test_a_page_that_is_older_than_its_sources_is_used_with_a_remark(
    tmp_path: Path, recording: Path, site: Path
) -> None:
    for changed in (False, True):
        if changed:
            (tmp_path / "runtime").mkdir()
            (tmp_path / "runtime" / "session.js").write_text("// new")
            os.utime(tmp_path / "runtime" / "session.js", (2e9, 2e9))
        view = Recorder()
        train_in_tab(tmp_path, recording, Tab.train, f"run.name=micro{changed}", view=view)
        assert ("make web" in str(view.of("note"))) is changed
        (tmp_path / "run").rename(tmp_path / f"run-{changed}")
