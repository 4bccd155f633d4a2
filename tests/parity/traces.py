"""Traces that several tests compare with, trained once a session."""

from __future__ import annotations

from functools import cache

from hybrid.training.parity.contract import SHORT_STEPS, Row
from hybrid.training.parity.runtimes import Runtime, Trace, float64, reference
from hybrid.training.parity.workload import MODELS, Workload


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


def workload(model: str) -> Workload:
    """Ten steps of one of the models."""
    return Workload(model, MODELS[model], SHORT_STEPS)


def assert_all_pass(rows: list[Row]) -> None:
    assert rows
    failed = [
        f"{r.model}: {r.promise.what} ({', '.join(r.runtimes)}): {r.measured} > {r.promise.limit} {r.note}"
        for r in rows
        if not r.passed
    ]
    assert not failed, "\n".join(failed)
