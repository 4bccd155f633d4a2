"""Where a step's time goes: each dispatch in a compute pass of its own, timed by the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybrid.backends.webgpu.device import load_wgpu
from hybrid.backends.webgpu.executor import Encoded, Executor
from hybrid.errors import ConfigError
from hybrid.plan.document import Dispatch

SLOTS = 4096


@dataclass(frozen=True)
class DispatchTime:
    """Milliseconds of one dispatch, the least of several repeats."""

    label: str
    kernel: str
    milliseconds: float
    is_product: bool


def profile_dispatches(executor: Executor, programs: Sequence[str], *, repeats: int = 5) -> list[DispatchTime]:
    """Time every dispatch of `programs`, which must be prepared. ConfigError where the device has no timestamps.

    A pass per dispatch costs a little more than dispatches in one pass, so the sum is an upper bound of the programs'
    time.
    """
    if not executor.device.has_timestamps:
        raise ConfigError(f"{executor.device.name!r} has no timestamp-query: kernel times cannot be measured on it")
    wgpu, gpu = load_wgpu(), executor.device.device
    usage = wgpu.BufferUsage
    dispatches = [d for program in programs for d in executor.plan.dispatches(program)]
    encoded = [executor.encoded(d, executor.choice(d)) for d in dispatches]
    queries = gpu.create_query_set(type=wgpu.QueryType.timestamp, count=SLOTS)
    resolved = gpu.create_buffer(size=SLOTS * 8, usage=usage.QUERY_RESOLVE | usage.COPY_SRC)
    best = np.full(len(encoded), np.inf)
    try:
        for _ in range(repeats + 1):
            times = [
                t
                for begin in range(0, len(encoded), SLOTS // 2)
                for t in _timed(executor, encoded[begin : begin + SLOTS // 2], queries, resolved)
            ]
            best = np.minimum(best, times)
    finally:
        queries.destroy()
        resolved.destroy()
    return [
        DispatchTime(d.label, executor.choice(d).kernel, float(t), _is_product(d))
        for d, t in zip(dispatches, best, strict=True)
    ]


def _timed(executor: Executor, part: Sequence[Encoded], queries: Any, resolved: Any) -> list[float]:
    encoder = executor.encoder()
    for index, item in enumerate(part):
        compute = encoder.begin_compute_pass(
            timestamp_writes={
                "query_set": queries,
                "beginning_of_pass_write_index": 2 * index,
                "end_of_pass_write_index": 2 * index + 1,
            }
        )
        compute.set_pipeline(item.pipeline)
        compute.set_bind_group(0, item.group)
        compute.dispatch_workgroups(*item.workgroups)
        compute.end()
    encoder.resolve_query_set(queries, 0, 2 * len(part), resolved, 0)
    executor.submit(encoder)
    ticks = np.frombuffer(executor.device.queue.read_buffer(resolved, 0, 16 * len(part)), np.uint64).reshape(-1, 2)
    return [float(end - begin) / 1e6 if end >= begin else float("inf") for begin, end in ticks.tolist()]


def _is_product(dispatch: Dispatch) -> bool:
    return dispatch.product_class is not None
