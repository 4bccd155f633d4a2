"""The ring of result rows: copied out every few steps, collected once a later fence has passed, so nothing waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid.backends.protocol import StepResult
from hybrid.backends.webgpu.device import load_wgpu
from hybrid.backends.webgpu.executor import Executor
from hybrid.backends.webgpu.timing import Passes, StepTimer
from hybrid.errors import ConfigError
from hybrid.plan.kernels import state as layout

FLOAT32_MAX = float(np.finfo(np.float32).max)
ROW_BYTES = 64


@dataclass
class _Readback:
    """Rows on their way to the host. `after`: the number of the step after which the copy has run."""

    promise: Any
    buffer: Any
    steps: list[tuple[int, Passes]]
    after: int


class MetricsRing:
    """Results of applied steps. interval: steps between two readbacks; ConfigError when the ring is too short."""

    def __init__(self, executor: Executor, timer: StepTimer, interval: int) -> None:
        self.rows = int(executor.plan.settings["ringRows"])
        if not 1 <= interval <= self.rows // 2:
            raise ConfigError(f"metrics interval {interval}: expected 1 to {self.rows // 2} steps")
        usage = load_wgpu().BufferUsage
        self._executor = executor
        self._timer = timer
        self._interval = interval
        self._tensor = executor.plan.tensors["ring"]
        size = self._tensor.bytes + timer.bytes
        self._buffers = [executor.buffer(size, usage.COPY_DST | usage.MAP_READ) for _ in range(2)]
        self.reset()

    def reset(self) -> None:
        """Forget what has not been read (the caller has drained the device)."""
        self._free = list(self._buffers)
        self._unread: list[tuple[int, Passes]] = []
        self._readbacks: deque[_Readback] = deque()

    def read_row(self, step: int) -> NDArray[np.uint32]:
        """The row of one step, now: waits for the device."""
        offset = self._tensor.offset + step % self.rows * ROW_BYTES
        raw = self._executor.read_bytes(self._tensor.arena, self._tensor.page, offset, ROW_BYTES)
        return np.frombuffer(raw, np.uint32)

    def add(self, step: int, passes: Passes, encoder: Any) -> Any:
        """A step is encoded. When a readback is due, appends the copy and returns the buffer for `send`; else None."""
        self._unread.append((step, passes))
        return self._copy(encoder) if len(self._unread) >= self._interval and self._free else None

    def send(self, buffer: Any, after: int) -> None:
        """The copy was submitted: begin to map it."""
        self._executor.counters.readbacks += 1
        mode = load_wgpu().MapMode.READ
        promise = self._executor.guarded(lambda: buffer.map_async(mode))
        self._readbacks.append(_Readback(promise, buffer, self._unread, after))
        self._unread = []

    def collect(self, passed: int) -> Iterator[StepResult]:
        """The results whose copies have run by step `passed`."""
        while self._readbacks and self._readbacks[0].after <= passed:
            yield from self._receive()

    def collect_all(self, submitted: int) -> Iterator[StepResult]:
        """Everything, waiting for the device."""
        while self._readbacks:
            yield from self._receive()
        if self._unread:
            encoder = self._executor.encoder()
            buffer = self._copy(encoder)
            self._executor.submit(encoder)
            self.send(buffer, submitted)
            yield from self._receive()

    def _copy(self, encoder: Any) -> Any:
        buffer = self._free.pop()
        source = self._executor.page(self._tensor)
        encoder.copy_buffer_to_buffer(source, self._tensor.offset, buffer, 0, self._tensor.bytes)
        self._timer.encode_copy(encoder, buffer, self._tensor.bytes)
        return buffer

    def _receive(self) -> Iterator[StepResult]:
        readback = self._readbacks.popleft()
        data = np.frombuffer(self._executor.mapped(readback.promise, readback.buffer, readback.buffer.size), np.uint8)
        self._free.append(readback.buffer)
        rows = data[: self._tensor.bytes].view(np.uint32).reshape(self.rows, -1)
        ticks = data[self._tensor.bytes :].view(np.uint64)
        for step, passes in readback.steps:
            times, source = self._timer.times(passes, ticks)
            result = decode_row(rows[step % self.rows], times, source)
            if result.data_step != step:
                raise RuntimeError(f"metrics ring: expected the row of step {step}, found step {result.data_step}")
            yield result

    def close(self) -> None:
        for buffer in self._buffers:
            buffer.destroy()


def decode_row(row: NDArray[np.uint32], times: dict[str, float], source: str) -> StepResult:
    """A result row of `docs/formats/plan.md` as the protocol's type."""
    floats = row.view(np.float32)
    flags = int(row[7])
    loss_overflow = bool(flags & layout.FLAG_LOSS_OVERFLOW)
    norm_finite = not flags & layout.FLAG_NORM_NOT_FINITE
    return StepResult(
        data_step=int(row[0]),
        loss=FLOAT32_MAX if loss_overflow else float(floats[1]),
        nll=FLOAT32_MAX if loss_overflow else float(floats[2]),
        target_tokens=int(row[3]),
        grad_norm=float(floats[4]) if norm_finite else None,
        clip_factor=float(floats[5]),
        loss_scale=float(floats[6]),
        overflow=bool(flags & layout.FLAG_OVERFLOW),
        loss_overflow=loss_overflow,
        nan_count=int(row[8]),
        inf_count=int(row[9]),
        optimizer_step=int(row[10]),
        growth_counter=int(row[11]),
        loss_scale_after=float(floats[12]),
        timing_source=source,
        **times,
    )
