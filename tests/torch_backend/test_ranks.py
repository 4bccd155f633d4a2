"""Training on several ranks, with real processes: the numbers of one rank, and one end for all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hybrid.errors import ConfigError
from hybrid.training.parity.runtimes import torch as torch_runtime
from hybrid.training.parity.workload import MODELS, Workload
from torch_backend.jobs import ENVIRONMENT, SECONDS, job, run_jobs
from training.micro import config_file, entries, run, run_file, state_hash

pytestmark = pytest.mark.torch


def test_results_and_errors_of_actions_reach_every_rank(tmp_path: Path) -> None:
    outcome = run_jobs(tmp_path, job("actions", 3))["actions"]
    assert outcome["codes"] == [0, 0, 0]
    told = [json.loads((tmp_path / f"actions.{rank}.json").read_text()) for rank in range(3)]
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


def test_any_split_over_ranks_and_microbatches_gives_the_gradients_of_one(tmp_path: Path) -> None:
    """Four rows as 2 ranks x 2 microbatches of 1, over 3 ranks of which one has but half a share, and
    as one microbatch that leaves a rank with none. Gradients are read off the first moments; the looped model runs its
    units twice."""
    model = "looped"
    splits = {"2x2x1": (2, 1), "3x2x1": (3, 1), "2x1x4": (2, 4)}
    jobs = [
        job("steps", size, name, model=model, count=1, microbatch_size=rows) for name, (size, rows) in splits.items()
    ]
    outcomes = run_jobs(tmp_path, *jobs)
    work = Workload(model, MODELS[model], 1, microbatch_size=4, max_grad_norm=0.0)
    alone = torch_runtime().train(work)
    for name, outcome in outcomes.items():
        assert set(outcome["codes"]) == {0}, outcome["errors"]
        found = np.load(tmp_path / f"{name}.npz")
        assert found["losses"][0] == pytest.approx(alone.losses[0], rel=1e-6)
        moments = [key for key in alone.final.optimizer if key.startswith("moment1/")]
        ours, theirs = (np.concatenate([s[key].ravel() for key in moments]) for s in (found, alone.final.optimizer))
        assert np.linalg.norm(ours - theirs) < 1e-6 * np.linalg.norm(theirs), name


def test_a_run_goes_on_with_any_number_of_ranks(tmp_path: Path) -> None:
    """Two ranks, then three, then one, against one rank all the way: the same samples, the same losses."""
    outcomes = run_jobs(tmp_path, job("train", 2, "elastic", count=4), job("train", 3, "elastic", count=8))
    assert set(outcomes["elastic"]["codes"]) == {0}, outcomes["elastic"]["errors"]
    assert run_file(tmp_path, "elastic")["backend"]["worldSize"] == 3
    settings = ("backend.name=torch", "backend.device=cpu", "data.microbatchSize=1")
    run(tmp_path, *settings, "run.steps=12", run="elastic")
    run(tmp_path, *settings, "run.steps=12", run="straight")
    rows = [entries(tmp_path, name) for name in ("elastic", "straight")]
    assert [row["step"] for row in rows[0]] == list(range(1, 13))
    for a, b in zip(*rows, strict=True):
        assert a["total_loss"] == pytest.approx(b["total_loss"], rel=1e-6)
        assert a["supervised_token_count"] == b["supervised_token_count"]


def test_ranks_whose_weights_differ_after_the_first_step_are_stopped(tmp_path: Path) -> None:
    outcome = run_jobs(tmp_path, job("differing", 2))["differing"]
    assert outcome["codes"] == [1, 1] and outcome["errors"][0] == outcome["errors"][1]
    assert "the ranks have different weights after their first step (checksums rank 0: " in outcome["errors"][0]
    assert outcome["seconds"] < SECONDS


def test_torchrun_trains(tmp_path: Path) -> None:
    """The launcher itself. Only rank 0 speaks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["-m", "hybrid", "train", str(config_file(tmp_path)), "--steps", "3", "--json", "--backend", "torch"]
    words += ["--run-dir", str(tmp_path / "one"), "--set", "backend.device=cpu"]
    done = subprocess.run(
        [*torchrun, *words], capture_output=True, text=True, env=ENVIRONMENT, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["event"] for line in done.stdout.splitlines()].count("end") == 1
    assert run_file(tmp_path, "one")["status"] == "finished"
    assert len(state_hash(tmp_path, "one")) == 64


def test_other_backends_train_in_one_process_only(tmp_path: Path) -> None:
    outcome = run_jobs(tmp_path, job("other", 2))["other"]
    text = "backend.name = 'reference': torchrun started several processes, and only 'torch' trains in more than one"
    assert outcome["codes"] == [ConfigError.exit_code] * 2
    assert [error.strip().endswith(text) for error in outcome["errors"]] == [True, True]
