"""Traces that several tests compare with, trained once a session."""

from __future__ import annotations

from functools import cache

from hybrid.training.parity.runtimes import Runtime, Trace, float64, reference
from hybrid.training.parity.workload import Workload


def open_runtime(name: str) -> Runtime:
    if name == "torch":
        from parity.torch_runtime import TorchOracle  # needs torch, so only tests that are marked so come here

        return TorchOracle()
    return {"float64": float64, "reference": reference}[name]()


@cache
def trace(runtime: str, workload: Workload) -> Trace:
    """What "float64", "reference" or "torch" makes of a workload. Do not change what it gives."""
    return open_runtime(runtime).train(workload)


def traces(workload: Workload, *runtimes: str) -> dict[str, Trace]:
    return {runtime: trace(runtime, workload) for runtime in runtimes}
