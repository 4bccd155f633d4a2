"""What an entry says of a run's use of its machine: utilisation, waiting for data, memory; and where else it goes."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid.backends.protocol import TrainingSession
from hybrid.contracts.metrics import OPTIONAL_FIELDS
from hybrid.errors import ConfigError, MissingDependency
from hybrid.training import runner
from hybrid.training.sessions import make_session
from hybrid.training.utilisation import flops_per_token
from training.micro import Recorder, entries, run

LENGTH, BATCH = 16, 4


class Wrapped:
    """A session that does as the one inside, but for what is defined below."""

    def __init__(self, inner: TrainingSession) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class OnDevice(Wrapped):
    """Says that it computes on two devices with a known peak."""

    def describe(self) -> dict[str, Any]:
        known = {"gpuAdapter": {"name": "NVIDIA H200"}, "numerics": {"name": "exact"}, "worldSize": 2}
        return {**self.inner.describe(), **known}


def test_utilisation_is_that_of_the_steps_on_all_devices(tmp_path: Path) -> None:
    view = Recorder()
    run(tmp_path, "run.steps=6", "run.logEvery=2", view=view, session=lambda *a: OnDevice(make_session(*a)))
    (begins,) = view.of("run")
    assert begins["peakFlops"] == 2 * 67e12
    assert "134 TFLOP/s dense" in begins["utilisation"] and "heads * headWidth * keys" in begins["utilisation"]
    flops = flops_per_token(run_model(tmp_path), LENGTH)
    rows = entries(tmp_path)
    assert "mfu" not in rows[0], "nothing was measured yet"
    for row in rows[1:]:
        assert row["mfu"] / flops.full == pytest.approx(row["mfu_causal"] / flops.causal)
        # Of positions, and not of targets only.
        whole = row["tokens_per_second"] * BATCH * LENGTH / (row["supervised_token_count"])
        assert row["mfu"] == pytest.approx(flops.full * whole / (2 * 67e12), rel=0.2)
    assert all(facts["mfu"] > facts["mfuCausal"] > 0 for facts in view.of("step"))


def run_model(folder: Path) -> Any:
    from hybrid.checkpoint import finding
    from hybrid.checkpoint.loading import read_manifest
    from hybrid.config.loading import load_config
    from hybrid.config.resolve import model_config

    return model_config(load_config(base=read_manifest(finding.resolve(folder / "run").path).config))


def test_without_a_known_peak_there_is_none(tmp_path: Path) -> None:
    view = Recorder()
    run(tmp_path, "run.steps=3", view=view)
    assert view.of("run")[0]["peakFlops"] is None and view.of("run")[0]["utilisation"] == ""
    row = entries(tmp_path)[-1]
    assert set(OPTIONAL_FIELDS) - set(row) == {"mfu", "mfu_causal"}
    assert 0 <= row["data_wait_share"] <= 1
    assert row["peak_device_bytes"] == row["memory_stats"]["device_bytes"]["total"]
    assert row["peak_host_bytes"] >= row["memory_stats"]["host_rss_bytes"] * 0.9


def test_waiting_for_data_is_part_of_the_time_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only moves while data is read (3 s a step) and while a step is applied (1 s)."""
    now = [0.0]
    load = runner.DataLoader.step

    def slowly(self: Any, step: int) -> Any:
        now[0] += 3.0
        return load(self, step)

    class Applying(Wrapped):
        def apply(self) -> None:
            now[0] += 1.0
            self.inner.apply()

    monkeypatch.setattr(runner.DataLoader, "step", slowly)
    run(
        tmp_path, "run.steps=5", session=lambda *a: Applying(make_session(*a)),
        clocks={"clock": lambda: now[0], "now": lambda: now[0]},
    )  # fmt: skip
    assert [row["data_wait_share"] for row in entries(tmp_path)] == [0.0, *[0.75] * 4]


def test_weights_and_biases_gets_the_numbers_and_the_run_keeps_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the package."""
    begun: list[dict[str, Any]] = []
    logged: list[dict[str, Any]] = []
    there = SimpleNamespace(define_metric=lambda *a, **k: None, log=logged.append, finish=lambda: logged.append({}))
    monkeypatch.setitem(
        sys.modules,
        "wandb",
        SimpleNamespace(
            __spec__=ModuleSpec("wandb", None),
            init=lambda **facts: begun.append(facts) or there,  # type: ignore[func-returns-value]
        ),
    )
    for steps in (2, 4):
        run(tmp_path, f"run.steps={steps}", "evaluation.every=2", "telemetry.wandb=true")
    run_id = json.loads((tmp_path / "run" / "run.json").read_text())["runId"]
    assert [facts["id"] for facts in begun] == [run_id] * 2
    losses = [facts["train/loss"] for facts in logged if "train/loss" in facts]
    assert losses == [row["total_loss"] for row in entries(tmp_path)]
    assert [facts["step"] for facts in logged if "validation/loss" in facts] == [2, 4]
    assert logged[-1] == {}


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingDependency, match=r"hybrid\[wandb\]"):
        run(tmp_path, "run.steps=2", "telemetry.wandb=true")


def test_only_torch_makes_a_profile(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--profile needs --backend torch, and this run is for 'reference'"):
        run(tmp_path, "run.steps=2", profile=2)


@pytest.mark.torch
def test_a_profile_shows_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    view = Recorder()
    run(tmp_path, "backend.name=torch", "backend.device=cpu", "run.steps=6", view=view, profile=2)
    trace = json.loads((tmp_path / "run" / "profile" / "trace-3-4.json").read_text())
    updates = [event for event in trace["traceEvents"] if "AdamW.step" in str(event.get("name"))]
    assert len(updates) == 2
    assert any("profiled 2 step(s)" in facts["text"] for facts in view.of("note"))
