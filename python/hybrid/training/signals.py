"""Stopping on request: signals and the time limit set a flag, and whoever works asks it.

The first SIGTERM, SIGINT or SIGUSR1 asks for a stop: the run saves and ends with exit code 75. After a SIGINT, a
second one has its default effect and ends the process at once; saved checkpoints stay valid.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from hybrid.errors import StopRequested

NAMES = ("SIGTERM", "SIGINT", "SIGUSR1")  # SIGUSR1 does not exist on Windows


class StopFlag:
    """A request to stop, from a signal, the time limit or the program itself.

    max_hours: hours after which a stop is due, counted from here; None means never. clock: seconds.
    """

    def __init__(self, max_hours: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deadline = None if max_hours is None else clock() + max_hours * 3600
        self._max_hours = max_hours
        self._reason: str | None = None

    @property
    def reason(self) -> str | None:
        """Why a stop is due; None while none is."""
        if self._reason is None and self._deadline is not None and self._clock() >= self._deadline:
            self._reason = f"run.maxHours = {self._max_hours:g} is over"
        return self._reason

    @property
    def requested(self) -> bool:
        """Whether a stop is due."""
        return self.reason is not None

    def request(self, reason: str) -> None:
        """Ask for a stop; the first reason is kept."""
        self._reason = self._reason or reason

    def check(self) -> None:
        """Raise StopRequested if a stop is due: for work that has nothing to save."""
        if self.reason is not None:
            raise StopRequested(f"stopped before the first step: {self.reason}")

    @contextmanager
    def installed(self) -> Iterator[StopFlag]:
        """Listen to signals inside the block. Elsewhere than in the main thread, where Python allows no handlers, a
        no-op."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        numbers = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
        previous = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.request(f"{signal.Signals(number).name} received")
        if number == signal.SIGINT:
            # The system's own handler also ends a process that is inside a long call of a driver.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
