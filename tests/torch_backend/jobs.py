"""Runs of several ranks for tests: see `forked`, which carries them out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

FORKED = Path(__file__).with_name("forked.py")
PATHS = [str(FORKED.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(PATHS)}
ENVIRONMENT["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # a rank that waits for an order is no warning
SECONDS = 30  # in which every rank has ended after an error on one


def run_jobs(folder: Path, *jobs: dict[str, Any]) -> dict[str, Any]:
    """Reports by the name of the job; of several with one name, that of the last."""
    done = subprocess.run(
        [sys.executable, str(FORKED), str(folder)],
        input=json.dumps(jobs), capture_output=True, text=True, env=ENVIRONMENT, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(zip([job["name"] for job in jobs], json.loads(done.stdout), strict=True))


def job(scenario: str, size: int, /, name: str = "", **arguments: Any) -> dict[str, Any]:
    return {"name": name or scenario, "size": size, "scenario": scenario, "arguments": arguments}
