"""Something happens to one rank, in each phase of a run: an error ends every rank with the same message, and a stop (a
signal, or the time limit) saves what there is and ends every rank with exit code 75. With real processes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from hybrid.checkpoint import finding
from hybrid.errors import EXIT_FAILED, EXIT_STOPPED
from torch_backend.faults import BOOM
from torch_backend.jobs import SECONDS, job, run_jobs
from training.micro import run_file

pytestmark = pytest.mark.torch

# Phase, rank, how its message begins, and whether run.json was there to say so. Rank 0 alone reads and writes.
ERRORS = [
    ("connecting", 0, "rank 0 failed in connecting", True),
    ("connecting", 1, "rank 1 failed in connecting", True),
    ("building", 0, "rank 0 failed", True),
    ("building", 1, "rank 1 failed", True),
    ("compile", 0, "rank 0 failed", True),
    ("compile", 1, "rank 1 failed", True),
    ("step", 0, "rank 0 failed in step 3", True),
    ("step", 1, "rank 1 failed in step 3", True),
    ("update", 0, "rank 0 failed", True),
    ("update", 1, "rank 1 failed", True),
    ("evaluation", 0, "rank 0 failed in evaluation", True),
    ("evaluation", 1, "rank 1 failed in evaluation", True),
    ("settings", 0, "rank 0 failed", False),
    ("reading", 0, "rank 0 failed", True),
    ("loading", 0, "rank 0 failed", True),
    ("logging", 0, "rank 0 failed", True),
    ("export", 0, "rank 0 failed", True),
    ("writing", 0, "saving step 2 failed on rank 0", True),
    ("writing", 1, "saving step 2 failed on rank 1", True),
]
# Phase, rank, kind, and whether steps are done by then, which are to be saved.
STOPS = [
    ("rendezvous", 0, "signal", False),
    ("rendezvous", 1, "signal", False),
    ("reading", 0, "signal", False),
    ("connecting", 1, "signal", False),
    ("building", 0, "hours", False),
    ("compile", 0, "signal", False),
    ("compile", 1, "signal", False),
    ("loading", 0, "signal", True),
    ("step", 0, "hours", True),
    ("step", 1, "signal", True),
    ("evaluation", 0, "hours", True),
    ("evaluation", 1, "signal", True),
    ("logging", 0, "signal", True),
    ("export", 0, "hours", True),
    ("writing", 1, "signal", True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("phases")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Any]:
    jobs = [job("faulty", 2, name(p, r, "error"), phase=p, rank=r, kind="error") for p, r, *_ in ERRORS]
    jobs += [job("faulty", 2, name(p, r, k), phase=p, rank=r, kind=k) for p, r, k, _ in STOPS]
    jobs.append(job("faulty", 2, "killed", phase="step", rank=1, kind="kill"))
    jobs.append(job("faulty", 2, "stuck", phase="compile", rank=1, kind="hang"))
    return run_jobs(folder, *jobs)


def name(phase: str, rank: int, kind: str) -> str:
    return f"{kind}-{phase}-{rank}"


@pytest.mark.parametrize(("phase", "rank", "begins", "recorded"), ERRORS)
def test_an_error_ends_every_rank_with_the_same_message_soon(
    folder: Path, outcomes: dict[str, Any], phase: str, rank: int, begins: str, recorded: bool
) -> None:
    run = name(phase, rank, "error")
    outcome = outcomes[run]
    assert outcome["errors"] == [f"hybrid: {begins}: RuntimeError: {BOOM}\n"] * 2
    assert outcome["codes"] == [EXIT_FAILED] * 2
    assert outcome["after"] < SECONDS
    assert (folder / run / "run.json").exists() == recorded
    if recorded:
        facts = run_file(folder, run)
        assert facts["status"] == "failed" and BOOM in facts["message"]


@pytest.mark.parametrize(("phase", "rank", "kind", "saves"), STOPS)
def test_a_stop_saves_what_there_is_and_ends_every_rank(
    folder: Path, outcomes: dict[str, Any], phase: str, rank: int, kind: str, saves: bool
) -> None:
    run = name(phase, rank, kind)
    outcome = outcomes[run]
    assert outcome["codes"] == [EXIT_STOPPED] * 2, outcome["errors"]
    facts = run_file(folder, run)
    assert facts["status"] == "stopped"
    reason = "SIGTERM received" if kind == "signal" else "run.maxHours"
    assert any(text in facts["message"] for text in (reason, "stopped on request while verifying"))
    if phase in ("connecting", "building", "compile"):  # there is nothing to wait for
        assert outcome["after"] < SECONDS
    step = facts.get("step", 0)
    assert step > 0 or not saves
    if step:
        assert finding.resolve(folder / run).step == step


def test_a_rank_that_is_killed_ends_the_others(folder: Path, outcomes: dict[str, Any]) -> None:
    outcome = outcomes["killed"]
    assert outcome["codes"] == [EXIT_FAILED, -signal.SIGKILL] and outcome["after"] < SECONDS
    assert "rank 0 failed in step 3" in outcome["errors"][0]
    assert run_file(folder, "killed")["status"] == "failed"


def test_a_stop_does_not_wait_for_a_compiler(folder: Path, outcomes: dict[str, Any]) -> None:
    """Rank 1 is told to stop and does not come back from what it is in; rank 0 waits for it."""
    outcome = outcomes["stuck"]
    assert outcome["codes"] == [EXIT_STOPPED] * 2 and outcome["after"] < SECONDS
    assert outcome["errors"] == ["hybrid: stopped before the first step: SIGTERM received on rank 1\n"] * 2
    assert run_file(folder, "stuck")["status"] == "stopped"
