"""The ETA comes from the steps of this process."""

from __future__ import annotations

import pytest

from hybrid.contracts.progress import Progress, ProgressContext


class Clock:
    def __init__(self, now=0.0):
        self.now = now

    def __call__(self):
        return self.now


def test_a_first_run_extrapolates_its_mean_step():
    clock = Clock(1_767_225_600_000)
    progress = Progress(ProgressContext(steps_per_shard=4), clock)
    clock.now += 1500
    state = progress.finish_step(1)
    assert (state.elapsed_ms, state.eta_ms, state.percent_complete) == (1500, 4500, 25)
    assert state.eta_iso == "2026-01-01T00:00:06.000Z"


def test_a_monotonic_clock_measures_while_another_tells_the_date():
    clock = Clock(123)
    progress = Progress(ProgressContext(steps_per_shard=2), clock, now=lambda: 1_767_225_600_000)
    clock.now += 2000
    assert progress.finish_step(1).eta_iso == "2026-01-01T00:00:02.000Z"


def test_a_resumed_run_is_not_fooled_by_the_steps_of_earlier_processes():
    clock = Clock()
    progress = Progress(ProgressContext(steps_per_shard=100), clock, elapsed_before_ms=90_000)
    clock.now = 1000
    state = progress.finish_step(91)
    assert (state.elapsed_ms, state.eta_ms) == (91_000, 9000)
    assert progress.elapsed_ms == 91_000


def test_a_later_shard_is_not_fooled_by_the_steps_of_earlier_shards():
    clock = Clock()
    progress = Progress(ProgressContext(shard_index=2, shard_count=4, steps_per_shard=10), clock)
    clock.now = 40
    state = progress.finish_step(1)
    assert (state.global_step, state.global_steps, state.eta_ms) == (11, 40, 29 * 40)


def test_a_step_that_had_to_be_repeated_counts_as_executed():
    clock = Clock()
    progress = Progress(ProgressContext(steps_per_shard=10), clock)
    for step in (1, 2, 2):
        clock.now += 100
        state = progress.finish_step(step)
    assert state.eta_ms == pytest.approx(800)


def test_without_a_number_of_steps_there_is_time_but_no_eta():
    clock = Clock()
    progress = Progress(ProgressContext(), clock)
    clock.now = 7
    state = progress.finish_step(3)
    assert (state.step_in_shard, state.elapsed_ms) == (3, 7)
    assert state.eta_ms is state.eta_iso is state.percent_complete is None


def test_a_clock_that_was_set_back_gives_no_negative_times():
    clock = Clock(5000)
    progress = Progress(ProgressContext(steps_per_shard=4), clock, elapsed_before_ms=10)
    clock.now = 1000
    state = progress.finish_step(1)
    assert (state.elapsed_ms, state.eta_ms) == (10, 0)
