"""`hybrid train --backend browser` on the command line: which way it goes, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from bridge.replay import ScriptedBrowser, Tab
from hybrid.cli.commands import doctor
from hybrid.cli.main import main
from hybrid.errors import HybridError
from training.micro import config_file, run_file


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    config_file(tmp_path)
    return tmp_path


def train(*words: str) -> int:
    return main(["train", "micro.json", *words])


def unbuilt(name: str) -> Path:
    raise HybridError(f"this installation lacks {name!r}")


@pytest.mark.parametrize("headless", [True, False])
def test_the_backend_decides_who_takes_the_steps(
    here: Path, recording: Path, site: Path, monkeypatch: pytest.MonkeyPatch, headless: bool
) -> None:
    opened: list[ScriptedBrowser] = []

    def opener(url: str, **more: Any) -> ScriptedBrowser:
        opened.append(ScriptedBrowser(recording, Tab.train)(url))
        return opened[0]

    kind = "HeadlessChromium" if headless else "UserBrowser"
    monkeypatch.setattr(f"hybrid.bridge.launch.command.{kind}", opener)
    words = ["--headless"] if headless else []
    assert train("--backend", "browser", "--set", "evaluation.every=10", *words) == 0
    opened[0].join()
    assert run_file(here, "runs/micro")["config"]["backend"]["name"] == "browser"
    assert main(["sample", "runs/micro", "--backend", "reference", "--prompt", "the ", "--tokens", "2"]) == 0


def test_a_run_of_a_tab_is_evaluated_like_any_other(
    here: Path, recording: Path, site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hybrid.bridge.launch.command.HeadlessChromium", ScriptedBrowser(recording, Tab.train))
    assert train("--backend", "browser", "--set", "evaluation.every=10", "--headless") == 0
    monkeypatch.setattr("hybrid.training.sessions.choose_backend", lambda config, note: "reference")
    assert main(["eval", "runs/micro"]) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--headless"], "--headless goes with --backend browser, not with reference"),
        (["--backend", "browser", "--adapter", "0"], "a browser chooses the adapter itself"),
        (["--backend", "brauser"], "browser"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(
    here: Path, site: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    for dry in ([], ["--dry-run"]):
        assert train(*words, *dry) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1
    assert not (here / "runs").exists()


def test_a_page_that_is_not_built_and_packages_that_are_missing_are_one_line(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hybrid.bridge.server.files.resource", unbuilt)
    assert train("--backend", "browser") == 1
    assert "run `make web`" in capsys.readouterr().err
    assert doctor.examine()["backends"]["browser"]["runs"] is False
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "fastapi" else find(name))
    assert train("--backend", "browser") == 2
    assert capsys.readouterr().err == "hybrid: this needs the optional package 'fastapi': pip install 'hybrid[web]'\n"
    assert not (here / "runs").exists()


def test_a_dry_run_says_what_the_tab_would_need(here: Path, site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--backend", "browser", "--dry-run", "--json") == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["event"] == "dry-run" and facts["backend"]["backend"] == "browser"
    assert train("--backend", "browser", "--dry-run") == 0
    assert "backend: browser, f32" in capsys.readouterr().out
