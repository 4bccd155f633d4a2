"""Learning rates are those of the vectors, change phase exactly where they should, and are exact in every language."""

from __future__ import annotations

import math

import pytest

from contracts.vectors import load
from hybrid.errors import ConfigError
from hybrid.optim.arithmetic import half_cosine, power
from hybrid.optim.schedules import learning_rate

CASES = load("lr_schedule")["cases"]
REFUSED = "unknown type keeps its name"  # a type nobody knows is an error here, not a silent constant


def scheduler(kind, **settings):
    return {"lr": 0.1, "scheduler": {"enabled": True, "type": kind, **settings}}


def rates(optimizer, count):
    return [learning_rate(optimizer, t)[0] for t in range(1, count + 1)]


def phases(optimizer, count):
    return [learning_rate(optimizer, t)[2] for t in range(1, count + 1)]


def test_the_vectors_are_all_there():
    assert len(CASES) == 20
    assert sum(len(case["steps"]) for case in CASES) == 500


@pytest.mark.parametrize("case", [case for case in CASES if case["name"] != REFUSED], ids=lambda case: case["name"])
def test_each_step_of_a_vector(case):
    for t, (rate, index, phase) in enumerate(case["steps"], start=1):
        own_rate, own_index, own_phase = learning_rate(case["optimizer"], t)
        assert (own_index, own_phase) == (index, phase)
        assert own_rate == pytest.approx(rate, rel=1e-12, abs=1e-15 * case["optimizer"]["lr"])


def test_an_unknown_type_is_refused_with_the_nearest_name():
    case = next(case for case in CASES if case["name"] == REFUSED)
    with pytest.raises(ConfigError, match="unknown scheduler type 'polynomial'"):
        learning_rate(case["optimizer"], 1)
    with pytest.raises(ConfigError, match="'cosin': did you mean 'cosine'"):
        learning_rate(scheduler("cosin"), 1)
    with pytest.raises(ConfigError, match="'liner': did you mean 'linear'"):
        learning_rate(scheduler("wsd", totalSteps=4, decayShape="liner"), 1)


def test_steps_count_from_one():
    with pytest.raises(ConfigError, match="step 0"):
        learning_rate({"lr": 0.1}, 0)


def test_a_disabled_or_absent_scheduler_is_the_base_rate():
    for optimizer in ({"lr": 0.3}, {"lr": 0.3, "scheduler": {"enabled": False, "type": "wsd", "warmupSteps": 9}}):
        assert learning_rate(optimizer, 5) == (0.3, 4, "constant")
    assert learning_rate({}, 1) == (2e-4, 0, "constant")


@pytest.mark.parametrize("kind", ["constant", "step_decay", "cosine", "cosine_to_min", "wsd"])
def test_warmup_ends_at_its_last_step_with_the_full_rate(kind):
    optimizer = scheduler(kind, warmupSteps=4, totalSteps=100, stepSize=100)
    assert rates(optimizer, 5) == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])
    assert [learning_rate(optimizer, t)[1] for t in (3, 4, 5)] == [2, 3, 0]
    assert phases(optimizer, 4) == ["warmup"] * 4
    assert learning_rate(optimizer, 5)[2] != "warmup"


@pytest.mark.parametrize("kind", ["step_decay", "cosine", "cosine_to_min", "wsd"])
def test_without_a_warmup_the_first_step_has_the_full_rate(kind):
    assert learning_rate(scheduler(kind, totalSteps=10), 1)[:2] == (0.1, 0)


def test_step_decay_switches_after_every_step_size():
    optimizer = scheduler("step_decay", warmupSteps=2, stepSize=3, gamma=0.5, minLr=0.02)
    assert [learning_rate(optimizer, t)[1] for t in range(3, 12)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert rates(optimizer, 12)[2:] == pytest.approx([0.1] * 3 + [0.05] * 3 + [0.025] * 3 + [0.02])


def test_cosine_is_cut_off_at_its_floor_and_stays_there():
    optimizer = scheduler("cosine", warmupSteps=2, totalSteps=8, minLr=0.03)
    values = rates(optimizer, 14)
    assert values[6] == pytest.approx(0.05)  # n = 4 of 8: half of the base rate, not half way to the floor
    assert values[10:] == [0.03] * 4
    assert rates(scheduler("cosine", totalSteps=8), 10)[8:] == [0, 0]


def test_cosine_to_min_interpolates_and_reaches_its_floor_exactly_at_the_end():
    optimizer = scheduler("cosine_to_min", warmupSteps=2, totalSteps=8, minLr=0.02)
    values = rates(optimizer, 13)
    assert values[2] == 0.1
    assert values[6] == pytest.approx(0.06)  # half way from 0.1 to 0.02
    assert values[9] > 0.02
    assert values[10:] == [0.02] * 3
    assert phases(optimizer, 11)[2:] == ["cosine"] * 9


@pytest.mark.parametrize("shape", ["linear", "cosine", "sqrt"])
def test_wsd_is_stable_until_the_last_share_and_then_decays_to_the_floor(shape):
    optimizer = scheduler("wsd", warmupSteps=2, totalSteps=10, decayShare=0.4, decayShape=shape, minLr=0.01)
    values = rates(optimizer, 14)
    assert phases(optimizer, 13) == ["warmup"] * 2 + ["stable"] * 6 + ["decay"] * 5
    assert values[2:8] == [0.1] * 6
    progress = {
        "linear": [1, 0.75, 0.5, 0.25],
        "cosine": [(1 + math.cos(math.pi * p)) / 2 for p in (0, 0.25, 0.5, 0.75)],
        "sqrt": [1 - math.sqrt(p) for p in (0, 0.25, 0.5, 0.75)],
    }[shape]
    assert values[8:12] == pytest.approx([0.01 + 0.09 * share for share in progress])
    assert values[12:] == [0.01] * 2
    assert [learning_rate(optimizer, t)[1] for t in (3, 8, 9)] == [0, 5, 6]


@pytest.mark.parametrize(("share", "stable"), [(0.0, 9), (0.05, 9), (0.29, 8), (1.0, 0)])
def test_wsd_decays_for_at_least_one_step_and_at_most_all(share, stable):
    optimizer = scheduler("wsd", totalSteps=10, decayShare=share)
    assert phases(optimizer, 11) == ["stable"] * stable + ["decay"] * (11 - stable)
    assert learning_rate(optimizer, 11)[0] == 0


def test_the_half_cosine_is_accurate_and_exact_at_its_ends():
    assert (half_cosine(0.0), half_cosine(1.0)) == (1, 0)
    for step in range(1001):
        assert abs(half_cosine(step / 1000) - (1 + math.cos(math.pi * step / 1000)) / 2) < 4e-16


def test_powers_are_accurate():
    assert power(0.9, 0) == 1
    for exponent in (1, 2, 3, 10, 255, 1000):
        assert power(0.999, exponent) == pytest.approx(0.999**exponent, rel=2e-13)
