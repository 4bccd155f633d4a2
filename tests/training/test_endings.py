"""How a run can go wrong or be ended: overflow, alerts, lost devices, stop requests."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid.backends.protocol import Evaluation, TrainingSession
from hybrid.checkpoint import finding
from hybrid.config.tree import RunConfig
from hybrid.contracts.loss_scaler import DynamicLossScaler
from hybrid.errors import AlertRaised, DeviceLost, HybridError, NonFiniteError, StopRequested
from hybrid.training import metrics_log
from hybrid.training.metrics_log import read_rows
from hybrid.training.sessions import make_session
from hybrid.training.signals import StopFlag
from hybrid.training.view import event_text
from training.full_disk import full_after
from training.micro import Recorder, entries, run, run_file, state_hash, steps_saved
from training.sessions import FakeClock, TimedSession, losing

ALERTS = ("telemetry.alerts.enabled=true", "telemetry.alerts.failOnAlert=true")


def test_an_overflow_skips_the_optimizer_and_leaves_the_documented_trace(tmp_path: Path) -> None:
    scaling = {
        "enabled": True,
        "initialScale": 2.0**40,
        "maxScale": 2.0**40,
        "backoffFactor": 2.0**-8,
        "growthInterval": 4,
    }
    settings = [f"lossScaling.{name}={json.dumps(value)}" for name, value in scaling.items()]
    run(tmp_path, "precision.type=mixed-f16", "run.steps=14", "run.logEvery=1", *settings)
    rows = entries(tmp_path)
    overflows = [row["overflow"] for row in rows]
    assert overflows[0] and not overflows[-1], "the scale comes down to where f16 holds the gradients"
    scaler, updates = DynamicLossScaler(scaling), 0
    for row in rows:
        assert row["loss_scale"] == scaler.step_scale()
        scaler.update(row["overflow"])
        updates += not row["overflow"]
        assert row["optimizer_step"] == updates, "a skipped step does not count for the optimizer"
        assert row["skipped_optimizer_step"] == row["overflow"]
        assert (row["effective_lr"] is None) == row["overflow"] and row["lr"] is not None
        assert row["total_loss"] < 10 and not row["loss_overflow"], "the loss itself is not scaled"
        assert row["objective"] == "cross_entropy" and row["trainable_groups"] == ["decay", "no_decay"]
    assert [row["step"] for row in rows] == list(range(1, 15)), "the run's own step goes on"
    assert next(row["lr"] for row in rows if not row["overflow"]) == rows[0]["lr"], "the rate that was due is due again"


def test_a_run_that_only_skips_steps_fails_in_the_end(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"last 100 steps up to 100 .* the run has diverged"):
        run(tmp_path, "run.steps=200", session=lambda config, *rest: TimedSession(config, FakeClock(), diverged=True))
    assert len(entries(tmp_path)) == 100 and run_file(tmp_path)["status"] == "failed"


def test_an_alert_with_fail_on_alert_ends_the_run_before_the_step_is_applied(tmp_path: Path) -> None:
    run(tmp_path, "run.steps=5", *ALERTS, "telemetry.alerts.thresholds.maxGradientNorm=1e9")
    before = state_hash(tmp_path)
    with pytest.raises(AlertRaised) as raised:
        run(tmp_path, "run.steps=9", *ALERTS, "telemetry.alerts.thresholds.maxGradientNorm=1e-9")
    assert raised.value.exit_code == 4
    assert str(raised.value) == "training telemetry alert(s): max_gradient_norm_exceeded at step 6."
    rows = entries(tmp_path)
    assert rows[-1]["step"] == 6 and rows[-1]["telemetry_alerts"] == ["max_gradient_norm_exceeded"]
    assert run_file(tmp_path)["status"] == "alert" and run_file(tmp_path)["step"] == 5
    assert state_hash(tmp_path) == before and steps_saved(tmp_path) == [5]
    assert "<polyline" in (tmp_path / "run" / "loss.svg").read_text(), "what was measured is kept"
    run(tmp_path, "run.steps=7")
    run(tmp_path, "run.steps=7", run="undisturbed")
    assert state_hash(tmp_path) == state_hash(tmp_path, "undisturbed"), "the bad step left no trace in the state"


def test_the_step_time_is_judged_after_the_step_and_the_state_is_saved(tmp_path: Path) -> None:
    with pytest.raises(AlertRaised, match="max_step_time_ms_exceeded at step 1"):
        run(tmp_path, *ALERTS, "telemetry.alerts.thresholds.maxStepTimeMs=0")
    assert steps_saved(tmp_path) == [1]


def test_alerts_without_fail_on_alert_are_reported_and_the_run_goes_on(tmp_path: Path) -> None:
    view = Recorder()
    run(tmp_path, "run.steps=2", ALERTS[0], "telemetry.alerts.thresholds.maxGradientNorm=1e-9", view=view)
    assert all(row["telemetry_alerts"] == ["max_gradient_norm_exceeded"] for row in entries(tmp_path))
    assert [facts["alerts"] for facts in view.of("step")] == [["max_gradient_norm_exceeded"]] * 2


@pytest.mark.parametrize(
    "times",
    [
        [("accumulate", 1)],
        [("apply", 7), ("begin", 9)],
        [("export_state", 5), ("evaluate", 8), ("poll_metrics", 12)],
        [("generate", 8), ("import_state", 0)],
    ],
    ids=["at once", "in steps", "in saving and evaluation", "in a sample, and again in the recovery"],
)
def test_a_lost_device_is_replaced_and_the_run_ends_in_the_same_state(
    tmp_path: Path, times: list[tuple[str, int]]
) -> None:
    run(tmp_path, "run.steps=15", run="whole")
    view, expected = Recorder(), len(times)
    run(tmp_path, "run.steps=15", "evaluation.every=4", "sampling.every=8", view=view, session=losing(times))
    assert not times, "every loss took place"
    assert state_hash(tmp_path) == state_hash(tmp_path, "whole")
    assert [row["total_loss"] for row in entries(tmp_path)] == [row["total_loss"] for row in entries(tmp_path, "whole")]
    assert [row["step"] for row in read_rows(tmp_path / "run" / "validation.jsonl")] == [4, 8, 12, 15]
    notes = [facts["text"] for facts in view.of("note") if "device was lost" in facts["text"]]
    assert len(notes) == expected and f"({expected} of at most 3 times)" in notes[-1]


def test_at_most_one_checkpoint_interval_is_lost_with_a_device(tmp_path: Path) -> None:
    view = Recorder()
    run(tmp_path, "run.steps=15", view=view, session=losing([("apply", 14)]))
    assert [facts["step"] for facts in view.of("run")] == [0, 10]
    assert [row["step"] for row in entries(tmp_path, name="metrics.discarded.jsonl")] == [11, 12, 13]


def test_devices_are_replaced_a_bounded_number_of_times(tmp_path: Path) -> None:
    with pytest.raises(DeviceLost, match=r"lost 3 times, and backend\.maxRecoveries is 2"):
        run(tmp_path, "backend.maxRecoveries=2", session=losing([("apply", 7)] * 5))
    assert run_file(tmp_path)["status"] == "failed"
    assert run(tmp_path, "run.steps=8").step == 8, "and the run can still be continued"


@pytest.mark.parametrize("phase", ["data", "warm-up", "train", "evaluate", "sample", "save"])
def test_a_stop_is_honoured_in_every_phase_and_the_run_goes_on_exactly(tmp_path: Path, phase: str) -> None:
    settings = ("run.steps=12", "evaluation.every=4", "sampling.every=6")
    run(tmp_path, *settings, run="whole")
    stop = StopFlag()

    def request(kind: str, facts: dict[str, object]) -> None:
        if kind == "phase" and facts["phase"] == phase:
            stop.request("a test")

    if phase == "data":
        with pytest.raises(StopRequested) as stopped:
            run(tmp_path, *settings, view=Recorder(request), stop=stop)
        assert stopped.value.exit_code == 75 and run_file(tmp_path)["status"] == "stopped"
    else:
        outcome = run(tmp_path, *settings, view=Recorder(request), stop=stop)
        assert outcome.exit_code == 75 and outcome.step < 12 and "a test" in outcome.message
        assert run_file(tmp_path)["status"] == "stopped"
        assert steps_saved(tmp_path)[-1:] == ([outcome.step] if outcome.step else [])
    assert run(tmp_path, *settings).status == "finished"
    assert state_hash(tmp_path) == state_hash(tmp_path, "whole")
    rows = list(read_rows(tmp_path / "run" / "validation.jsonl"))
    assert [row["step"] for row in rows] == [4, 8, 12], "an interrupted evaluation is made up for"
    assert rows == list(read_rows(tmp_path / "whole" / "validation.jsonl"))


def test_a_sample_that_a_stop_cuts_off_is_not_shown_as_if_it_were_whole(tmp_path: Path) -> None:
    stop, view = StopFlag(), Recorder()

    def make(*arguments: Any) -> TrainingSession:
        session = make_session(*arguments)
        generate = session.generate

        def interrupted(*arguments: Any) -> Iterator[int]:
            for count, token in enumerate(generate(*arguments)):
                if count == 3 and view.of("sample"):
                    stop.request("a test")
                yield token

        session.generate = interrupted  # type: ignore[method-assign]
        return session

    assert run(tmp_path, "sampling.every=3", view=view, stop=stop, session=make).step == 6
    assert [facts["step"] for facts in view.of("sample")] == [3]


@pytest.mark.parametrize(
    ("loss", "overflow", "shown"), [(3.0, True, 3.0), (float("inf"), False, 3.4028234663852886e38)]
)
def test_a_validation_loss_that_is_not_the_models_says_so(
    tmp_path: Path, loss: float, overflow: bool, shown: float
) -> None:
    def make(*arguments: Any) -> TrainingSession:
        session = make_session(*arguments)
        session.evaluate = lambda batch: Evaluation(  # type: ignore[method-assign]
            loss * batch.target_tokens, batch.target_tokens, overflow
        )
        return session

    view = Recorder()
    run(tmp_path, "run.steps=2", "evaluation.every=2", view=view, session=make)
    rows = list(read_rows(tmp_path / "run" / "validation.jsonl"))
    assert rows == view.of("validation") and rows[0]["overflow"] is True
    assert rows[0]["loss"] == pytest.approx(shown)
    assert "not the loss of the model" in event_text("validation", rows[0])


def test_a_stop_while_a_device_is_set_up_ends_that(tmp_path: Path) -> None:
    stop = StopFlag()

    def slow_set_up(config: RunConfig, note: Callable[[str], None], progress: Callable[..., None]) -> TrainingSession:
        for done in range(10):
            if done == 3:
                stop.request("a test")
            progress("kernels", done, 10)
        raise AssertionError("the set-up went on")

    view = Recorder()
    with pytest.raises(StopRequested, match="stopped before the first step: a test"):
        run(tmp_path, view=view, stop=stop, session=slow_set_up)
    assert view.of("progress")[-1]["stage"] == "kernels"
    assert run_file(tmp_path)["status"] == "stopped"


def test_the_time_limit_is_a_stop(tmp_path: Path) -> None:
    clock = FakeClock()
    stop = StopFlag(max_hours=1.5, clock=clock)
    view = Recorder(lambda kind, facts: setattr(clock, "seconds", clock.seconds + 5400) if kind == "step" else None)
    outcome = run(tmp_path, view=view, stop=stop)
    assert (outcome.exit_code, outcome.step) == (75, 4), "after the first line of the log"
    assert outcome.message.startswith("stopped (run.maxHours = 1.5 is over), saved at step 4; start it again")


def test_a_stop_after_the_last_step_leaves_the_evaluation_to_the_next_start(tmp_path: Path) -> None:
    settings = ("run.steps=4", "evaluation.every=4")
    run(tmp_path, *settings, run="undisturbed")
    stop = StopFlag()
    view = Recorder(
        lambda kind, facts: stop.request("test") if (kind, facts.get("phase")) == ("phase", "evaluate") else None
    )
    assert run(tmp_path, *settings, view=view, stop=stop).status == "stopped"
    assert not list(read_rows(tmp_path / "run" / "validation.jsonl"))
    assert run(tmp_path, *settings).status == "finished" == run_file(tmp_path)["status"]
    rows, wanted = (list(read_rows(tmp_path / name / "validation.jsonl")) for name in ("run", "undisturbed"))
    assert rows == wanted and [row["step"] for row in rows] == [4]


def test_leftovers_of_a_killed_save_are_removed_when_the_run_goes_on(tmp_path: Path) -> None:
    run(tmp_path, "run.steps=2")
    leftover = tmp_path / "run" / "checkpoints" / ".tmp-step-00000003-1-2-3"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    run(tmp_path, "run.steps=4")
    assert not leftover.exists()


def test_a_stop_at_step_zero_saves_nothing(tmp_path: Path) -> None:
    stop = StopFlag()
    view = Recorder(lambda kind, facts: stop.request("a test") if kind == "run" else None)
    outcome = run(tmp_path, view=view, stop=stop)
    assert (outcome.exit_code, outcome.step) == (75, 0) and steps_saved(tmp_path) == []


@pytest.mark.parametrize("backend", ["reference", pytest.param("webgpu", marks=pytest.mark.webgpu)])
def test_a_disk_that_fills_up_fails_the_run_and_costs_no_checkpoint(tmp_path: Path, backend: str) -> None:
    settings = (f"backend.name={backend}", "run.steps=20")
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(HybridError, match=r"metrics\.jsonl: could not be written: No space left on device"),
    ):
        patch.setattr(metrics_log, "FileIO", full_after(7))
        run(tmp_path, *settings)
    facts = run_file(tmp_path)
    assert facts["status"] == "failed" and "No space left" in facts["message"]
    assert steps_saved(tmp_path) == [5] and finding.resolve(tmp_path / "run").step == 5
    run(tmp_path, *settings)
    run(tmp_path, *settings, run="straight")
    assert run_file(tmp_path)["status"] == "finished"
    assert state_hash(tmp_path) == state_hash(tmp_path, "straight")
    assert [row["step"] for row in entries(tmp_path)] == list(range(1, 21))


def test_a_disk_that_takes_nothing_at_all_shows_the_error_that_came_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.suffix == ".tmp":
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, *arguments, **options)

    def fail(kind: str, facts: Any) -> None:
        if kind == "step":
            monkeypatch.setattr(Path, "open", full)
            raise NonFiniteError("this came first")

    opened = Path.open
    with pytest.raises(NonFiniteError, match="this came first") as raised:
        run(tmp_path, view=Recorder(fail))
    assert any("run.json: could not be written: No space left on device" in note for note in raised.value.__notes__)
    assert run_file(tmp_path)["status"] == "running", "the record as it was before"
    assert not list((tmp_path / "run").glob("*.tmp"))


class Unread(Recorder):
    """Nobody reads what comes after the first of these events."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.last = kind

    def event(self, kind: str, facts: Any) -> None:
        if self.of(self.last):
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        super().event(kind, facts)


def test_a_run_that_nobody_reads_any_more_saves_and_stops(tmp_path: Path) -> None:
    view = Unread("step")
    outcome = run(tmp_path, "run.steps=20", "run.logEvery=1", view=view)
    assert (outcome.status, outcome.exit_code) == ("stopped", 75)
    assert "nobody reads the output any more" in outcome.message
    assert steps_saved(tmp_path)[-1] == outcome.step < 20 and run_file(tmp_path)["status"] == "stopped"
    with pytest.raises(StopRequested, match="stopped"):
        run(tmp_path, run="early", view=Unread("phase"))
    assert run_file(tmp_path, "early")["status"] == "stopped"
