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
# The same of ranks that hold a part of the state each: phase, layout, rank, how its message begins.
SHARDED_ERRORS = [
    ("building", "full", 1, "rank 1 failed in setting up shards"),
    ("compile", "full", 1, "rank 1 failed in setting up shards"),
    ("loading", "full", 0, "rank 0 failed"),
    ("step", "full", 1, "rank 1 failed in step 3"),
    ("gathering", "full", 0, "rank 0 failed in step 2"),
    ("scattering", "full", 1, "rank 1 failed in step 2"),
    ("scattering", "hybrid", 3, "rank 3 failed in step 2"),
    ("update", "full", 1, "rank 1 failed"),
    ("evaluation", "full", 1, "rank 1 failed in evaluation"),
    ("decoding", "full", 1, "rank 1 failed in sampling"),
    ("export", "full", 0, "rank 0 failed"),
    ("writing", "full", 0, "saving step 2 failed on rank 0"),
    ("writing", "full", 1, "saving step 2 failed on rank 1"),
    ("logging", "full", 0, "rank 0 failed"),
]
SHARDED_STOPS = [
    ("building", "full", 1, False),
    ("compile", "full", 1, False),
    ("loading", "full", 0, True),
    ("gathering", "full", 1, True),
    ("scattering", "hybrid", 2, True),
    ("evaluation", "full", 1, True),
    ("decoding", "full", 0, True),
    ("export", "full", 0, True),
    ("writing", "full", 1, True),
    ("logging", "full", 0, True),
]
KILLS = [("step", "none", 1), ("gathering", "full", 1), ("step", "none", 0), ("gathering", "full", 0)]
SIZES = {"none": 2, "full": 2, "hybrid": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("phases")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Any]:
    faults = [(p, r, "error", "none") for p, r, *_ in ERRORS] + [(p, r, k, "none") for p, r, k, _ in STOPS]
    faults += [(p, r, "error", layout) for p, layout, r, _ in SHARDED_ERRORS]
    faults += [(p, r, "signal", layout) for p, layout, r, _ in SHARDED_STOPS]
    faults += [("compile", 1, "hang", "none"), *((p, r, "kill", layout) for p, layout, r in KILLS)]
    jobs = [
        job("faulty", SIZES[layout], name(p, r, k, layout), phase=p, rank=r, kind=k, sharding=layout)
        for p, r, k, layout in faults
    ]
    return run_jobs(folder, *jobs)


def name(phase: str, rank: int, kind: str, layout: str = "none") -> str:
    return f"{kind}-{phase}-{rank}-{layout}"


@pytest.mark.parametrize(("phase", "rank", "begins", "recorded"), ERRORS)
def test_an_error_ends_every_rank_with_the_same_message_soon(
    folder: Path, outcomes: dict[str, Any], phase: str, rank: int, begins: str, recorded: bool
) -> None:
    run = name(phase, rank, "error")
    expect_error(outcomes[run], 2, begins)
    assert (folder / run / "run.json").exists() == recorded
    if recorded:
        facts = run_file(folder, run)
        assert facts["status"] == "failed" and BOOM in facts["message"]


@pytest.mark.parametrize(("phase", "layout", "rank", "begins"), SHARDED_ERRORS)
def test_an_error_on_a_rank_with_a_part_of_the_state_ends_every_rank(
    folder: Path, outcomes: dict[str, Any], phase: str, layout: str, rank: int, begins: str
) -> None:
    """Also where the others wait for it inside a collective."""
    run = name(phase, rank, "error", layout)
    expect_error(outcomes[run], SIZES[layout], begins)
    facts = run_file(folder, run)
    assert facts["status"] == "failed" and BOOM in facts["message"]


def expect_error(outcome: dict[str, Any], ranks: int, begins: str) -> None:
    assert outcome["errors"] == [f"hybrid: {begins}: RuntimeError: {BOOM}\n"] * ranks
    assert outcome["codes"] == [EXIT_FAILED] * ranks
    assert outcome["after"] < SECONDS


@pytest.mark.parametrize(("phase", "rank", "kind", "saves"), STOPS)
def test_a_stop_saves_what_there_is_and_ends_every_rank(
    folder: Path, outcomes: dict[str, Any], phase: str, rank: int, kind: str, saves: bool
) -> None:
    run = name(phase, rank, kind)
    expect_stop(run_file(folder, run), outcomes[run], 2, "SIGTERM received" if kind == "signal" else "run.maxHours")
    expect_saved(folder, run, saves)
    if phase in ("connecting", "building", "compile"):  # there is nothing to wait for
        assert outcomes[run]["after"] < SECONDS


@pytest.mark.parametrize(("phase", "layout", "rank", "saves"), SHARDED_STOPS)
def test_a_stop_saves_the_parts_of_all_ranks(
    folder: Path, outcomes: dict[str, Any], phase: str, layout: str, rank: int, saves: bool
) -> None:
    run = name(phase, rank, "signal", layout)
    expect_stop(run_file(folder, run), outcomes[run], SIZES[layout], "SIGTERM received")
    expect_saved(folder, run, saves)
    assert outcomes[run]["after"] < SECONDS


def expect_stop(facts: dict[str, Any], outcome: dict[str, Any], ranks: int, reason: str) -> None:
    assert outcome["codes"] == [EXIT_STOPPED] * ranks, outcome["errors"]
    assert facts["status"] == "stopped"
    assert any(text in facts["message"] for text in (reason, "stopped on request while verifying"))


def expect_saved(folder: Path, run: str, saves: bool) -> None:
    step = run_file(folder, run).get("step", 0)
    assert step > 0 or not saves
    if step:
        assert finding.resolve(folder / run).step == step


@pytest.mark.parametrize(("phase", "layout", "rank"), KILLS)
def test_a_rank_that_is_killed_ends_the_others_and_one_of_them_says_so(
    folder: Path, outcomes: dict[str, Any], phase: str, layout: str, rank: int
) -> None:
    """In run.json, too, where rank 0 is the one that was killed."""
    run, left = name(phase, rank, "kill", layout), 1 - rank
    outcome = outcomes[run]
    assert outcome["codes"][rank] == -signal.SIGKILL and outcome["codes"][left] == EXIT_FAILED
    assert outcome["after"] < SECONDS
    said = outcome["errors"][left].strip().removeprefix("hybrid: ")
    broken = f"rank {left} failed in step {2 if phase == 'gathering' else 3}: "
    gone = "the process that holds the store of all ranks has ended without a word"  # it is rank 0 here
    assert said.startswith(broken) or (rank == 0 and said == gone)
    assert (run_file(folder, run)["status"], run_file(folder, run)["message"]) == ("failed", said)


def test_what_gloo_says_of_a_killed_rank_is_told_in_our_words(outcomes: dict[str, Any]) -> None:
    """Which of its sentences it says is a matter of time."""
    said = [outcomes[name(phase, rank, "kill", layout)]["errors"][1 - rank] for phase, layout, rank in KILLS]
    assert any(": another rank has ended without a word, as one that is killed does" in text for text in said), said


def test_a_stop_does_not_wait_for_a_compiler(folder: Path, outcomes: dict[str, Any]) -> None:
    """Rank 1 is told to stop and does not come back from what it is in; rank 0 waits for it."""
    run = name("compile", 1, "hang")
    outcome = outcomes[run]
    assert outcome["codes"] == [EXIT_STOPPED] * 2 and outcome["after"] < SECONDS
    assert outcome["errors"] == ["hybrid: stopped before the first step: SIGTERM received on rank 1\n"] * 2
    assert run_file(folder, run)["status"] == "stopped"
