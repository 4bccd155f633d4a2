"""Rates and remaining time, on a clock that the test moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid.config.tree import RunConfig
from hybrid.training.meter import Meter
from training.micro import Recorder, entries, run
from training.sessions import FakeClock, TimedSession


def test_the_rate_is_that_of_the_recent_steps_without_pauses() -> None:
    clock = FakeClock()
    meter = Meter(clock, window=2)
    assert meter.tokens_per_second == 0 and meter.step_milliseconds == 0 and meter.eta_seconds(10) is None
    for seconds, tokens in ((10.0, 1), (0.5, 100), (0.5, 300)):
        clock.seconds += seconds
        meter.step(tokens)
        with meter.paused():
            clock.seconds += 60
            with meter.paused():
                clock.seconds += 60
    assert meter.tokens_per_second == 400, "400 tokens in the one second of the last two steps"
    assert meter.step_milliseconds == 500
    assert meter.training_seconds == 11 and meter.seconds == 371
    assert meter.eta_seconds(6) == pytest.approx(6 * 371 / 3), "what is left includes evaluation and saving"


def test_what_came_before_the_first_step_is_no_time_of_the_loop() -> None:
    clock = FakeClock()
    meter = Meter(clock)
    with meter.stopped():
        clock.seconds += 90
    for _ in range(4):
        clock.seconds += 0.5
        meter.step(100)
    with meter.stopped():  # a device was lost, and a new one is set up
        clock.seconds += 90
    assert meter.tokens_per_second == 200 and meter.step_milliseconds == 500
    assert meter.seconds == meter.training_seconds == 2 and meter.eta_seconds(8) == 4


def test_throughput_leaves_out_set_up_evaluation_samples_and_saving(tmp_path: Path) -> None:
    clock, view = FakeClock(), Recorder()

    def set_up(config: RunConfig, *reporting: Any) -> TimedSession:
        clock.seconds += 90
        return TimedSession(config, clock)

    run(
        tmp_path, "run.steps=20", "evaluation.every=3", "sampling.every=4", "checkpoint.every=5", "data.prefetch=0",
        view=view, session=set_up, clocks={"clock": clock, "now": clock},
    )  # fmt: skip
    tokens = 4 * 16
    assert [facts["tokensPerSecond"] for facts in view.of("step")] == pytest.approx([tokens / TimedSession.STEP] * 5)
    assert [facts["stepMs"] for facts in view.of("step")] == pytest.approx([1000 * TimedSession.STEP] * 5)
    rows = entries(tmp_path)
    assert rows[0]["tokens_per_second"] is None, "nothing was measured yet"
    assert [row["tokens_per_second"] for row in rows[1:]] == pytest.approx([tokens / TimedSession.STEP] * 19)


def test_the_remaining_time_comes_from_the_steps_of_this_process(tmp_path: Path) -> None:
    clock = FakeClock()
    timed = {
        "session": lambda config, *reporting: TimedSession(config, clock),
        "clocks": {"clock": clock, "now": clock},
    }
    run(tmp_path, "run.steps=10", "checkpoint.every=0", **timed)
    clock.seconds += 100_000  # the run lies there for a day
    view = Recorder()
    run(tmp_path, "run.steps=20", "checkpoint.every=0", "run.logEvery=1", view=view, **timed)
    step = TimedSession.STEP
    assert [facts["etaSeconds"] for facts in view.of("step")] == pytest.approx(
        [step * left for left in range(9, -1, -1)]
    )
    rows = entries(tmp_path)
    assert [row["progress_eta_ms"] for row in rows[10:]] == pytest.approx(
        [1000 * step * left for left in range(9, -1, -1)]
    )
    worked = 11 * step + TimedSession.EXPORT
    assert rows[10]["progress_elapsed_ms"] == pytest.approx(1000 * worked), "the day in between is no time of the run"
    assert rows[10]["progress_eta_iso"] > rows[9]["progress_eta_iso"]
