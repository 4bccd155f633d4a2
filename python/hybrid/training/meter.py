"""How fast training is: time of steps only, without evaluation, samples and saving."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Meter:
    """Counts steps, tokens and seconds of this process. clock: monotonic seconds; window: recent steps that the rate
    is of."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, window: int = 50) -> None:
        self._clock = clock
        self._began = clock()
        self._paused_seconds = 0.0
        self._pauses = 0
        self._waited_seconds = 0.0
        # (training seconds, tokens, seconds of waiting for data) so far
        self._marks: deque[tuple[float, int, float]] = deque(maxlen=window + 1)
        self.steps = 0
        self.tokens = 0
        self._marks.append((0.0, 0, 0.0))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside the block is not training time; blocks may nest."""
        began = self._clock()
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if self._pauses == 0:
                self._paused_seconds += self._clock() - began

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Time inside the block does not exist: neither the rate nor the remaining time know of it."""
        began = self._clock()
        try:
            yield
        finally:
            self._began += self._clock() - began

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time inside the block is training time in which data is waited for."""
        began = self._clock()
        try:
            yield
        finally:
            self._waited_seconds += self._clock() - began

    def step(self, tokens: int) -> None:
        """A step with this many target tokens has been handed to the session."""
        self.steps += 1
        self.tokens += tokens
        self._marks.append((self.training_seconds, self.tokens, self._waited_seconds))

    @property
    def seconds(self) -> float:
        """Wall-clock seconds since the loop began."""
        return self._clock() - self._began

    @property
    def training_seconds(self) -> float:
        """Seconds since the loop began, without pauses."""
        return self.seconds - self._paused_seconds

    @property
    def tokens_per_second(self) -> float:
        """Target tokens a second over the recent steps; 0 before the first."""
        (first_seconds, first_tokens, _), (last_seconds, last_tokens, _) = self._marks[0], self._marks[-1]
        elapsed = last_seconds - first_seconds
        return (last_tokens - first_tokens) / elapsed if elapsed > 0 else 0.0

    @property
    def step_milliseconds(self) -> float:
        """Mean time of the recent steps; 0 before the first."""
        count = len(self._marks) - 1
        return 1000 * (self._marks[-1][0] - self._marks[0][0]) / count if count else 0.0

    @property
    def data_wait_share(self) -> float:
        """Part of the time of the recent steps in which they waited for data, from 0 to 1; 0 before the first."""
        first, last = self._marks[0], self._marks[-1]
        return min(1.0, (last[2] - first[2]) / (last[0] - first[0])) if last[0] > first[0] else 0.0

    def eta_seconds(self, remaining_steps: int) -> float | None:
        """Seconds that the remaining steps will take, evaluation and saving included, judged by the steps of this
        process."""
        return remaining_steps * self.seconds / self.steps if self.steps else None
