"""Whole runs with `backend.name = torch`: from the configuration to checkpoints, and on from other backends' ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid.config.contract import contract
from hybrid.errors import ContractMismatch
from training.micro import entries, micro_config, run, run_file, state_hash

pytestmark = pytest.mark.torch

TORCH = ("backend.name=torch", "backend.device=cpu")


def test_a_run_repeats_and_resumes_bit_for_bit_and_describes_itself(tmp_path: Path) -> None:
    run(tmp_path, *TORCH, "run.steps=10", run="straight")
    run(tmp_path, *TORCH, "run.steps=5", run="resumed")
    run(tmp_path, *TORCH, "run.steps=10", run="resumed")
    assert state_hash(tmp_path, "straight") == state_hash(tmp_path, "resumed")
    described = run_file(tmp_path, "straight")["backend"]
    assert (described["backend"], described["device"], described["numerics"]["name"]) == ("torch", "cpu", "exact")
    rows = entries(tmp_path, "straight")
    assert len(rows) == 10 and rows[-1]["kernel_path"] == "torch-cpu-f32-eager"
    assert rows[-1]["forward_ms"] > 0 and rows[-1]["timing_source"] == "device"


def test_a_run_goes_from_the_reference_to_torch_and_back(tmp_path: Path) -> None:
    for steps, backend in ((4, "reference"), (8, "torch"), (12, "reference")):
        run(tmp_path, f"backend.name={backend}", f"run.steps={steps}", run="relay")
    run(tmp_path, "run.steps=12", run="straight")
    relay, straight = (entries(tmp_path, name) for name in ("relay", "straight"))
    assert [row["step"] for row in relay] == list(range(1, 13))
    for a, b in zip(relay, straight, strict=True):
        assert a["total_loss"] == pytest.approx(b["total_loss"], rel=1e-6)


def test_only_numerics_that_are_not_exact_are_part_of_the_contract(tmp_path: Path) -> None:
    exact, fast = (micro_config(tmp_path, *TORCH, f"precision.numerics={name}") for name in ("exact", "fast"))
    assert contract(exact)["precision"] == {"type": "f32"}
    assert contract(fast)["precision"] == {"type": "f32", "numerics": "fast"}
    run(tmp_path, *TORCH, "run.steps=2")
    with pytest.raises(ContractMismatch) as refused:
        run(tmp_path, *TORCH, "run.steps=4", "precision.numerics=fast")
    assert [row[0] for row in refused.value.differences] == ["contract.precision.numerics"]


def test_without_torch_one_line_names_the_extra(tmp_path: Path) -> None:
    """A stand-in for an interpreter without torch: a finder that denies it."""
    deny = (
        "import importlib.util as u, sys\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest)\n"
        "from hybrid.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    words = ["train", "--run-dir", str(tmp_path / "run"), "--steps", "1", "--backend", "torch"]
    words += ["--set", f"data.source={tmp_path / 'text.txt'}", "--set", f"data.cacheDir={tmp_path / 'cache'}"]
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 200)
    done = subprocess.run([sys.executable, "-c", deny, *words], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("this needs the optional package 'torch': pip install 'hybrid[torch]'")
    assert "Traceback" not in done.stderr
