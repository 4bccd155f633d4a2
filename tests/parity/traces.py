"""Traces that several tests compare with, trained once a session."""

from __future__ import annotations

from functools import cache

from hybrid.training.parity.runtimes import Runtime, Trace, float64, reference
from hybrid.training.parity.workload import Workload
from parity.torch_runtime import TorchOracle


@cache
def trace(runtime: str, workload: Workload) -> Trace:
    """What "float64", "reference" or "torch" makes of a workload. Do not change what it gives."""
    makers: dict[str, Runtime] = {"float64": float64(), "reference": reference(), "torch": TorchOracle()}
    return makers[runtime].train(workload)


def traces(workload: Workload, *runtimes: str) -> dict[str, Trace]:
    return {runtime: trace(runtime, workload) for runtime in runtimes}
