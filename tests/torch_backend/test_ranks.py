"""Training on several ranks, with real processes: the numbers of one rank, and one end for all."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid.backends.torch.session import TorchSession
from hybrid.data.batch import Batch
from hybrid.errors import EXIT_FAILED, ConfigError
from hybrid.training.metrics_log import read_rows
from hybrid.training.parity.contract import CONTRACT
from hybrid.training.parity.runtimes import torch as torch_runtime
from hybrid.training.parity.workload import MODELS, Workload
from torch_backend.jobs import ENVIRONMENT, SECONDS, job, run_jobs
from training.micro import config_file, entries, run, run_file, state_hash

pytestmark = pytest.mark.torch

MODEL = "looped"
SPLITS = {"2x2x1": (2, 1), "3x2x1": (3, 1), "2x1x4": (2, 4)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Any]:
    """What does not depend on other processes of this file, side by side."""
    splits = [
        job("steps", size, name, model=MODEL, count=1, microbatch_size=rows) for name, (size, rows) in SPLITS.items()
    ]
    return run_jobs(
        folder, *splits, job("actions", 3), job("evaluations", 3), job("uncompiled", 2), job("differing", 2),
        job("other", 2), job("absent", 2, "unseen", connects=False), job("absent", 3, "seen", connects=True),
        job("absent", 2, "wrong", connects=False, seconds="soon"),
    )  # fmt: skip


def test_results_and_errors_of_actions_reach_every_rank(folder: Path, outcomes: dict[str, Any]) -> None:
    assert outcomes["actions"]["codes"] == [0, 0, 0]
    told = [json.loads((folder / f"actions.{rank}.json").read_text()) for rank in range(3)]
    zero = "ZeroDivisionError: integer division or modulo by zero"
    assert (
        told[0]
        == told[1]
        == told[2]
        == [
            {"rank": 0, "n": 3},
            [0, 1, 4],
            [True, False],
            f"reading failed on rank 0: {zero}",
            f"writing failed on rank 0: {zero}; rank 2: {zero}",
        ]
    )


def test_a_rank_that_never_comes_is_named(outcomes: dict[str, Any]) -> None:
    """It ended before it had found the store of all ranks, or behind that, without a word."""
    advice = "see what the other nodes say; if they only take longer to start, set HYBRID_START_SECONDS\n"
    seen = outcomes["seen"]
    assert seen["codes"] == [EXIT_FAILED, 7, EXIT_FAILED] and seen["seconds"] < SECONDS
    assert seen["errors"][0] == seen["errors"][2] == f"hybrid: rank 1 did not come within 1.5 seconds: {advice}"
    assert outcomes["unseen"]["codes"] == [EXIT_FAILED, 7] and outcomes["unseen"]["seconds"] < SECONDS
    error = outcomes["unseen"]["errors"][0]
    assert error.startswith("hybrid: some processes did not come within 1.5 seconds (") and error.endswith(advice)
    wrong = "HYBRID_START_SECONDS = 'soon': expected a number of seconds above 0"
    assert outcomes["wrong"]["errors"][0] == f"hybrid: {wrong}\n"


def test_any_split_over_ranks_and_microbatches_gives_the_gradients_of_one(
    folder: Path, outcomes: dict[str, Any]
) -> None:
    """Four rows as 2 ranks x 2 microbatches of 1, over 3 ranks of which one has but half a share, and
    as one microbatch that leaves a rank with none. Gradients are read off the first moments; the looped model runs its
    units twice."""
    work = Workload(MODEL, MODELS[MODEL], 1, microbatch_size=4, max_grad_norm=0.0)
    alone = torch_runtime().train(work)
    for name in SPLITS:
        assert set(outcomes[name]["codes"]) == {0}, outcomes[name]["errors"]
        found = np.load(folder / f"{name}.npz")
        assert found["losses"][0] == pytest.approx(alone.losses[0], rel=1e-6)
        moments = [key for key in alone.final.optimizer if key.startswith("moment1/")]
        ours, theirs = (np.concatenate([s[key].ravel() for key in moments]) for s in (found, alone.final.optimizer))
        assert np.linalg.norm(ours - theirs) < 1e-6 * np.linalg.norm(theirs), name


def test_a_run_goes_on_with_any_number_of_ranks(tmp_path: Path) -> None:
    """Four ranks, then two, then three, against one process all the way: the same rows in the same order, the same
    losses and evaluations."""
    sizes = {4: 4, 2: 8, 3: 12}  # ranks: steps by then
    outcome = run_jobs(tmp_path, *(job("elastic", size, count=count) for size, count in sizes.items()))["elastic"]
    assert set(outcome["codes"]) == {0}, outcome["errors"]
    assert run_file(tmp_path, "elastic")["backend"]["worldSize"] == 3
    straight, originally = [], TorchSession.accumulate

    def accumulate(self: TorchSession, batch: Batch) -> None:
        assert self._info is not None
        if batch.ids.any():  # it is not warming up
            straight.append([self._info.data_step, hashlib.sha256(batch.ids.tobytes()).hexdigest()])
        originally(self, batch)

    settings = ("backend.name=torch", "backend.device=cpu", "data.microbatchSize=1", "evaluation.every=4")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchSession, "accumulate", accumulate)
        run(tmp_path, *settings, "evaluation.batches=5", "run.steps=12", run="straight")
    lines = [(tmp_path / f"elastic.rows.{rank}").read_text().splitlines() if rank < 4 else [] for rank in range(4)]
    rows = [json.loads(line) for of_rank in lines for line in of_rank]
    assert sorted(rows, key=lambda row: row[0]) == straight and len(rows) == 48, (
        "ranks one after the other, in each step"
    )
    limit = CONTRACT["loss"].limit
    for ours, theirs in zip(*(entries(tmp_path, name) for name in ("elastic", "straight")), strict=True):
        assert ours["total_loss"] == pytest.approx(theirs["total_loss"], rel=limit)
        for key in ("step", "epoch", "batch", "lr", "supervised_token_count", "ignored_target_count"):
            assert ours[key] == theirs[key]
    both = [list(read_rows(tmp_path / name / "validation.jsonl")) for name in ("elastic", "straight")]
    assert [row["targetTokens"] for row in both[0]] == [row["targetTokens"] for row in both[1]]
    for ours, theirs in zip(*both, strict=True):
        assert ours["step"] == theirs["step"] and ours["loss"] == pytest.approx(theirs["loss"], rel=limit)


def test_evaluation_over_ranks_gives_the_bits_of_one(folder: Path, outcomes: dict[str, Any]) -> None:
    """Five batches over three ranks; and where one rank cannot compile, all of them train eagerly, and rank 0 says
    which one and why."""
    assert set(outcomes["evaluations"]["codes"]) == {0}, outcomes["evaluations"]["errors"]
    together, alone = json.loads((folder / "evaluations.json").read_text())
    assert len(together) == 5 and together == alone
    assert outcomes["uncompiled"]["codes"] == [0, 0], outcomes["uncompiled"]["errors"]
    note = "torch cannot compile this model here, training goes on without: no compiler here (rank 1)"
    for rank in range(2):
        assert json.loads((folder / f"uncompiled.{rank}.json").read_text()) == ["eager", [note]]
    assert run_file(folder, "uncompiled")["backend"]["mode"] == "eager"


def test_ranks_whose_weights_differ_after_the_first_step_are_stopped(outcomes: dict[str, Any]) -> None:
    outcome = outcomes["differing"]
    assert outcome["codes"] == [1, 1] and outcome["errors"][0] == outcome["errors"][1]
    assert "the ranks have different weights after their first step (checksums rank 0: " in outcome["errors"][0]
    assert outcome["seconds"] < SECONDS


def test_a_dry_run_sets_up_every_rank_and_speaks_once(tmp_path: Path) -> None:
    """Data, settings, resume and memory, and an error of the command line; nothing is left in the run's folder."""
    file = str(config_file(tmp_path))
    words = ["train", file, "--backend", "torch", "--set", "backend.device=cpu", "--json", "--dry-run", "--run-dir"]
    resumed = str(tmp_path / "resumed")
    outcomes = run_jobs(
        tmp_path, job("train", 2, "resumed", count=2),
        job("command", 2, "new", words=[*words, str(tmp_path / "one")]),
        job("command", 2, "wrong", words=[*words, resumed, "--set", "model.width=17"]),
    )  # fmt: skip
    outcomes |= run_jobs(tmp_path, job("command", 2, "again", words=[*words, resumed, "--steps", "9"]))
    assert outcomes["new"]["codes"] == outcomes["again"]["codes"] == [0, 0], outcomes
    assert outcomes["wrong"]["codes"] == [ConfigError.exit_code] * 2
    said = {}
    for name in ("new", "again", "wrong"):
        assert (tmp_path / f"{name}.1.stdout").read_text() == ""
        lines = (tmp_path / f"{name}.0.stdout").read_text().splitlines()
        said[name] = [json.loads(line) for line in lines if json.loads(line)["event"] in ("dry-run", "error")]
    assert [event["event"] for event in said["new"]] == ["dry-run"] and not (tmp_path / "one").exists()
    (report,) = said["again"]
    assert (report["step"], report["steps"], report["backend"]["worldSize"]) == (2, 9, 2)
    assert report["memory"]["total"] > 0 and report["resumesFrom"]["step"] == 2
    assert [event["event"] for event in said["wrong"]] == ["error"]


def test_torchrun_trains(tmp_path: Path) -> None:
    """The launcher itself, and what it means by `auto`. Only rank 0 speaks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["-m", "hybrid", "train", str(config_file(tmp_path)), "--steps", "3", "--json", "--backend", "auto"]
    words += ["--run-dir", str(tmp_path / "one"), "--set", "backend.device=cpu"]
    done = subprocess.run(
        [*torchrun, *words], capture_output=True, text=True, env=ENVIRONMENT, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["event"] for line in done.stdout.splitlines()].count("end") == 1
    assert run_file(tmp_path, "one")["status"] == "finished"
    assert len(state_hash(tmp_path, "one")) == 64


def test_other_backends_train_in_one_process_only(outcomes: dict[str, Any]) -> None:
    outcome = outcomes["other"]
    text = "backend.name = 'reference': torchrun started several processes, and only 'torch' trains in more than one"
    assert outcome["codes"] == [ConfigError.exit_code] * 2
    assert [error.strip().endswith(text) for error in outcome["errors"]] == [True, True]
