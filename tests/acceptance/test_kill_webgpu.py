"""kill -9 on WebGPU: five times, at seeded moments of a run that saves at every step."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from training.micro import config_file, entries, run, state_hash, steps_saved

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.webgpu,
    pytest.mark.skipif(sys.platform == "win32", reason="needs kill -9"),
]

KILLS, STEPS = 5, 60
SETTINGS = ("backend.name=webgpu", f"run.steps={STEPS}", "checkpoint.every=1", "checkpoint.keepLast=2")


def test_five_kills(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    run(tmp_path, *SETTINGS, run="whole")
    command = [sys.executable, "-m", "hybrid", "train", str(config_file(tmp_path)), "--json"]
    command += ["--run-dir", str(tmp_path / "run")]
    for setting in SETTINGS:
        command += ["--set", setting]
    choose = random.Random(3)
    steps: list[int] = []
    # Each run is killed a share of a run after it began to train, so that five of them get a little further each time.
    duration = _duration(tmp_path, command)
    while len(steps) < KILLS:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["event"] == "run":
                break
        reader = threading.Thread(target=process.stdout.read)
        reader.start()  # a full pipe would stop the run
        time.sleep(choose.uniform(0, 0.3) * duration)
        process.kill()
        process.wait()
        reader.join()
        assert process.returncode == -signal.SIGKILL, "the run ended before it was killed"
        steps.append(max(steps_saved(tmp_path), default=0))
    assert 0 < steps[-1] < STEPS
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    record_property("newest_checkpoint_after_each_kill", steps)
    assert state_hash(tmp_path) == state_hash(tmp_path, "whole")
    assert steps_saved(tmp_path) == [STEPS - 1, STEPS]
    assert [row["step"] for row in entries(tmp_path)] == list(range(1, STEPS + 1))
    assert [row["total_loss"] for row in entries(tmp_path)] == [row["total_loss"] for row in entries(tmp_path, "whole")]


def _duration(folder: Path, command: list[str]) -> float:
    """Seconds of the training of a whole run, from its first event to its end."""
    command = [word if word != str(folder / "run") else str(folder / "timed") for word in command]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    began = 0.0
    for line in process.stdout:
        if json.loads(line)["event"] == "run":
            began = time.monotonic()
    assert process.wait() == 0
    return time.monotonic() - began
