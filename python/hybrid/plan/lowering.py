"""From one graph to one program: nodes become dispatches over logical tensors.

`Lowering` holds what the rules of `plan.rules` need: the tensor of each value, slices of parameters, temporaries, and
`emit`. Placement comes afterwards (`plan.memory`), when every tensor's first and last use is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from hybrid.errors import LimitExceeded
from hybrid.graph.ir import ACT, F32, Graph, Node, Value
from hybrid.plan.document import ITEM_BYTES
from hybrid.plan.kernels.base import Kernel, Launch
from hybrid.plan.memory import Temporary
from hybrid.plan.profile import DeviceProfile

TEMPORARY = "temporary"
PADDED_ROWS = 4


def padded_rows(rows: int) -> int:
    """How many rows a parameter matrix has room for. Those beyond its own are zero and stay so."""
    return -(-rows // PADDED_ROWS) * PADDED_ROWS


@dataclass(eq=False)
class Tensor:
    """A logical tensor. Fixed arenas know page and offset from the start; temporaries get them from `plan.memory`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    arena: str
    page: int = -1
    offset: int = -1
    group: str | None = None
    temporary: Temporary | None = None

    @property
    def bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Slice:
    """`size` bytes of a tensor from `offset` on."""

    tensor: Tensor
    offset: int
    size: int


@dataclass(frozen=True)
class RowSlice:
    """Rows `first .. first + rows - 1` of a matrix, small enough to bind."""

    first: int
    rows: int
    slice: Slice


@dataclass(eq=False)
class Spec:
    """A dispatch before placement. All launches take the same slices, one per kernel binding."""

    launches: dict[Launch, str]  # with the name of the variant, or ""
    slices: tuple[Slice, ...]
    label: str
    phase: str
    product_class: str | None = None

    @property
    def kernel(self) -> Kernel:
        """The kernel of the first launch: all have the same bindings."""
        return next(iter(self.launches)).kernel


class Lowering:
    """Lowers one graph. `fixed` maps names to tensors of fixed arenas (parameters, gradients, inputs, tables, state,
    caches, outputs)."""

    def __init__(
        self,
        graph: Graph,
        program: str,
        precision: str,
        profile: DeviceProfile,
        fixed: dict[str, Tensor],
        *,
        input_prefix: str = "",
        preferred: Mapping[str, str] | None = None,
        tune: bool = False,
    ) -> None:
        self.graph = graph
        self.program = program
        self.precision = precision
        self.profile = profile
        self.fixed = fixed
        self.input_prefix = input_prefix
        self.preferred = preferred or {}
        self.tune = tune
        self.specs: list[Spec] = []
        self.temporaries: list[Tensor] = []
        self.node: Node | None = None
        self.deferred: dict[Value, Node] = {}  # products whose only reader, an `add`, computes them with a residual
        self._tensors: dict[Value, Tensor] = {}
        self._uses = graph.uses()

    # Tensors

    def act_dtype(self) -> str:
        return "f16" if self.precision == "mixed-f16" else "f32"

    def storage_dtype(self, dtype: str) -> str:
        return self.act_dtype() if dtype == ACT else dtype

    def tensor(self, value: Value) -> Tensor:
        """The tensor that holds a value: fixed for inputs, parameters, constants and caches, a temporary otherwise."""
        if value not in self._tensors:
            key = {
                "input": self.input_prefix + value.name,
                "parameter": value.name,
                "constant": "tables/" + value.name,
                "cache": "cache/" + value.name,
            }.get(value.kind)
            if key is not None:
                tensor = self.fixed.get(key) or self.fixed.get(value.name)
                if tensor is None:
                    raise KeyError(f"no fixed tensor for {value.kind} {value.name!r} of program {self.program!r}")
                self._tensors[value] = tensor
            else:
                self._tensors[value] = self.temporary(f"v{value.index}", value.shape, self.storage_dtype(value.dtype))
        return self._tensors[value]

    def users(self, value: Value) -> list[Node]:
        """The nodes that read a value."""
        return self._uses.get(value, [])

    def alias(self, value: Value, source: Value) -> None:
        """`value` is another view of `source`."""
        self._tensors[value] = self.tensor(source)

    def assign(self, value: Value, tensor: Tensor) -> None:
        self._tensors[value] = tensor

    def bind_output(self, value: Value, tensor: Tensor) -> None:
        """Let `value`, and whatever it is merely a view of, be computed in a fixed tensor."""
        self._tensors[value] = tensor
        producer = self.graph.producer()
        while value in producer:
            node = producer[value]
            view = node.op == "reshape" or (
                node.op == "cast" and self.storage_dtype(node.inputs[0].dtype) == self.storage_dtype(value.dtype)
            )
            if not view:
                return
            value = node.inputs[0]
            self._tensors[value] = tensor

    def temporary(self, name: str, shape: Sequence[int], dtype: str) -> Tensor:
        tensor = Tensor(f"{self.program}/{name}", tuple(shape), dtype, TEMPORARY)
        self.temporaries.append(tensor)
        return tensor

    def whole(self, value: Value | Tensor) -> Slice:
        tensor = self.tensor(value) if isinstance(value, Value) else value
        return Slice(tensor, 0, tensor.bytes)

    def rows(self, tensor: Tensor, first: int, count: int, width: int) -> Slice:
        """`count` rows of `width` elements, as bytes of the tensor."""
        item = ITEM_BYTES[tensor.dtype]
        return Slice(tensor, first * width * item, count * width * item)

    def parameter(self, value: Value, element: str) -> Tensor:
        """The tensor to read a parameter from: the f32 master, or its f16 copy where the kernel's element is `act` in
        mixed precision."""
        if element == ACT and self.precision == "mixed-f16":
            return self.fixed["half/" + value.name]
        return self.tensor(value)

    def gradient(self, name: str) -> Tensor:
        return self.fixed["grad/" + name]

    def bindable_rows(self, tensor: Tensor, *, padded: bool = False) -> list[RowSlice]:
        """A [rows, width] matrix in slices of at most one binding each; slices start at 256-byte boundaries.

        padded: with the rows of zeros that a parameter has up to a multiple of PADDED_ROWS.
        """
        rows, width = tensor.shape[0], prod(tensor.shape[1:])
        if padded:
            rows = padded_rows(rows)
        row_bytes = width * ITEM_BYTES[tensor.dtype]
        per_slice = self.profile.binding_bytes // row_bytes
        if per_slice >= rows:
            return [RowSlice(0, rows, self.rows(tensor, 0, rows, width))]
        per_slice -= per_slice % 128  # 128 rows of any even width end on a 256-byte boundary, f16 included
        if per_slice == 0:
            raise LimitExceeded(
                f"tensor {tensor.name!r}: 128 rows of {row_bytes} bytes exceed the binding limit "
                f"{self.profile.binding_bytes}"
            )
        return [
            RowSlice(first, min(per_slice, rows - first), self.rows(tensor, first, min(per_slice, rows - first), width))
            for first in range(0, rows, per_slice)
        ]

    # Dispatches

    def variants(self, product_class: str, usual: Sequence[str], every: Sequence[str]) -> tuple[str, ...]:
        """The variants to offer for a product class: the remembered winner first if there is one, then the usual ones,
        or every one when tuning."""
        remembered = self.preferred.get(product_class)
        first = (remembered,) if remembered in every else ()
        return tuple(dict.fromkeys((*first, *(every if self.tune else usual))))

    def emit(
        self,
        launch: Launch | Mapping[Launch, str],
        slices: Sequence[Slice | Value | Tensor],
        *,
        product_class: str | None = None,
        what: str = "",
    ) -> None:
        """Append one dispatch; `launch` may be several equivalent ones with the names of their variants. Whole tensors
        may be given for slices."""
        launches = {launch: ""} if isinstance(launch, Launch) else dict(launch)
        bound = tuple(s if isinstance(s, Slice) else self.whole(s) for s in slices)
        kernel = next(iter(launches)).kernel
        if len(bound) != len(kernel.bindings):
            raise ValueError(f"{kernel.name}: {len(bound)} slices for {len(kernel.bindings)} bindings")
        for binding, part in zip(kernel.bindings, bound, strict=True):
            if part.size > self.profile.binding_bytes:
                raise LimitExceeded(
                    f"tensor {part.tensor.name!r} ({part.size} bytes) cannot be bound: the limit is "
                    f"{self.profile.binding_bytes}; "
                    f"use a smaller batch, sequence or model"
                )
            expected = self.storage_dtype(binding.element)
            if part.tensor.dtype != expected:
                raise ValueError(
                    f"{kernel.name}: binding {binding.name} is {expected}, tensor {part.tensor.name} "
                    f"{part.tensor.dtype}"
                )
        if _bound_twice(bound):
            # Writable ranges may not overlap, and another dispatch of the kernel may need its inputs writable (see
            # `memory`): a pipeline of its own keeps them readable here.
            launches = {
                x._replace(kernel=replace(x.kernel, name=f"{x.kernel.name}_twice")): variant
                for x, variant in launches.items()
            }
        scope = self.node.scope if self.node else ""
        name = what or (self.node.op if self.node else kernel.name)
        phase = "" if not self.node else ("backward" if _is_backward(self.node) else "forward")
        self.specs.append(Spec(launches, bound, f"{scope}.{name}" if scope else name, phase, product_class))

    # Fusion

    def plan_fusions(self) -> None:
        """Find products whose result is read once, by an `add`: they are computed there, with the other operand as
        residual."""
        producer = self.graph.producer()
        position = {node: i for i, node in enumerate(self.graph.nodes)}
        outputs = set(self.graph.outputs.values())
        for node in self.graph.nodes:
            if node.op != "add":
                continue
            candidates = [
                v
                for v in node.inputs
                if v in producer
                and producer[v].op in ("linear", "linear_dx")
                and len(self._uses.get(v, ())) == 1
                and v not in outputs
                and node.inputs[0] is not node.inputs[1]
            ]
            if candidates:
                value = max(candidates, key=lambda v: position[producer[v]])
                self.deferred[value] = producer[value]

    def is_deferred(self, node: Node) -> bool:
        return bool(node.outputs) and self.deferred.get(node.outputs[0]) is node


def _is_backward(node: Node) -> bool:
    return node.scope.endswith("backward") or node.accumulates is not None


def element_of(value: Value) -> str:
    """The kernel element of a value: "act" or "f32"."""
    return ACT if value.dtype == ACT else F32


def _bound_twice(slices: Sequence[Slice]) -> bool:
    """Whether two of the slices share bytes, as the inputs of a square do."""
    ranges = sorted((id(s.tensor), s.offset, s.offset + s.size) for s in slices)
    return any(a[0] == b[0] and b[1] < a[2] for a, b in pairwise(ranges))
