"""How far the host may run ahead of the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hybrid.backends.webgpu.executor import MAX_FENCES, Executor, Fence

MAX_STEPS_AHEAD = 2
MAX_SECONDS_AHEAD = 0.25


class Flight:
    """The steps that were submitted and may not have run yet: at most two, or as many as fit a quarter of a second.

    That bounds how long a stop takes, and how late results are.
    """

    def __init__(self, executor: Executor, clock: Callable[[], float]) -> None:
        self._executor = executor
        self._clock = clock
        self._fences: deque[tuple[int, Fence, float]] = deque()
        self._step_seconds = 0.0
        self._last_passed_at: float | None = None
        self.submitted = 0  # steps
        self.passed = 0  # steps that certainly have run

    def add(self) -> None:
        """A step was submitted. Waits until few enough are under way."""
        self.submitted += 1
        self._fences.append((self.submitted, self._executor.fence(), self._clock()))
        allowed = MAX_STEPS_AHEAD
        if self._step_seconds > 0:
            allowed = max(allowed, min(MAX_FENCES - 2, int(MAX_SECONDS_AHEAD / self._step_seconds)))
        while len(self._fences) > allowed:
            self._pass()

    def drain(self) -> None:
        """Wait for all of them."""
        while self._fences:
            self._pass()

    def _pass(self) -> None:
        number, fence, submitted_at = self._fences.popleft()
        fence.wait()
        now = self._clock()
        seconds = now - max(self._last_passed_at or submitted_at, submitted_at)
        self._step_seconds = seconds if not self._step_seconds else 0.8 * self._step_seconds + 0.2 * seconds
        self._last_passed_at = now
        self.passed = number
