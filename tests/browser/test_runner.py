"""The training runner in a worker of a real Chromium: a run in parts is one run, and a lost device costs nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from browser import runner_fixtures
from hybrid.contracts.metrics import validate_entry

pytestmark = pytest.mark.browser

MODULE = "/test/support/run_page.js"


@pytest.fixture(scope="module", autouse=True)
def _run(plan_folder: Path) -> None:
    runner_fixtures.write(plan_folder / "run")


def test_twenty_steps_are_ten_and_ten_in_the_private_file_system(page):
    report = page.call_in_worker(MODULE, "partsInOpfs")
    whole, parts = report["whole"], report["parts"]
    assert whole["outcome"]["status"] == parts["outcome"]["status"] == "finished"
    assert whole["stateHash"] == parts["stateHash"], "bit for bit, with dropout"
    assert [row["total_loss"] for row in whole["entries"]] == [row["total_loss"] for row in parts["entries"]]
    assert whole["validation"] == parts["validation"]
    for mine, reference in zip(whole["entries"], whole["reference"]["entries"], strict=True):
        validate_entry(mine)
        assert mine["total_loss"] == pytest.approx(reference["total_loss"], rel=1e-6)
        assert mine["environment_metadata"]["surface"] == "browser"
    assert whole["samples"] == whole["reference"]["samples"]
    assert {"run.json", "metrics.jsonl", "validation.jsonl", "checkpoints"} <= set(report["files"])
    assert report["checkpoints"] == [f"step-{step:08d}" for step in (5, 10, 15, 20)]


def test_a_run_whose_device_is_destroyed_ends_in_the_same_state(page):
    report = page.call_in_worker(MODULE, "losses")
    assert report["outcome"]["status"] == "finished"
    assert report["stateHash"] == report["undisturbed"]
    assert sum("going on from the last checkpoint" in note for note in report["notes"]) == 2
