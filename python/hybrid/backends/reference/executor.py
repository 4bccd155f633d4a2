"""Runs a graph with NumPy, node by node, and frees values after their last use."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid.backends.reference.kernels import KERNELS, Array
from hybrid.graph.ir import ACT, U32, Graph, Node, Value
from hybrid.ops import OpError

F16_MAX = 65504.0


@dataclass(frozen=True)
class Precision:
    """Storage type of activations and type of all arithmetic and other values."""

    name: str
    act: type[np.floating[Any]]
    wide: type[np.floating[Any]]


PRECISIONS = {
    "f32": Precision("f32", np.float32, np.float32),
    "f64": Precision("f64", np.float64, np.float64),
    "mixed-f16": Precision("mixed-f16", np.float16, np.float32),
}


@dataclass
class Run:
    """What one run of a graph gave: its outputs, whether an f16 store did not fit, and how long its two halves took."""

    outputs: dict[str, Array]
    overflow: bool = False
    forward_ms: float = 0.0
    backward_ms: float = 0.0


@dataclass
class _Plan:
    """Made once for each graph: which values die after each node, and where the backward part begins."""

    dying: list[list[Value]] = field(default_factory=list)
    backward_start: int = 0
    peak_bytes: int = 0


class Executor:
    """One graph at one precision.

    Parameters are given as the graph reads them; see `working_copies`. `peak_bytes` is the most that the outputs of
    nodes take at once.
    """

    def __init__(self, graph: Graph, precision: str) -> None:
        if unknown := sorted({node.op for node in graph.nodes} - set(KERNELS)):
            raise OpError(f"the reference has no kernel for {', '.join(unknown)}")
        self.graph = graph
        self.precision = PRECISIONS[precision]
        wide = self.precision.wide
        self.constants: dict[Value, Array] = {
            value: np.frombuffer(graph.constant_data[name], "<f4").reshape(value.shape).astype(wide)
            for name, value in graph.constants.items()
        }
        self._plan = _plan(graph, np.dtype(self.precision.act).itemsize, np.dtype(wide).itemsize)

    @property
    def peak_bytes(self) -> int:
        return self._plan.peak_bytes

    def new_caches(self) -> dict[str, Array]:
        """Empty key/value caches for `run`."""
        return {name: np.zeros(value.shape, self.precision.act) for name, value in self.graph.caches.items()}

    def run(
        self,
        inputs: Mapping[str, Array],
        parameters: Mapping[str, Array],
        gradients: Mapping[str, Array] | None = None,
        caches: Mapping[str, Array] | None = None,
    ) -> Run:
        """inputs and parameters by name (others are ignored); `gradients` are added to, `caches` written to."""
        live: dict[Value, Array] = dict(self.constants)
        for name, value in self.graph.inputs.items():
            live[value] = self._input(name, value, inputs)
        live.update({value: parameters[name] for name, value in self.graph.parameters.items()})
        live.update({value: (caches or {})[name] for name, value in self.graph.caches.items()})
        result = Run({})
        started = time.perf_counter()
        middle = started
        with np.errstate(all="ignore"):  # non-finite values are looked for where it matters, not warned about
            for index, node in enumerate(self.graph.nodes):
                if index == self._plan.backward_start:
                    middle = time.perf_counter()
                for value, array in zip(node.outputs, self._apply(node, live, gradients), strict=True):
                    live[value] = self._stored(value, array, result)
                for value in self._plan.dying[index]:
                    del live[value]
        ended = time.perf_counter()
        result.outputs = {name: live[value] for name, value in self.graph.outputs.items()}
        if self._plan.backward_start == len(self.graph.nodes):
            middle = ended
        result.forward_ms, result.backward_ms = (middle - started) * 1e3, (ended - middle) * 1e3
        return result

    def _input(self, name: str, value: Value, inputs: Mapping[str, Array]) -> Array:
        if name not in inputs:
            raise OpError(f"the graph needs input {name!r}, which was not given")
        array = np.asarray(inputs[name], np.uint32 if value.dtype == U32 else self.precision.wide)
        if array.shape != value.shape:
            raise OpError(f"input {name!r} has shape {list(array.shape)}, the graph was made for {list(value.shape)}")
        return array

    def _apply(
        self, node: Node, live: Mapping[Value, Array], gradients: Mapping[str, Array] | None
    ) -> tuple[Array, ...]:
        wide = self.precision.wide
        arrays = [live[value] for value in node.inputs]
        if node.op != "cache_write":  # which writes to the stored cache itself
            arrays = [
                array.astype(wide, copy=False) if value.dtype == ACT else array
                for array, value in zip(arrays, node.inputs, strict=True)
            ]
        attrs = dict(node.attrs)
        if node.accumulates is not None:
            if gradients is None:
                raise OpError(f"{node.op} accumulates to {node.accumulates!r}: the run needs gradient buffers")
            attrs["into"] = gradients[node.accumulates]
        elif node.op in ("cross_entropy_head_grad", "topk_kl_grad"):
            attrs["into"] = None
        result = KERNELS[node.op](*arrays, **attrs)
        if result is None:
            return ()
        return result if isinstance(result, tuple) else (result,)

    def _stored(self, value: Value, array: Array, result: Run) -> Array:
        """In the storage type of `value`. An activation that f16 cannot hold becomes 0 and raises the run's overflow
        flag."""
        if array.shape != value.shape:
            raise OpError(f"a kernel made {list(array.shape)} where the graph says {list(value.shape)}")
        if value.dtype == U32:
            return array
        if value.dtype == ACT and self.precision.act is np.float16:
            array, fits = to_half(array)
            result.overflow |= not fits
            return array
        return array.astype(self.precision.wide, copy=False)


def to_half(array: Array) -> tuple[NDArray[np.float16], bool]:
    """float32 to float16 and whether everything fitted; what does not fit becomes 0, as in the device kernels."""
    if array.dtype == np.float16:
        return array, True
    fits = np.abs(array) <= F16_MAX  # false for NaN
    if fits.all():
        return array.astype(np.float16), True
    return np.where(fits, array, 0.0).astype(np.float16), False


def working_copies(parameters: Mapping[str, Array], precision: str) -> tuple[dict[str, Array], bool]:
    """Master weights as the kernels read them, and whether all of them fitted.

    In mixed-f16 matrices and tables are rounded to f16 once, as a device keeps f16 copies of its f32 masters; gains
    and biases stay f32. In the other precisions nothing is copied that has the arithmetic type already.
    """
    kind = PRECISIONS[precision]
    if kind.act is not np.float16:
        return {name: array.astype(kind.wide, copy=False) for name, array in parameters.items()}, True
    copies: dict[str, Array] = {}
    fits = True
    for name, array in parameters.items():
        copies[name] = array
        if array.ndim >= 2:
            half, fitted = to_half(array)
            copies[name] = half.astype(kind.wide)
            fits &= fitted
    return copies, fits


def _plan(graph: Graph, act_bytes: int, wide_bytes: int) -> _Plan:
    """Liveness. A reshape shares the memory of its input, so its bytes count until the last of both is gone."""
    plan = _Plan(dying=[[] for _ in graph.nodes], backward_start=len(graph.nodes))
    root: dict[Value, Value] = {}
    last_use: dict[Value, int] = {}
    root_last_use: dict[Value, int] = {}
    for index, node in enumerate(graph.nodes):
        if node.scope.endswith("backward"):
            plan.backward_start = min(plan.backward_start, index)
        for output in node.outputs:
            root[output] = root.get(node.inputs[0], node.inputs[0]) if node.op == "reshape" else output
        for value in (*node.inputs, *node.outputs):
            last_use[value] = index
            root_last_use[root.get(value, value)] = index
    kept = set(graph.outputs.values())
    freed: dict[int, list[Value]] = {}
    for value, index in last_use.items():
        if value.kind == "node" and value not in kept:
            plan.dying[index].append(value)
    for value, index in root_last_use.items():
        freed.setdefault(index, []).append(value)
    live = 0
    for index, node in enumerate(graph.nodes):
        sizes = {
            value: value.type.elements * (act_bytes if value.dtype == ACT else wide_bytes) for value in node.outputs
        }
        live += sum(size for value, size in sizes.items() if root[value] is value)
        plan.peak_bytes = max(plan.peak_bytes, live)
        live -= sum(
            value.type.elements * (act_bytes if value.dtype == ACT else wide_bytes)
            for value in freed.get(index, [])
            if value.kind == "node" and value not in kept
        )
    return plan
