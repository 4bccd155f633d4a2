"""Learning-rate schedules: the rate of optimizer step t as a pure function, so that any step can be computed alone.

t counts optimizer steps from 1; a step skipped after an overflow does not count. W = floor(warmupSteps), n = t - W -
1 is the number of finished steps after the warm-up, and totalSteps counts steps *after* the warm-up. During warm-up
(t <= W) every schedule gives max(minLr, lr * t / W), phase "warmup", index t - 1. After it:

constant       lr; phase "constant", index n. Without a warm-up minLr plays no part. step_decay     max(minLr, lr *
gamma^k), k = n // stepSize; phase "decay", index k. cosine         max(minLr, lr * c(n / totalSteps)), c(p) = (1 +
cos(pi p)) / 2: cut off at minLr, not aimed at it; phase "cosine". cosine_to_min  minLr + (lr - minLr) * c(n /
totalSteps): the whole half wave, ending in minLr; phase "cosine". wsd            warm-up, stable, decay: lr for n < S
(phase "stable"), then minLr + (lr - minLr) * shape((n - S) / D) (phase "decay"),
               D = max(1, floor(decayShare * totalSteps)), S = totalSteps - D; shapes linear 1 - p, cosine c(p), sqrt
               1 - sqrt(p).

Progress stops at 1: a run longer than totalSteps stays at the last rate. `enabled: false`, or no scheduler at all, is
the base rate with phase "constant" and index t - 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import floor, sqrt
from typing import Any

from hybrid.contracts.names import unknown_name
from hybrid.errors import ConfigError
from hybrid.optim.arithmetic import half_cosine, power

TYPES = ("constant", "step_decay", "cosine", "cosine_to_min", "wsd")
SHAPES = ("linear", "cosine", "sqrt")
DEFAULT_LR = 2e-4
DEFAULT_DECAY_SHARE = 0.2


def learning_rate(optimizer: Mapping[str, Any], t: int) -> tuple[float, int, str]:
    """(rate, scheduler index, phase) of optimizer step `t` >= 1.

    `optimizer` has the configuration's keys: lr and scheduler {enabled, type, warmupSteps, stepSize, gamma,
    totalSteps, minLr, decayShare, decayShape}. Absent or None: lr 2e-4, enabled true, type constant, gamma 1,
    decayShare 0.2, decayShape linear, the others 0. Errors: ConfigError for an unknown type or shape (with the
    nearest known one) and for t < 1.
    """
    if t < 1:
        raise ConfigError(f"optimizer step {t} has no learning rate: steps count from 1")
    rate = float(_get(optimizer, "lr", DEFAULT_LR))
    scheduler = optimizer.get("scheduler")
    if scheduler is None or scheduler.get("enabled") is False:
        return rate, t - 1, "constant"
    kind = _get(scheduler, "type", "constant")
    if kind not in TYPES:
        raise ConfigError(unknown_name("scheduler type", str(kind), TYPES))
    floor_rate = float(_get(scheduler, "minLr", 0))
    warmup = floor(_get(scheduler, "warmupSteps", 0))
    if t <= warmup:
        return max(floor_rate, rate * t / warmup), t - 1, "warmup"
    n = t - max(warmup, 0) - 1
    total = max(1.0, _get(scheduler, "totalSteps", 0))
    if kind == "step_decay":
        drops = n // max(1, floor(_get(scheduler, "stepSize", 1)))
        return max(floor_rate, rate * power(float(_get(scheduler, "gamma", 1)), drops)), drops, "decay"
    if kind == "cosine":
        return max(floor_rate, rate * half_cosine(min(1.0, n / total))), n, "cosine"
    if kind == "cosine_to_min":
        return floor_rate + (rate - floor_rate) * half_cosine(min(1.0, n / total)), n, "cosine"
    if kind == "wsd":
        decay = max(1, floor(_get(scheduler, "decayShare", DEFAULT_DECAY_SHARE) * total))
        stable = floor(total) - decay
        share = _shape(_get(scheduler, "decayShape", "linear"), min(1.0, max(0, n - stable) / decay))
        if n < stable:
            return rate, n, "stable"
        return floor_rate + (rate - floor_rate) * share, n, "decay"
    return rate, n, "constant"


def _shape(name: str, progress: float) -> float:
    if name == "linear":
        return 1 - progress
    if name == "cosine":
        return half_cosine(progress)
    if name == "sqrt":
        return 1 - sqrt(progress)
    raise ConfigError(unknown_name("scheduler decayShape", str(name), SHAPES))


def _get(settings: Mapping[str, Any], name: str, default: Any) -> Any:
    value = settings.get(name)
    return default if value is None else value
