"""Values, nodes and graphs.

A graph is a list of nodes in execution order. Each node applies one primitive (an op of `hybrid.ops`, or a backward
primitive that only autodiff emits) to values. Everything is static: shapes, element types and attributes are known
when the graph is made. The reference executor runs it as it stands; the plan compiler lowers it to dispatches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

# Element types. "act" is the activation type and depends on the precision: f32, or f16 in mixed-f16 (the reference
# also runs it as f64). "f32" stays at least f32 in every precision: statistics, losses, gradients of parameters.
ACT = "act"
F32 = "f32"
U32 = "u32"

# A target id that is no target: the row adds nothing to the loss, its count or the gradient.
IGNORE = 0xFFFFFFFF


@dataclass(frozen=True)
class Type:
    """Shape and element type of a value."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(eq=False)
class Value:
    """One tensor of the graph. Identity is the object itself; `index` numbers values for printing and hashing.

    `kind` is "input" (fed for each batch or step), "parameter" (a master weight), "constant" (bytes of the plan, such
    as rotary tables), "cache" (key/value cache, kept between program runs) or "node" (the output of a node).
    """

    index: int
    type: Type
    kind: str
    name: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def dtype(self) -> str:
        return self.type.dtype


@dataclass(eq=False)
class Node:
    """One primitive applied to `inputs`.

    `accumulates` names a parameter whose gradient buffer the node adds its result to; such a node has no outputs.
    `scope` is the path of enclosing `ops.block` labels, such as "layers.0", with a "backward" suffix for nodes that
    autodiff made.
    """

    op: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    scope: str = ""
    accumulates: str | None = None


@dataclass(eq=False)
class Graph:
    """A traced program. `inputs`, `parameters`, `constants` and `caches` map names to values; `outputs` are what the
    caller reads."""

    nodes: list[Node] = field(default_factory=list)
    inputs: dict[str, Value] = field(default_factory=dict)
    parameters: dict[str, Value] = field(default_factory=dict)
    constants: dict[str, Value] = field(default_factory=dict)
    constant_data: dict[str, bytes] = field(default_factory=dict)  # little-endian float32
    caches: dict[str, Value] = field(default_factory=dict)
    outputs: dict[str, Value] = field(default_factory=dict)
    dropout_sites: list[str] = field(default_factory=list)
    values: int = 0

    def new_value(self, shape: tuple[int, ...], dtype: str, kind: str = "node", name: str = "") -> Value:
        value = Value(self.values, Type(tuple(shape), dtype), kind, name)
        self.values += 1
        return value

    def producer(self) -> dict[Value, Node]:
        """Which node makes each node-made value."""
        return {output: node for node in self.nodes for output in node.outputs}

    def uses(self) -> dict[Value, list[Node]]:
        """The nodes that read each value, in execution order, once per node."""
        result: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for value in dict.fromkeys(node.inputs):
                result.setdefault(value, []).append(node)
        return result
