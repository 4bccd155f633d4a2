"""How long the parts of a step take: device timestamps, or a synchronised step now and then where there are none."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid.backends.protocol import StepInfo
from hybrid.backends.webgpu.device import load_wgpu
from hybrid.backends.webgpu.executor import Executor, Timestamps

QUERY_SLOTS = 4096  # what one query set may hold
CALIBRATE_EVERY = 200  # steps

Passes = list[tuple[str, int]]


class StepTimer:
    """Hands timestamps to a step and turns them into milliseconds by phase.

    interval: steps between two readbacks, for which slots must last. Where the device has no timestamps, `calibrating`
    says which steps the session runs in three pieces, waiting for each; the steps between repeat the last figures.
    """

    def __init__(self, executor: Executor, interval: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._executor = executor
        self._interval = interval
        self._clock = clock
        self._queries: Any = None
        self._cursor = 0
        self._written = 0  # slots 0 .. this have been written at least once: steps take theirs without gaps
        self._calibration: dict[str, float] = {}
        self._pieces: dict[str, float] = {}
        if executor.device.has_timestamps:
            wgpu = load_wgpu()
            create, usage = executor.device.device.create_query_set, wgpu.BufferUsage
            self._queries = executor.guarded(lambda: create(type=wgpu.QueryType.timestamp, count=QUERY_SLOTS))
            self._resolved = executor.buffer(QUERY_SLOTS * 8, usage.QUERY_RESOLVE | usage.COPY_SRC)

    @property
    def bytes(self) -> int:
        """What a readback adds to the ring's bytes."""
        return QUERY_SLOTS * 8 if self._queries is not None else 0

    def begin(self, info: StepInfo) -> Timestamps | None:
        """Slots for a step; None without timestamps, or when so many microbatches would not fit."""
        slots = 2 * (3 * info.microbatches + 3)
        if self._queries is None or slots * (self._interval + 1) * 2 > QUERY_SLOTS:
            return None
        if self._cursor + slots > QUERY_SLOTS:
            self._cursor = 0
        return Timestamps(self._queries, self._cursor, slots)

    def end(self, timestamps: Timestamps | None) -> Passes:
        """The step is encoded: which passes it timed."""
        if timestamps is None:
            return []
        self._cursor = timestamps.next
        self._written = max(self._written, self._cursor)
        return timestamps.passes

    def encode_copy(self, encoder: Any, buffer: Any, offset: int) -> None:
        """Copy the timestamps behind the ring's rows."""
        if self._written:
            # Only what was written: SwiftShader waits for ever for a query that never was.
            encoder.resolve_query_set(self._queries, 0, self._written, self._resolved, 0)
            encoder.copy_buffer_to_buffer(self._resolved, 0, buffer, offset, QUERY_SLOTS * 8)

    def times(self, passes: Passes, ticks: NDArray[np.uint64]) -> tuple[dict[str, float], str]:
        """Milliseconds of the step and its phases, and where they come from ("device", "calibration" or "none")."""
        if not passes:
            return dict(self._calibration), "calibration" if self._calibration else "none"
        spans = [(phase, int(ticks[slot]), int(ticks[slot + 1])) for phase, slot in passes]
        if any(end < begin for _, begin, end in spans):
            return {}, "none"
        by_phase = {"forward": 0.0, "backward": 0.0, "": 0.0}
        for phase, begin, end in spans:
            by_phase[phase] += (end - begin) / 1e6
        whole = (max(end for *_, end in spans) - min(begin for _, begin, _ in spans)) / 1e6
        return _report(whole, by_phase["forward"], by_phase["backward"], by_phase[""]), "device"

    # Without timestamps

    def calibrating(self, info: StepInfo) -> bool:
        """Whether this step is run in pieces that `piece` times. Not the first one, which may still compile."""
        if self._queries is not None:
            return False
        return info.data_step % CALIBRATE_EVERY == 0 or (not self._calibration and info.data_step > 1)

    def piece(self, name: str, run: Callable[[], None]) -> None:
        """Run and time a piece of a calibration step: "forward", "backward" or "optimizer", which ends the step."""
        self._executor.wait()
        begin = self._clock()
        run()
        self._executor.wait()
        self._pieces[name] = self._pieces.get(name, 0.0) + (self._clock() - begin) * 1e3
        if name == "optimizer":
            pieces, self._pieces = self._pieces, {}
            parts = [pieces.get(part, 0.0) for part in ("forward", "backward", "optimizer")]
            self._calibration = _report(sum(parts), *parts)


def _report(whole: float, forward: float, backward: float, optimizer: float) -> dict[str, float]:
    return {"step_time_ms": whole, "forward_ms": forward, "backward_ms": backward, "optimizer_ms": optimizer}
