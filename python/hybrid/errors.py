"""Typed errors and exit codes.

Both languages use the same names. A message names the thing, the value, what was expected, and what to do. Each class
knows the exit code of the command that ends with it.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_REFUSED = 3
EXIT_ALERT = 4
EXIT_STOPPED = 75
EXIT_INTERRUPTED = 130


class HybridError(Exception):
    """Base of every error that hybrid raises on purpose."""

    exit_code = EXIT_FAILED


class ConfigError(HybridError):
    """A configuration key, value or command-line option is wrong."""

    exit_code = EXIT_USAGE


class ContractMismatch(HybridError):
    """A resume disagrees with what the checkpoint promises; `differences` lists (field, saved, current)."""

    exit_code = EXIT_REFUSED

    def __init__(self, message: str, differences: tuple[tuple[str, object, object], ...] = ()) -> None:
        super().__init__(message)
        self.differences = differences


class CheckpointNotFound(HybridError):
    """There is no checkpoint where one was asked for. Never raised for one that exists and cannot be read."""


class CheckpointCorrupt(HybridError):
    """A checkpoint exists, and a byte, hash, shape, name or size in it is not what it should be."""

    exit_code = EXIT_REFUSED


class DataContractError(HybridError):
    """Training data breaks its contract: empty, truncated, changed, or an id outside the vocabulary."""

    exit_code = EXIT_REFUSED


class DeviceLost(HybridError):
    """The device went away: driver reset, watchdog, memory pressure, or `destroy()`."""


class LimitExceeded(HybridError):
    """Something needs more than the device or format allows; the message names tensor, limit and remedy."""


class NonFiniteError(HybridError):
    """A loss or gradient is NaN or infinite where the run may not go on."""


class AlertRaised(HybridError):
    """A telemetry alert with `failOnAlert` ended the run; `alerts` are their names, `step` the data step."""

    exit_code = EXIT_ALERT

    def __init__(self, alerts: tuple[str, ...], step: int) -> None:
        super().__init__(f"training telemetry alert(s): {', '.join(alerts)} at step {step}.")
        self.alerts = alerts
        self.step = step


class StopRequested(HybridError):
    """A stop signal arrived; the run has saved and can be started again."""

    exit_code = EXIT_STOPPED


class MissingDependency(HybridError):
    """An optional package is not installed; the message names the extra that brings it."""

    exit_code = EXIT_USAGE

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"this needs the optional package {package!r}: pip install 'hybrid[{extra}]'")
