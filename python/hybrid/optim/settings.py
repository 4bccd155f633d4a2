"""Settings of the optimizer and its schedule, as typed values and as the configuration's keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any

from hybrid.contracts.names import unknown_name
from hybrid.errors import ConfigError
from hybrid.optim.schedules import DEFAULT_DECAY_SHARE, DEFAULT_LR, SHAPES, TYPES

OPTIMIZERS = ("adam", "adamw")


@dataclass(frozen=True)
class SchedulerSettings:
    """See `schedules`. Steps are optimizer steps; total_steps counts those after the warm-up."""

    enabled: bool = False
    type: str = "constant"
    warmup_steps: int = 0
    step_size: int = 1000
    gamma: float = 0.95
    total_steps: int = 10000
    min_lr: float = 0.0
    decay_share: float = DEFAULT_DECAY_SHARE
    decay_shape: str = "linear"


@dataclass(frozen=True)
class OptimizerSettings:
    """Adam or AdamW: two names of one rule with decoupled weight decay, which is 0 unless it is set."""

    type: str = "adam"
    lr: float = DEFAULT_LR
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)

    def to_dict(self) -> dict[str, Any]:
        """The configuration's keys (camelCase): what `learning_rate` takes and what hashes cover."""
        document = {_camel(item.name): getattr(self, item.name) for item in fields(self)}
        document["scheduler"] = {
            _camel(item.name): getattr(self.scheduler, item.name) for item in fields(self.scheduler)
        }
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> OptimizerSettings:
        """From the configuration's keys; absent and None mean the default.

        ConfigError for unknown keys (with the nearest known one) and for impossible values.
        """
        settings = _fill(cls, document, "optimizer")
        scheduler = settings.pop("scheduler", None)
        if scheduler is not None:
            settings["scheduler"] = SchedulerSettings(**_fill(SchedulerSettings, scheduler, "optimizer.scheduler"))
        result = cls(**settings)
        result.validate()
        return result

    def validate(self) -> None:
        """ConfigError naming the first setting that cannot be used."""
        if self.type not in OPTIMIZERS:
            raise ConfigError(unknown_name("optimizer type", str(self.type), OPTIMIZERS))
        scheduler = self.scheduler
        if scheduler.type not in TYPES:
            raise ConfigError(unknown_name("scheduler type", str(scheduler.type), TYPES))
        if scheduler.decay_shape not in SHAPES:
            raise ConfigError(unknown_name("scheduler decayShape", str(scheduler.decay_shape), SHAPES))
        _require("lr", self.lr, "at least 0", self.lr >= 0)
        _require("beta1", self.beta1, "at least 0 and below 1", 0 <= self.beta1 < 1)
        _require("beta2", self.beta2, "at least 0 and below 1", 0 <= self.beta2 < 1)
        _require("eps", self.eps, "above 0", self.eps > 0)
        _require("weightDecay", self.weight_decay, "at least 0", self.weight_decay >= 0)
        _require("scheduler.warmupSteps", scheduler.warmup_steps, "at least 0", scheduler.warmup_steps >= 0)
        _require("scheduler.stepSize", scheduler.step_size, "at least 1", scheduler.step_size >= 1)
        _require("scheduler.gamma", scheduler.gamma, "above 0 and at most 1", 0 < scheduler.gamma <= 1)
        _require("scheduler.totalSteps", scheduler.total_steps, "at least 1", scheduler.total_steps >= 1)
        _require("scheduler.minLr", scheduler.min_lr, "at least 0", scheduler.min_lr >= 0)
        _require("scheduler.decayShare", scheduler.decay_share, "0 to 1", 0 <= scheduler.decay_share <= 1)
        if scheduler.enabled and scheduler.type in ("cosine_to_min", "wsd") and scheduler.min_lr > self.lr:
            raise ConfigError(
                f"optimizer.scheduler.minLr is {scheduler.min_lr!r}, above lr {self.lr!r}: the rate would rise"
            )


def _require(name: str, value: float, expected: str, holds: bool) -> None:
    if not (holds and isfinite(value)):
        raise ConfigError(f"optimizer.{name} is {value!r}: expected a number {expected}")


def _fill(cls: type, document: Mapping[str, Any], path: str) -> dict[str, Any]:
    names = {_camel(item.name): item.name for item in fields(cls)}
    for key in document:
        if key not in names:
            raise ConfigError(unknown_name(f"{path} field", key, names))
    return {names[key]: value for key, value in document.items() if value is not None}


def _camel(name: str) -> str:
    head, *tail = name.split("_")
    return head + "".join(part.capitalize() for part in tail)
