"""The loss scaler moves exactly as its vectors say."""

from __future__ import annotations

import pytest

from contracts.vectors import load
from hybrid.contracts.loss_scaler import DEFAULTS, DynamicLossScaler
from hybrid.errors import CheckpointCorrupt, ConfigError

CASES = load("loss_scaling")["cases"]


def test_the_vectors_are_all_there():
    assert len(CASES) == 20
    assert sum(len(case["overflow"]) for case in CASES) == 2271


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_each_trace_is_replayed_exactly(case):
    scaler = DynamicLossScaler(case["config"])
    for overflow, expected in zip(case["overflow"], case["steps"], strict=True):
        used = scaler.step_scale()
        scaler.update(overflow)
        assert {"used": used, "scale": scaler.scale, "growthCounter": scaler.growth_counter} == expected


def test_a_restored_scaler_continues_where_it_was():
    config = {"enabled": True, "initialScale": 4, "growthInterval": 3}
    scaler, resumed = DynamicLossScaler(config), DynamicLossScaler(config)
    for overflow in (False, False, True, False):
        scaler.update(overflow)
    resumed.restore(scaler.state())
    for overflow in (False, False, False, True):
        scaler.update(overflow)
        resumed.update(overflow)
        assert resumed.state() == scaler.state()


@pytest.mark.parametrize("state", [{}, {"scale": 0, "growthCounter": 0}, {"scale": 2, "growthCounter": -1}])
def test_impossible_states_are_refused(state):
    with pytest.raises(CheckpointCorrupt, match="loss scaler state"):
        DynamicLossScaler({"enabled": True}).restore(state)


def test_unknown_and_unusable_settings_are_refused():
    with pytest.raises(ConfigError, match="'initialscale': did you mean 'initialScale'"):
        DynamicLossScaler({"initialscale": 2})
    for value in (0, -1, float("nan"), float("inf"), "2", True):
        with pytest.raises(ConfigError, match=r"lossScaling\.minScale"):
            DynamicLossScaler({"minScale": value})


def test_no_configuration_means_the_defaults_and_no_scaling():
    scaler = DynamicLossScaler(None)
    assert (scaler.enabled, scaler.step_scale(), scaler.scale) == (False, 1, DEFAULTS["initialScale"])


def test_only_powers_of_two_may_live_on_a_device():
    assert DynamicLossScaler({"enabled": True}).powers_of_two()
    assert DynamicLossScaler({"enabled": True, "initialScale": 0.25, "backoffFactor": 0.125}).powers_of_two()
    assert not DynamicLossScaler({"enabled": True, "initialScale": 1000}).powers_of_two()
    assert not DynamicLossScaler({"enabled": True, "scaleFactor": 1.5}).powers_of_two()
