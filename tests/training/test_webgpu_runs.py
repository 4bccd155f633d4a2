"""The same loop on WebGPU: exact resume, the same run as the reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hybrid.checkpoint import finding, loading
from training.micro import entries, run, state_hash
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
