"""The dynamic loss scaler: what the scale is at each step, and how overflows move it.

Device backends keep the scale on the device; this class replays their overflow flags on the host and must agree.
"""

from __future__ import annotations

from math import frexp, isfinite
from typing import Any, TypeGuard

from hybrid.contracts.names import unknown_name
from hybrid.errors import CheckpointCorrupt, ConfigError

DEFAULTS: dict[str, Any] = {
    "enabled": False,
    "initialScale": 1024,
    "minScale": 1,
    "maxScale": 65536,
    "scaleFactor": 2,
    "backoffFactor": 0.5,
    "growthInterval": 2000,
    "overflowCheck": True,
}


class DynamicLossScaler:
    """Scale and growth counter of a run.

    A step: take `step_scale()`, scale the loss gradient by it, unscale the gradients, look for non-finite elements,
    call `update(overflow)`. On overflow neither clipping nor the optimizer runs.
    """

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        """`config` holds fields of DEFAULTS; absent and None mean the default.

        ConfigError for an unknown field, and for a number that is not finite and above 0.
        """
        given = config or {}
        for name in given:
            if name not in DEFAULTS:
                raise ConfigError(unknown_name("lossScaling field", name, DEFAULTS))
        settings = {name: default if given.get(name) is None else given[name] for name, default in DEFAULTS.items()}
        for name, value in settings.items():
            if not isinstance(DEFAULTS[name], bool) and not _positive(value):
                raise ConfigError(f"lossScaling.{name} is {value!r}: expected a finite number above 0")
        self.enabled = bool(settings["enabled"])
        self.overflow_check = bool(settings["overflowCheck"])
        self.scale: float = settings["initialScale"]
        self.min_scale: float = settings["minScale"]
        self.max_scale: float = settings["maxScale"]
        self.scale_factor: float = settings["scaleFactor"]
        self.backoff_factor: float = settings["backoffFactor"]
        self.growth_interval: float = settings["growthInterval"]
        self.growth_counter = 0

    def step_scale(self) -> float:
        """The scale that the next step's loss gradient carries: 1 when scaling is off."""
        return self.scale if self.enabled else 1

    def update(self, overflow: bool) -> None:
        """Account for one finished step. Does nothing when scaling is off."""
        if not self.enabled:
            return
        if overflow:
            self.scale = max(self.min_scale, self.scale * self.backoff_factor)
            self.growth_counter = 0
            return
        self.growth_counter += 1
        if self.growth_counter >= self.growth_interval:
            self.scale = min(self.max_scale, self.scale * self.scale_factor)
            self.growth_counter = 0

    def powers_of_two(self) -> bool:
        """Whether every scale the run can reach is a power of two: then scaling is exact, and a device can do it."""
        reachable = (self.scale, self.min_scale, self.max_scale, self.scale_factor, self.backoff_factor)
        return all(frexp(value)[0] == 0.5 for value in reachable)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; the settings are in its configuration."""
        return {"scale": self.scale, "growthCounter": self.growth_counter}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state()`, ignoring other fields. CheckpointCorrupt for a missing or impossible value."""
        scale, counter = state.get("scale"), state.get("growthCounter")
        if not _positive(scale):
            raise CheckpointCorrupt(f"loss scaler state: scale is {scale!r}, expected a finite number above 0")
        if isinstance(counter, bool) or not isinstance(counter, int) or counter < 0:
            raise CheckpointCorrupt(
                f"loss scaler state: growthCounter is {counter!r}, expected an integer of at least 0"
            )
        self.scale = scale
        self.growth_counter = counter


def _positive(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value) and value > 0
