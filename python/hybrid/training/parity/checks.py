"""The checks: each compares traces and gives rows of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import isfinite, sqrt

import numpy as np
from numpy.typing import NDArray

from hybrid.backends.protocol import SessionState
from hybrid.training.parity.contract import LONG_STEPS, SHORT_STEPS, ZERO_GRADIENT, Row
from hybrid.training.parity.runtimes import Runtime, Trace
from hybrid.training.parity.workload import GLOBAL_BATCH, Workload, workloads

OVERFLOW_STEP = 4
Tensors = dict[str, NDArray[np.float32]]


@dataclass
class Report:
    """Everything measured, and what could not be run here (name to reason)."""

    rows: list[Row] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return bool(self.rows) and all(row.passed for row in self.rows)


def check_all(runtimes: Sequence[Runtime], progress: Callable[[str], None] = lambda text: None) -> Report:
    """The whole contract over `runtimes`, of which one may be the float64 reference. `progress` hears what runs now."""
    report = Report()
    mixed = [runtime for runtime in runtimes if "mixed-f16" in runtime.precisions]
    for runtime in runtimes:
        if runtime not in mixed and runtime.resumes:
            report.not_run[f"{runtime.name} in mixed-f16"] = "its adapter lacks shader-f16"
    for workload in workloads(SHORT_STEPS):
        progress(f"{workload.name}: f32")
        f32 = train_all(workload, runtimes)
        report.rows += check_f32(workload, runtimes, f32)
        if mixed:
            progress(f"{workload.name}: mixed-f16")
            report.rows += check_mixed(replace(workload, precision="mixed-f16"), mixed, f32)
    return report


def train_all(workload: Workload, runtimes: Sequence[Runtime]) -> dict[str, Trace]:
    return {runtime.name: runtime.train(workload) for runtime in runtimes}


def check_f32(workload: Workload, runtimes: Sequence[Runtime], traces: dict[str, Trace]) -> Iterator[Row]:
    """Initial weights, bookkeeping, losses of ten steps, repeatability, gradients of splits, update after 100 steps.
    `traces` are those of `workload`."""
    yield from compare_starts(workload, traces)
    yield from compare_bookkeeping(workload, traces)
    yield from compare_losses(workload, traces, "loss")
    for runtime in runtimes:
        yield from check_repeatable(workload, runtime, traces[runtime.name])
        yield check_splits(workload, runtime)
    long = replace(workload, steps=LONG_STEPS)
    yield from compare_updates(long, train_all(long, runtimes))


def check_mixed(workload: Workload, mixed: Sequence[Runtime], f32: dict[str, Trace]) -> Iterator[Row]:
    """Losses against the f32 traces and between runtimes, and what an injected overflow does."""
    traces = train_all(workload, mixed)
    for name, trace in traces.items():
        for other, single in f32.items():
            for check, step in (("mixed_first", 1), ("mixed_tenth", SHORT_STEPS)):
                difference = relative(trace.losses[step - 1], single.losses[step - 1])
                yield Row(workload.name, check, (f"{name} mixed-f16", f"{other} f32"), difference)
    yield from compare_losses(workload, traces, "mixed_pair")
    overflowing = replace(workload, overflow_step=OVERFLOW_STEP)
    skipping = train_all(overflowing, mixed)
    yield from compare_losses(overflowing, skipping, "mixed_pair")
    yield from compare_bookkeeping(overflowing, skipping)
    for runtime in mixed:
        yield from check_skip(overflowing, runtime.name, skipping[runtime.name])
        yield from check_repeatable(overflowing, runtime, skipping[runtime.name])


# --- exact --------------------------------------------------------------------------------------------------------


def compare_starts(workload: Workload, traces: dict[str, Trace]) -> Iterator[Row]:
    for first, second in pairs(traces):
        a, b = traces[first].initial.model, traces[second].initial.model
        differing = sum(int(np.count_nonzero(a[name] != b[name])) for name in a) if a.keys() == b.keys() else None
        yield Row(workload.name, "initial_weights", (first, second), differing)


def compare_bookkeeping(workload: Workload, traces: dict[str, Trace]) -> Iterator[Row]:
    """What must be the same number everywhere, against what the contract says it is."""
    expected = expected_bookkeeping(workload)
    for name, trace in traces.items():
        found = [
            (r.data_step, r.target_tokens, r.overflow, r.loss_scale, r.loss_scale_after, r.optimizer_step)
            for r in trace.results
        ]
        differing = [(e, f) for e, f in zip(expected, found, strict=False) if e != f]
        missing = abs(len(expected) - len(found))
        note = f"expected {differing[0][0]}, found {differing[0][1]}" if differing else ""
        yield Row(workload.name, "bookkeeping", (name,), len(differing) + missing, note)


def expected_bookkeeping(workload: Workload) -> list[tuple[int, int, bool, float, float, int]]:
    """Data step, targets, overflow, loss scale before and after, optimizer step; by the scaler's rule written out."""
    settings = workload.loss_scaling
    enabled = bool(settings["enabled"])
    scale = float(settings["initialScale"]) if enabled else 1.0  # type: ignore[arg-type]
    interval = int(settings["growthInterval"])  # type: ignore[call-overload]
    growth = optimizer_step = 0
    rows = []
    for data_step in range(1, workload.steps + 1):
        used, overflow = scale, data_step == workload.overflow_step
        growth = 0 if overflow else growth + 1
        optimizer_step += not overflow
        if enabled and overflow:
            scale = max(1.0, scale / 2)
        elif enabled and growth >= interval:
            scale, growth = min(65536.0, scale * 2), 0
        rows.append((data_step, workload.info(data_step).target_tokens, overflow, used, scale, optimizer_step))
    return rows


def check_repeatable(workload: Workload, runtime: Runtime, trace: Trace) -> Iterator[Row]:
    if runtime.resumes:
        again = runtime.train(workload)
        yield Row(workload.name, "repeat", (runtime.name,), different_bytes(trace.final, again.final))
        resumed = runtime.train(workload, resume_after=workload.steps // 2)
        yield Row(workload.name, "resume", (runtime.name,), different_bytes(trace.final, resumed.final))


def check_skip(workload: Workload, name: str, trace: Trace) -> Iterator[Row]:
    if trace.before_skip is not None and trace.after_skip is not None:
        yield Row(workload.name, "skip", (name,), different_bytes(trace.before_skip, trace.after_skip))


# --- within a tolerance -------------------------------------------------------------------------------------------


def compare_losses(workload: Workload, traces: dict[str, Trace], check: str) -> Iterator[Row]:
    for first, second in pairs(traces):
        a, b = traces[first].losses, traces[second].losses
        differences = [relative(x, y) for x, y in zip(a, b, strict=True)]
        worst = max(differences)
        yield Row(workload.name, check, (first, second), worst, f"step {differences.index(worst) + 1}")


def compare_updates(workload: Workload, traces: dict[str, Trace]) -> Iterator[Row]:
    """Directions in which two runtimes moved the weights, tensors with zero gradient excepted."""
    excepted = zero_gradient_tensors(next(iter(traces.values())).final)
    note = f"without {', '.join(sorted(excepted))} (zero gradient)" if excepted else ""
    for first, second in pairs(traces):
        a, b = (update(traces[name], excepted) for name in (first, second))
        whole = [np.concatenate([tensor.reshape(-1) for tensor in tensors.values()]) for tensors in (a, b)]
        yield Row(workload.name, "update", (first, second), one_minus_cosine(*whole), note)
        distances = {name: one_minus_cosine(a[name], b[name]) for name in a}
        worst = max(distances, key=lambda name: distances[name])
        yield Row(workload.name, "update_worst", (first, second), distances[worst], worst)


def check_splits(workload: Workload, runtime: Runtime) -> Row:
    """The gradient of one batch as 1, 2 and 4 microbatches, read off the first moment of a step that does not clip."""
    gradients: list[NDArray[np.float64]] = []
    for size in (GLOBAL_BATCH, GLOBAL_BATCH // 2, 1):
        trace = runtime.train(replace(workload, steps=1, microbatch_size=size, max_grad_norm=0.0))
        moments = [m for name, m in sorted(trace.final.optimizer.items()) if name.startswith("moment1/")]
        gradients.append(np.concatenate([m.reshape(-1) for m in moments]).astype(np.float64))
    norm = sqrt(float(np.square(gradients[0]).sum()))
    worst = max(sqrt(float(np.square(g - gradients[0]).sum())) for g in gradients[1:])
    return Row(workload.name, "gradients", (runtime.name,), worst / norm if norm else None)


# --- arithmetic ---------------------------------------------------------------------------------------------------


def pairs(traces: dict[str, Trace]) -> Iterator[tuple[str, str]]:
    return combinations(traces, 2)


def relative(a: float, b: float) -> float:
    """|a - b| / |b|, infinite where either is not a number."""
    return abs(a - b) / abs(b) if isfinite(a) and isfinite(b) and b else float("inf")


def update(trace: Trace, without: set[str]) -> dict[str, NDArray[np.float64]]:
    """What the run added to each weight, in the order of the names."""
    return {
        name: trace.final.model[name].astype(np.float64) - trace.initial.model[name].astype(np.float64)
        for name in sorted(trace.final.model.keys() - without)
    }


def one_minus_cosine(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Half the squared distance of the two directions, which is 1 - cosine without its cancellation; 0 for two
    zeros."""
    norm_a, norm_b = sqrt(float(np.square(a).sum())), sqrt(float(np.square(b).sum()))
    if norm_a == 0 or norm_b == 0:
        return 0.0 if norm_a == norm_b else 1.0
    return float(np.square(a / norm_a - b / norm_b).sum()) / 2


def zero_gradient_tensors(state: SessionState) -> set[str]:
    """Names of tensors whose second moments are rounding noise beside those of the whole model."""
    second = {n.removeprefix("moment2/"): m.astype(np.float64) for n, m in state.optimizer.items() if "moment2/" in n}
    whole = sum(float(m.sum()) for m in second.values()) / sum(m.size for m in second.values())
    return {name for name, m in second.items() if sqrt(float(m.mean())) < ZERO_GRADIENT * sqrt(whole)}


def different_bytes(a: SessionState, b: SessionState) -> int:
    """How many bytes of weights and moments differ, a missing tensor counting whole."""
    total = 0
    for left, right in ((a.model, b.model), (a.optimizer, b.optimizer)):
        for name in left.keys() | right.keys():
            x, y = left.get(name), right.get(name)
            if x is None or y is None or x.shape != y.shape:
                total += max(tensor.nbytes for tensor in (x, y) if tensor is not None)
            else:
                total += int(np.count_nonzero(np.frombuffer(x.tobytes(), "u1") != np.frombuffer(y.tobytes(), "u1")))
    return total
