"""Which variant of each product class runs fastest here: timed once per adapter, then remembered in the user's cache.

All variants of a class compute the same sums in the same order, so the choice changes speed and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from hybrid.backends.webgpu.device import Device
from hybrid.backends.webgpu.executor import Encoded, Executor, Progress
from hybrid.plan.document import Dispatch
from hybrid.resources import cache_folder

ROUNDS = 5
FORMAT = 3
# A wait for the device takes a good part of a millisecond by itself: time at least this much work at once.
LEAST_SECONDS = 0.003
MOST_DISPATCHES = 16
MARGIN = 0.95  # a winner stays for good, so another variant than the first must take at most this part of its time


def choose_variants(
    executor: Executor,
    known: Mapping[str, str],
    progress: Progress | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, str]:
    """Product class -> name of the fastest variant. Classes that `known` has no usable answer for are timed, on the
    plan's own (still empty) arenas."""
    classes = representatives(executor)
    chosen = {name: known[name] for name, d in classes.items() if known.get(name) in [c.variant for c in d.choices]}
    missing = [name for name in classes if name not in chosen]
    for done, name in enumerate(missing):
        if progress:
            progress("timing kernel variants", done, len(missing))
        rounds = time_rounds(executor, classes[name], clock)
        chosen[name] = classes[name].choices[winner(rounds)].variant
    return chosen


def tune_variants(
    executor: Executor,
    progress: Progress | None = None,
    *,
    rounds: int = 7,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, dict[str, float]]:
    """Seconds of every variant of every product class, for plans compiled with `tune`."""
    times = {}
    classes = representatives(executor)
    for done, (name, dispatch) in enumerate(classes.items()):
        if progress:
            progress("timing kernel variants", done, len(classes))
        seconds = (median(column) for column in zip(*time_rounds(executor, dispatch, clock, rounds), strict=True))
        times[name] = dict(zip((choice.variant for choice in dispatch.choices), seconds, strict=True))
    return times


def winner(rounds: Sequence[Sequence[float]]) -> int:
    """The index of the fastest choice by the median over the rounds of its time beside the first one's in that round.

    The variants of a round ran right after one another: what slows a whole round down does not count, and what falls
    on single measurements is not the median. The first choice is the best guess and wins what is too close to call.
    """
    ratios = [median(times[index] / times[0] for times in rounds) for index in range(len(rounds[0]))]
    best = min(range(len(ratios)), key=ratios.__getitem__)
    return best if ratios[best] < MARGIN else 0


def representatives(executor: Executor) -> dict[str, Dispatch]:
    """For each product class with alternatives, the dispatch that touches most bytes."""
    found: dict[str, Dispatch] = {}
    for program in executor.plan.programs:
        for dispatch in executor.plan.dispatches(program):
            name = dispatch.product_class
            if name is None or len(dispatch.choices) < 2:
                continue
            if name not in found or _bytes(dispatch) > _bytes(found[name]):
                found[name] = dispatch
    return found


def time_rounds(
    executor: Executor, dispatch: Dispatch, clock: Callable[[], float], rounds: int = ROUNDS, dispatches: int = 0
) -> list[list[float]]:
    """Seconds of one dispatch of each choice, in each of a few rounds, after one that compiles.

    dispatches: how many are timed at once; 0 for as many as the clock and the wait need.
    """
    encoded = [executor.encoded(dispatch, choice) for choice in dispatch.choices]

    def time_each(count: int) -> list[float]:
        times = []
        for item in encoded:
            begin = clock()
            _run(executor, item, count)
            executor.wait()
            times.append(max(clock() - begin, 1e-9) / count)
        return times

    time_each(1)
    if not dispatches:
        dispatches = min(MOST_DISPATCHES, math.ceil(LEAST_SECONDS / min(time_each(1))))
    return [time_each(dispatches) for _ in range(rounds)]


def _run(executor: Executor, item: Encoded, dispatches: int) -> None:
    encoder = executor.encoder()
    compute = encoder.begin_compute_pass()
    compute.set_pipeline(item.pipeline)
    compute.set_bind_group(0, item.group)
    for _ in range(dispatches):
        compute.dispatch_workgroups(*item.workgroups)
    compute.end()
    executor.submit(encoder)


def _bytes(dispatch: Dispatch) -> int:
    return sum(b.size for b in dispatch.bindings)


class VariantCache:
    """The remembered winners of one adapter, driver and precision: a file in the user's cache."""

    def __init__(self, device: Device, precision: str) -> None:
        info = device.info
        identity = "\n".join((info.vendor, info.name, info.description, info.backend, precision))
        self.path = cache_folder("variants") / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"

    def read(self) -> dict[str, str]:
        """Winners by product class; a file that cannot be understood is only a reason to time again."""
        try:
            document: Any = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            return {}
        variants = document.get("variants")
        return {str(k): str(v) for k, v in variants.items()} if isinstance(variants, dict) else {}

    def add(self, variants: Mapping[str, str]) -> None:
        """Remember these too. A read-only home costs a second at the next start and nothing else."""
        merged = {**self.read(), **variants}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.path.parent)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"format": FORMAT, "variants": merged}, file, indent=1, sort_keys=True)
            Path(temporary).replace(self.path)
        except OSError:
            return
