"""kill -9 at random moments of a run that saves at every step: it always continues, to the same state."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from hybrid.training.runner import train
from hybrid.training.start import Request, Services
from training.micro import entries, micro_config, run, state_hash, steps_saved

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs kill -9")

STEPS = 16
SETTINGS = (
    f"run.steps={STEPS}",
    "checkpoint.every=1",
    "checkpoint.keepLast=2",
    "evaluation.every=5",
    "sampling.every=0",
)


def _train(folder: Path) -> None:
    train(Request(micro_config(folder, *SETTINGS), folder / "run"), Services())


def _killed_runs(folder: Path, kills: int, seed: int) -> None:
    """Start and kill the run `kills` times, anew when it gets to its end; then let it finish. Check each end."""
    # A server that has imported everything makes children in milliseconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hybrid.training.runner", "training.micro", "hybrid.backends.reference.session"])
    choose = random.Random(seed)
    run(folder, *SETTINGS, run="whole")
    whole = state_hash(folder, "whole")
    _train_in(context, folder)  # the server starts with the first child
    shutil.rmtree(folder / "run")
    began = time.monotonic()
    _train_in(context, folder)
    longest = time.monotonic() - began
    shutil.rmtree(folder / "run")
    landed = 0
    while landed < kills:
        process = context.Process(target=_train, args=(folder,))
        process.start()
        assert process.pid is not None
        process.join(choose.uniform(0.02, longest))
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            landed += 1
        process.join()
        if process.exitcode == 0:
            _check(folder, whole)
            shutil.rmtree(folder / "run")
    _train_in(context, folder)
    _check(folder, whole)


def _train_in(context: multiprocessing.context.ForkServerContext, folder: Path) -> None:
    process = context.Process(target=_train, args=(folder,))
    process.start()
    process.join()
    assert process.exitcode == 0


def _check(folder: Path, whole: str) -> None:
    assert state_hash(folder) == whole
    assert steps_saved(folder) == [STEPS - 1, STEPS], "retention goes on, and nothing half written is left"
    assert [row["step"] for row in entries(folder)] == list(range(1, STEPS + 1))
    assert [row["total_loss"] for row in entries(folder)] == [row["total_loss"] for row in entries(folder, "whole")]


def test_ten_kills(tmp_path: Path) -> None:
    _killed_runs(tmp_path, kills=10, seed=1)


@pytest.mark.acceptance
def test_a_hundred_kills(tmp_path: Path) -> None:
    _killed_runs(tmp_path, kills=100, seed=2)
