"""Scalars for TensorBoard, where its package is installed; a clear word where it is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hybrid.errors import MissingDependency
from training.micro import run


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorboard", "tensorboard.compat.proto.event_pb2"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependency, match=r"hybrid\[tensorboard\]"):
        run(tmp_path, "run.steps=2", "telemetry.tensorboard=true")


def test_losses_become_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the optional package tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path, "run.steps=4", "evaluation.every=2", "telemetry.tensorboard=true")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert {"train/loss", "train/lr", "validation/loss"} <= set(events.Tags()["scalars"])
    assert [point.step for point in events.Scalars("train/loss")] == [1, 2, 3, 4]
    assert [point.step for point in events.Scalars("validation/loss")] == [2, 4]
