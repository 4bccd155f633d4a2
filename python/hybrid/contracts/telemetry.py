"""Rolling averages and alerts of a run.

Modes: `step` puts the rolling averages into every entry; `window` only into the entry that completes a window (every
windowSize-th); `epoch` into every entry, over windows that begin anew with each epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import floor, isfinite
from typing import Any

from hybrid.contracts.javascript import is_finite_number, to_number
from hybrid.errors import AlertRaised, CheckpointCorrupt

MODES = ("step", "window", "epoch")

# (threshold, entry field, alert, on which side of the threshold it is raised), in the order alerts are reported.
RULES = (
    ("maxStepTimeMs", "step_time_ms", "max_step_time_ms_exceeded", "above"),
    ("maxGradientNorm", "gradient_norm_unclipped", "max_gradient_norm_exceeded", "above"),
    ("maxNaNCount", "nan_count", "max_nan_count_exceeded", "above"),
    ("maxInfCount", "inf_count", "max_inf_count_exceeded", "above"),
    ("maxSaturationCount", "saturation_count", "max_saturation_count_exceeded", "above"),
    ("minEffectiveLr", "effective_lr", "min_effective_lr_below_threshold", "below"),
)


@dataclass(frozen=True)
class TelemetrySettings:
    """What is counted and judged. A threshold of None never raises an alert."""

    mode: str = "step"
    window_size: int = 1
    emit_nan_inf_counters: bool = True
    alerts_enabled: bool = False
    fail_on_alert: bool = False
    thresholds: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(rule[0] for rule in RULES))

    @classmethod
    def resolve(cls, telemetry: Mapping[str, Any]) -> TelemetrySettings:
        """From the configuration's keys. Text that spells a number counts; what is unusable becomes the default.

        (A configuration file never gets that far with an unusable value: the typed configuration refuses it by name.)
        """
        alerts = telemetry.get("alerts") or {}
        limits = alerts.get("thresholds") or {}
        size = to_number(telemetry.get("windowSize"))
        numbers = {rule[0]: to_number(limits.get(rule[0])) for rule in RULES}
        return cls(
            mode=telemetry["mode"] if telemetry.get("mode") in MODES else "step",
            window_size=max(1, floor(size)) if isfinite(size) else 1,
            emit_nan_inf_counters=telemetry.get("emitNaNInfCounters") is not False,
            alerts_enabled=alerts.get("enabled") is True,
            fail_on_alert=alerts.get("failOnAlert") is True,
            thresholds={name: number if isfinite(number) else None for name, number in numbers.items()},
        )

    def to_dict(self) -> dict[str, Any]:
        """The resolved settings, as logs show them."""
        return {
            "mode": self.mode,
            "windowSize": self.window_size,
            "emitNaNInfCounters": self.emit_nan_inf_counters,
            "alertsEnabled": self.alerts_enabled,
            "failOnAlert": self.fail_on_alert,
            "thresholds": dict(self.thresholds),
        }


def alerts(settings: TelemetrySettings, entry: Mapping[str, Any]) -> list[str]:
    """Names of the alerts that an entry raises: strictly beyond the threshold. Missing values raise none."""
    if not settings.alerts_enabled:
        return []
    raised = []
    for threshold, name, alert, side in RULES:
        limit, value = settings.thresholds[threshold], entry.get(name)
        if limit is not None and is_finite_number(value) and (value > limit if side == "above" else value < limit):
            raised.append(alert)
    return raised


class RollingWindow:
    """The mean of the last `size` values."""

    def __init__(self, size: int) -> None:
        self._values: deque[float] = deque(maxlen=size)

    def push(self, value: float) -> float:
        """Add a value; the mean with it."""
        self._values.append(value)
        mean = self.mean()
        assert mean is not None
        return mean

    def mean(self) -> float | None:
        """None while empty. Added one by one: sum() compensates in newer Pythons, and means are compared exactly."""
        if not self._values:
            return None
        total = 0.0
        for value in self._values:
            total += value
        return total / len(self._values)

    def clear(self) -> None:
        self._values.clear()

    def state(self) -> list[float]:
        return list(self._values)

    def restore(self, values: list[float]) -> None:
        self._values = deque(values, maxlen=self._values.maxlen)


class Telemetry:
    """The rolling windows of a run, and the judgement of its entries."""

    def __init__(self, settings: TelemetrySettings) -> None:
        self.settings = settings
        self._loss = RollingWindow(settings.window_size)
        self._time = RollingWindow(settings.window_size)
        self._observed = 0
        self._epoch = 0

    def observe(self, loss: float | None, step_time_ms: float, epoch: int) -> tuple[float | None, float | None]:
        """Take in one step; the averages of loss and step time that its entry carries (see the modes).

        `loss` is None when it overflowed: such a value would drown all others, so it stays out of the window.
        """
        if self.settings.mode == "epoch" and epoch != self._epoch:
            self._loss.clear()
            self._time.clear()
        self._epoch = epoch
        self._observed += 1
        if loss is not None:
            self._loss.push(loss)
        self._time.push(step_time_ms)
        if self.settings.mode == "window" and self._observed % self.settings.window_size:
            return None, None
        return self._loss.mean(), self._time.mean()

    def check(self, entry: Mapping[str, Any]) -> None:
        """AlertRaised when `failOnAlert` is set and the entry carries alerts. Call it after the entry is written."""
        raised = entry.get("telemetry_alerts") or []
        if raised and self.settings.fail_on_alert:
            raise AlertRaised(tuple(raised), entry["step"])

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "loss": self._loss.state(),
            "stepTimeMs": self._time.state(),
            "observed": self._observed,
            "epoch": self._epoch,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`. CheckpointCorrupt when a field is missing or of another kind."""
        if not isinstance(state, Mapping):
            raise CheckpointCorrupt(f"telemetry state is {state!r:.80}, expected an object")
        for name in ("loss", "stepTimeMs"):
            values = state.get(name)
            if not isinstance(values, list) or not all(is_finite_number(value) for value in values):
                raise CheckpointCorrupt(f"telemetry state: {name} is {values!r}, expected a list of numbers")
        for name in ("observed", "epoch"):
            if isinstance(state.get(name), bool) or not isinstance(state.get(name), int):
                raise CheckpointCorrupt(f"telemetry state: {name} is {state.get(name)!r}, expected an integer")
        self._loss.restore(state["loss"])
        self._time.restore(state["stepTimeMs"])
        self._observed, self._epoch = state["observed"], state["epoch"]
