"""Modes decide which entries carry averages, and a resumed run continues its windows."""

from __future__ import annotations

import pytest

from hybrid.contracts.telemetry import Telemetry, TelemetrySettings
from hybrid.errors import CheckpointCorrupt


def averages(mode, epochs, size=3):
    telemetry = Telemetry(TelemetrySettings(mode=mode, window_size=size))
    return [telemetry.observe(float(number), 10.0, epoch)[0] for number, epoch in enumerate(epochs, start=1)]


def test_step_mode_averages_the_last_values_in_every_entry():
    assert averages("step", [0] * 5) == [1, 1.5, 2, 3, 4]


def test_window_mode_averages_only_when_a_window_is_complete():
    assert averages("window", [0] * 7) == [None, None, 2, None, None, 5, None]


def test_epoch_mode_begins_anew_with_each_epoch():
    assert averages("epoch", [0, 0, 0, 1, 1]) == [1, 1.5, 2, 4, 4.5]


@pytest.mark.parametrize("mode", ["step", "window", "epoch"])
def test_a_resumed_run_continues_its_windows(mode):
    settings = TelemetrySettings(mode=mode, window_size=3)
    whole, first, second = Telemetry(settings), Telemetry(settings), Telemetry(settings)
    values = [(2.0, 0), (3.0, 0), (None, 0), (5.0, 1), (7.0, 1), (11.0, 2)]
    expected = [whole.observe(value, 1.0, epoch) for value, epoch in values]
    observed = [first.observe(value, 1.0, epoch) for value, epoch in values[:4]]
    second.restore(first.state())
    observed += [second.observe(value, 1.0, epoch) for value, epoch in values[4:]]
    assert observed == expected


@pytest.mark.parametrize("change", [{"loss": None}, {"stepTimeMs": ["x"]}, {"observed": 1.5}, {"epoch": True}])
def test_an_impossible_state_is_refused(change):
    telemetry = Telemetry(TelemetrySettings())
    with pytest.raises(CheckpointCorrupt, match=f"telemetry state: {next(iter(change))}"):
        telemetry.restore({**telemetry.state(), **change})


def test_only_losses_that_overflowed_give_no_average():
    telemetry = Telemetry(TelemetrySettings())
    assert telemetry.observe(None, 8.0, 0) == (None, 8.0)
