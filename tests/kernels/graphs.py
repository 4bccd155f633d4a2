"""Run a traced graph on the device by its lowering rules: every dispatch through the harness, buffers as NumPy bytes.

It is what an executor does with a plan, without arenas: so a rule can be tested for any graph, not only for a model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid.backends.reference.executor import Executor
from hybrid.graph.ir import ACT, U32, Graph, Value
from hybrid.plan.lowering import Lowering, Slice, Tensor, padded_rows
from hybrid.plan.profile import DEFAULT_LIMITS, DeviceProfile
from hybrid.plan.rules import lower_node
from kernels.harness import run, stored

Arrays = Mapping[str, NDArray[Any]]
DTYPES = {"f32": np.float32, "f16": np.float16, "u32": np.uint32}


def lower(graph: Graph, precision: str, binding_bytes: int | None = None) -> Lowering:
    """binding_bytes: the most that the device can bind at once, so that large matrices come in slices."""
    limits = DEFAULT_LIMITS | ({"maxStorageBufferBindingSize": binding_bytes} if binding_bytes else {})
    act = "f16" if precision == "mixed-f16" else "f32"
    fixed = {}
    for name, value in {**graph.inputs, **graph.parameters}.items():
        fixed[name] = Tensor(name, value.shape, act if value.dtype == ACT else value.dtype, "fixed")
    for name, value in graph.parameters.items():
        fixed["grad/" + name] = Tensor("grad/" + name, value.shape, "f32", "fixed")
        fixed["half/" + name] = Tensor("half/" + name, value.shape, "f16", "fixed")
    low = Lowering(graph, "test", precision, DeviceProfile(limits=limits), fixed)
    low.plan_fusions()
    for node in graph.nodes:
        low.node = node
        if not low.is_deferred(node):
            lower_node(low, node)
    return low


def on_device(
    graph: Graph, inputs: Arrays, parameters: Arrays, precision: str, binding_bytes: int | None = None
) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]], list[str]]:
    """(outputs, gradients of the parameters, labels of the dispatches)."""
    low = lower(graph, precision, binding_bytes)
    buffers: dict[Tensor, NDArray[np.uint8]] = {}

    def fill(tensor: Tensor, array: NDArray[Any]) -> None:
        if array.ndim > 1:  # the room that a plan gives to every matrix
            array = np.pad(array, [(0, padded_rows(len(array)) - len(array)), *[(0, 0)] * (array.ndim - 1)])
        buffers[tensor] = np.ascontiguousarray(array, DTYPES[tensor.dtype]).reshape(-1).view(np.uint8).copy()

    def contents(part: Slice) -> NDArray[Any]:
        if part.tensor not in buffers:  # something else than zeros, so that what is never written shows
            buffers[part.tensor] = np.full(part.tensor.bytes, 0x55, np.uint8)
        return buffers[part.tensor][part.offset : part.offset + part.size].view(DTYPES[part.tensor.dtype])

    for name in graph.inputs:
        fill(low.fixed[name], inputs[name])
    for name in graph.parameters:
        fill(low.fixed[name], parameters[name])
        fill(low.fixed["half/" + name], parameters[name])
        fill(low.fixed["grad/" + name], np.zeros(parameters[name].shape))
    for spec in low.specs:
        launch = next(iter(spec.launches))
        views = [contents(part) for part in spec.slices]
        written = [view for view, b in zip(views, launch.kernel.bindings, strict=True) if b.access == "read_write"]
        for view, result in zip(written, run(launch, views, precision), strict=True):
            view[...] = result

    def value_of(value: Value) -> NDArray[Any]:
        return contents(low.whole(value)).reshape(value.shape)

    outputs = {name: value_of(value) for name, value in graph.outputs.items()}
    gradients = {name: contents(low.whole(low.gradient(name))).reshape(v.shape) for name, v in graph.parameters.items()}
    return outputs, gradients, [spec.label for spec in low.specs]


def on_reference(
    graph: Graph, inputs: Arrays, parameters: Arrays, precision: str
) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """The same in float64, from the values that the device's storage holds."""
    held = {n: stored(a, precision) if graph.inputs[n].dtype == ACT else a for n, a in inputs.items()}
    held = {n: a.astype(np.float32) if graph.inputs[n].dtype not in (ACT, U32) else a for n, a in held.items()}
    weights = {n: stored(a, precision if a.ndim > 1 else "f32") for n, a in parameters.items()}
    gradients = {n: np.zeros(a.shape) for n, a in parameters.items()}
    return Executor(graph, "f64").run(held, weights, gradients).outputs, gradients
