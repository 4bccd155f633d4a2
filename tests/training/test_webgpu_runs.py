"""The same loop on WebGPU: exact resume, the same run as the reference, kill -9."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hybrid.checkpoint import finding, loading
from training.micro import config_file, entries, run, state_hash, steps_saved
from training.sessions import losing

pytestmark = pytest.mark.webgpu

WEBGPU = "backend.name=webgpu"


@pytest.mark.parametrize("precision", ["f32", "mixed-f16"])
def test_twenty_steps_are_ten_and_ten_are_five_five_and_ten(tmp_path: Path, precision: str) -> None:
    settings = (WEBGPU, f"precision.type={precision}", "lossScaling.growthInterval=4", "evaluation.every=5")
    run(tmp_path, *settings, run="whole")
    for name, parts in (("two", (10, 20)), ("three", (5, 10, 20))):
        for steps in parts:
            run(tmp_path, *settings, f"run.steps={steps}", run=name)
        assert state_hash(tmp_path, name) == state_hash(tmp_path, "whole")
    losses = [[row["total_loss"] for row in entries(tmp_path, name)] for name in ("whole", "two", "three")]
    assert losses[0] == losses[1] == losses[2]


def test_a_run_moves_between_the_reference_and_webgpu(tmp_path: Path) -> None:
    run(tmp_path, "run.steps=10", run="reference")
    for steps, backend in ((4, "webgpu"), (7, "reference"), (10, "webgpu")):
        run(tmp_path, f"backend.name={backend}", f"run.steps={steps}", run="moved")
    for ours, theirs in zip(entries(tmp_path, "moved"), entries(tmp_path, "reference"), strict=True):
        assert ours["total_loss"] == pytest.approx(theirs["total_loss"], rel=1e-6)
        assert {key: ours[key] for key in ("step", "epoch", "batch", "lr", "supervised_token_count")} == {
            key: theirs[key] for key in ("step", "epoch", "batch", "lr", "supervised_token_count")
        }
    first, second = (loading.load(finding.resolve(tmp_path / name).path) for name in ("moved", "reference"))
    assert first.manifest.lineage.runtime == "webgpu" and second.manifest.lineage.runtime == "reference"
    for name, array in first.model.items():
        np.testing.assert_allclose(array, second.model[name], rtol=0, atol=2e-5)


def test_a_lost_device_is_replaced(tmp_path: Path) -> None:
    run(tmp_path, WEBGPU, "run.steps=10", run="whole")
    run(tmp_path, WEBGPU, "run.steps=10", session=losing([("apply", 8)]))
    assert state_hash(tmp_path) == state_hash(tmp_path, "whole")


@pytest.mark.acceptance
def test_five_kills(tmp_path: Path) -> None:
    settings = (WEBGPU, "run.steps=60", "checkpoint.every=1", "checkpoint.keepLast=2")
    run(tmp_path, *settings, run="whole")
    command = [sys.executable, "-m", "hybrid", "train", str(config_file(tmp_path)), "--json"]
    command += ["--run-dir", str(tmp_path / "run")]
    for setting in settings:
        command += ["--set", setting]
    choose = random.Random(3)
    for _ in range(5):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["event"] == "run":
                break
        time.sleep(choose.uniform(0, 0.5))
        process.kill()
        process.communicate()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert state_hash(tmp_path) == state_hash(tmp_path, "whole")
    assert steps_saved(tmp_path) == [59, 60]
    assert [row["step"] for row in entries(tmp_path)] == list(range(1, 61))
