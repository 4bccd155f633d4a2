"""Times of a step's parts on the device that runs them."""

from __future__ import annotations

import time
from collections import defaultdict

import torch


class StepTimes:
    """Marks between the parts of one step. On a CPU work is done when a call returns; on CUDA marks are events in the
    stream, and reading them waits until they have passed."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: dict[str, list[tuple[float | torch.cuda.Event, float | torch.cuda.Event]]] = defaultdict(list)
        self._first = self._last = self._mark()

    def _mark(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def skip(self) -> None:
        """What was done since the last mark belongs to no part."""
        self._last = self._mark()

    def part(self, name: str) -> None:
        """What was done since the last mark was this part."""
        now = self._mark()
        self._spans[name].append((self._last, now))
        self._last = now

    @property
    def arrived(self) -> bool:
        """Whether everything up to the last mark is done."""
        return bool(self._last.query()) if isinstance(self._last, torch.cuda.Event) else True  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if isinstance(self._last, torch.cuda.Event):
            self._last.synchronize()

    def milliseconds(self) -> dict[str, float]:
        """By part, as `StepResult` names them, and the whole step; waits for the last mark."""
        self.wait()
        parts = {f"{name}_ms": sum(_between(*span) for span in spans) for name, spans in self._spans.items()}
        return {**parts, "step_time_ms": _between(self._first, self._last)}


def _between(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return float(start.elapsed_time(end))
    assert isinstance(start, float) and isinstance(end, float)
    return (end - start) * 1e3
