"""Reverse mode over a node list: one VJP rule per op, found in a table.

`backward` walks the forward nodes from last to first and appends the nodes that compute gradients. The gradient of a
parameter is not a value: a node with `accumulates` adds it to that parameter's f32 buffer, so layers that run twice,
tied tables and microbatches all sum there. Where a value is used more than once its gradients are joined with `add`,
as soon as they exist, so that liveness stays short.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from hybrid.graph.ir import ACT, F32, U32, Graph, Node, Type, Value
from hybrid.graph.tracer import Region
from hybrid.ops import OpError, ngram_prefix

Gradients = list[Value | None]  # one for each input of a node; None where there is none


class Emitter:
    """Appends backward nodes to a graph, all in one scope."""

    def __init__(self, graph: Graph, scope: str) -> None:
        self.graph = graph
        self.scope = scope

    def many(self, op: str, inputs: Sequence[Value], types: Sequence[Type], **attrs: Any) -> tuple[Value, ...]:
        outputs = tuple(self.graph.new_value(t.shape, t.dtype) for t in types)
        self.graph.nodes.append(Node(op, tuple(inputs), outputs, attrs, self.scope))
        return outputs

    def one(self, op: str, inputs: Sequence[Value], type: Type, **attrs: Any) -> Value:
        return self.many(op, inputs, [type], **attrs)[0]

    def accumulate(self, op: str, inputs: Sequence[Value], parameter: Value) -> None:
        """A node that adds its result to the gradient buffer of `parameter`."""
        self.graph.nodes.append(Node(op, tuple(inputs), (), {}, self.scope, accumulates=parameter.name))

    def input(self, name: str, shape: tuple[int, ...]) -> Value:
        """A u32 program input that only the backward pass needs."""
        if name not in self.graph.inputs:
            self.graph.inputs[name] = self.graph.new_value(shape, U32, "input", name)
        return self.graph.inputs[name]

    def row_index(self, prefix: str, ids: Value) -> list[Value]:
        """The inputs that list, for each distinct id, its positions; see `backends.row_index`."""
        rows = ids.type.elements
        sizes = {"row_order": rows, "row_starts": rows + 1, "row_ids": rows, "row_count": 1}
        return [self.input(prefix + name, (size,)) for name, size in sizes.items()]

    def reshape(self, x: Value, shape: tuple[int, ...]) -> Value:
        return x if x.shape == shape else self.one("reshape", [x], Type(shape, x.dtype), shape=shape)

    def scale(self, x: Value, factor: float) -> Value:
        return self.one("scale", [x], x.type, factor=factor)

    def broadcast(self, x: Value, like: Type) -> Value:
        """f32 [1] repeated to the shape and element type of `like`."""
        wide = self.one("broadcast", [x], Type(like.shape, F32), shape=like.shape)
        return wide if like.dtype == F32 else self.one("cast", [wide], like, dtype=like.dtype)


# A rule gets the node (its values replaced by recomputed ones where there are any), the gradients of its outputs (at
# least one is there) and, for each input, whether its gradient is wanted.
Rule = Callable[[Emitter, Node, Gradients, tuple[bool, ...]], Gradients]
RULES: dict[str, Rule] = {}


def rule(*ops: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for op in ops:
            RULES[op] = function
        return function

    return register


def only(node: Node, dys: Gradients) -> Value:
    """The gradient of the first output, for ops whose other outputs are statistics for the backward pass."""
    dy = dys[0]
    if dy is None or any(other is not None for other in dys[1:]):
        raise OpError(
            f"{node.op} in {node.scope!r}: only its first output can be differentiated; the others serve backward nodes"
        )
    return dy


@rule("embedding")
def _embedding(emit: Emitter, node: Node, dys: Gradients, needs: tuple[bool, ...]) -> Gradients:
    ids, table = node.inputs
    prefixes = {"ids": "", "positions": "pos_"}
    if ids.kind != "input" or ids.name not in prefixes:
        raise OpError(
            f"embedding in {node.scope!r}: the gradient of {table.name!r} needs a row index made on the host, which "
            f"exists for the inputs {' and '.join(prefixes)}, not for {ids.name or 'a computed value'!r}"
        )
    emit.accumulate("embedding_grad", [only(node, dys), *emit.row_index(prefixes[ids.name], ids)], table)
    return [None, None]


@rule("hashed_ngram_embedding")
def _hashed_ngram_embedding(emit: Emitter, node: Node, dys: Gradients, needs: tuple[bool, ...]) -> Gradients:
    ids, segment_ids, table = node.inputs
    if (ids.kind, ids.name, segment_ids.kind, segment_ids.name) != ("input", "ids", "input", "segment_ids"):
        given = " and ".join(repr(value.name or "a computed value") for value in (ids, segment_ids))
        raise OpError(
            f"hashed_ngram_embedding in {node.scope!r}: the gradient of {table.name!r} needs a row index made on the "
            f"host, which exists for the inputs ids and segment_ids, not for {given}"
        )
    prefix = ngram_prefix(node.attrs["order"], table.shape[0], node.attrs["seed"])
    emit.accumulate("embedding_grad", [only(node, dys), *emit.row_index(prefix, ids)], table)
    return [None, None, None]


@rule("linear")
def _linear(emit: Emitter, node: Node, dys: Gradients, needs: tuple[bool, ...]) -> Gradients:
    x, weight, *bias = node.inputs
    dy = only(node, dys)
    if needs[1]:
        emit.accumulate("linear_dw", [x, dy], weight)
    if bias and needs[2]:
        emit.accumulate("column_sum", [emit.reshape(dy, (dy.type.elements // dy.shape[-1], dy.shape[-1]))], bias[0])
    dx = emit.one("linear_dx", [dy, weight], x.type) if needs[0] else None
    return [dx, None, *[None for _ in bias]]


@rule("rms_norm")
def _rms_norm(emit: Emitter, node: Node, dys: Gradients, needs: tuple[bool, ...]) -> Gradients:
    x, weight = node.inputs
    rstd, dy = node.outputs[1], only(node, dys)
    if needs[1]:
        emit.accumulate("rms_norm_dw", [x, rstd, dy], weight)
    return [emit.one("rms_norm_dx", [x, weight, rstd, dy], x.type) if needs[0] else None, None]


@rule("layer_norm")
def _layer_norm(emit: Emitter, node: Node, dys: Gradients, needs: tuple[bool, ...]) -> Gradients:
    x, weight, *bias = node.inputs
    _, mean, rstd = node.outputs
    dy = only(node, dys)
    if needs[1]:
        emit.accumulate("layer_norm_dw", [x, mean, rstd, dy], weight)
    if bias and needs[2]:
        emit.accumulate("column_sum", [emit.reshape(dy, (dy.type.elements // dy.shape[-1], dy.shape[-1]))], bias[0])
    dx = emit.one("layer_norm_dx", [x, weight, mean, rstd, dy], x.type) if needs[0] else None
    return [dx, None, *[None for _ in bias]]


@rule("rope")
def _rope(emit: Emitter, node: Node, dys: Gradients, needs: tuple[bool, ...]) -> Gradients:
    # A rotation is orthogonal: its transpose turns back.
    x, positions, table = node.inputs
    dx = emit.one("rope", [only(node, dys), positions, table], x.type, inverse=not node.attrs["inverse"])
    return [dx, None, None]


@rule("attention")
def _attention(emit: Emitter, node: Node, dys: Gradients, needs: tuple[bool, ...]) -> Gradients:
    q, k, v, segment_ids = node.inputs
    o, lse = node.outputs
    do = only(node, dys)
    delta = emit.one("attention_delta", [o, do], lse.type)
    inputs = [q, k, v, do, lse, delta, segment_ids]
    dq = emit.one("attention_dq", inputs, q.type, **node.attrs) if needs[0] else None
    dk, dv = (
        emit.many("attention_dkv", inputs, [k.type, v.type], **node.attrs) if needs[1] or needs[2] else (None, None)
    )
    return [dq, dk, dv, None]


@rule("add")
def _add(emit: Emitter, node: Node, dys: Gradients, needs: tuple[bool, ...]) -> Gradients:
    return [only(node, dys)] * 2


@rule("mul")
def _mul(emit: Emitter, node: Node, dys: Gradients, needs: tuple[bool, ...]) -> Gradients:
    a, b = node.inputs
    dy = only(node, dys)
    return [
        emit.one("mul", [dy, other], dy.type) if needed else None for other, needed in zip((b, a), needs, strict=True)
    ]


@rule("scale")
def _scale(emit: Emitter, node: Node, dys: Gradients, needs: tuple[bool, ...]) -> Gradients:
    return [emit.scale(only(node, dys), node.attrs["factor"])]


@rule("gelu", "silu", "relu2")
def _activation(emit: Emitter, node: Node, dys: Gradients, needs: tuple[bool, ...]) -> Gradients:
    (x,) = node.inputs
    return [emit.one(f"{node.op}_grad", [x, only(node, dys)], x.type)]


@rule("swiglu")
def _swiglu(emit: Emitter, node: Node, dys: Gradients, needs: tuple[bool, ...]) -> Gradients:
    gate, up = node.inputs
    return list(emit.many("swiglu_grad", [gate, up, only(node, dys)], [gate.type, up.type]))


@rule("dropout")
def _dropout(emit: Emitter, node: Node, dys: Gradients, needs: tuple[bool, ...]) -> Gradients:
    # The mask is a function of site, step and sample: drawing it again costs less than keeping it.
    x, *keys = node.inputs
    return [emit.one("dropout", [only(node, dys), *keys], x.type, **node.attrs), None, None, None]


@rule("add_noise")
def _add_noise(emit: Emitter, node: Node, dys: Gradients, needs: tuple[bool, ...]) -> Gradients:
    x, noise, levels = node.inputs
    dy = only(node, dys)
    if needs[2]:
        raise OpError(f"add_noise in {node.scope!r} cannot pass a gradient to its levels")
    parts = [(x, 0), (noise, 1)]
    return [
        *(emit.one("add_noise_grad", [dy, levels], value.type, level=i) if needs[i] else None for value, i in parts),
        None,
    ]


@rule("cast")
def _cast(emit: Emitter, node: Node, dys: Gradients, needs: tuple[bool, ...]) -> Gradients:
    (x,) = node.inputs
    return [emit.one("cast", [only(node, dys)], x.type, dtype=x.dtype)]


@rule("reshape")
def _reshape(emit: Emitter, node: Node, dys: Gradients, needs: tuple[bool, ...]) -> Gradients:
    return [emit.reshape(only(node, dys), node.inputs[0].shape)]


@rule("split")
def _split(emit: Emitter, node: Node, dys: Gradients, needs: tuple[bool, ...]) -> Gradients:
    (x,) = node.inputs
    pieces = [emit.scale(y, 0.0) if dy is None else dy for y, dy in zip(node.outputs, dys, strict=True)]
    return [emit.one("concat", pieces, x.type)]


@rule("concat")
def _concat(emit: Emitter, node: Node, dys: Gradients, needs: tuple[bool, ...]) -> Gradients:
    sizes = tuple(x.shape[-1] for x in node.inputs)
    return list(emit.many("split", [only(node, dys)], [x.type for x in node.inputs], sizes=sizes))


@rule("gather_rows")
def _gather_rows(emit: Emitter, node: Node, dys: Gradients, needs: tuple[bool, ...]) -> Gradients:
    x, index = node.inputs
    return [emit.one("scatter_rows", [only(node, dys), index], x.type, rows=x.shape[0]), None]


@rule("sum")
def _sum(emit: Emitter, node: Node, dys: Gradients, needs: tuple[bool, ...]) -> Gradients:
    return [emit.broadcast(only(node, dys), node.inputs[0].type)]


@rule("mean")
def _mean(emit: Emitter, node: Node, dys: Gradients, needs: tuple[bool, ...]) -> Gradients:
    (x,) = node.inputs
    return [emit.broadcast(emit.scale(only(node, dys), 1.0 / x.type.elements), x.type)]


@rule("mse")
def _mse(emit: Emitter, node: Node, dys: Gradients, needs: tuple[bool, ...]) -> Gradients:
    a, b = node.inputs
    difference = emit.one("add", [a, emit.scale(b, -1.0)], a.type)
    dy = emit.broadcast(emit.scale(only(node, dys), 2.0 / a.type.elements), a.type)
    da = emit.one("mul", [difference, dy], a.type)
    return [da, emit.scale(da, -1.0) if needs[1] else None]


@rule("log_softmax")
def _log_softmax(emit: Emitter, node: Node, dys: Gradients, needs: tuple[bool, ...]) -> Gradients:
    return [emit.one("log_softmax_grad", [node.outputs[0], only(node, dys)], node.inputs[0].type)]


@rule("cross_entropy_head")
def _cross_entropy_head(emit: Emitter, node: Node, dys: Gradients, needs: tuple[bool, ...]) -> Gradients:
    x, weight, targets, z_loss = node.inputs
    lse, drows = node.outputs[2], only(node, dys)
    inputs = (x, weight, targets, z_loss, lse, drows)
    dx = emit.graph.new_value(x.shape, ACT)
    accumulates = weight.name if needs[1] else None
    emit.graph.nodes.append(Node("cross_entropy_head_grad", inputs, (dx,), {}, emit.scope, accumulates))
    return [dx, None, None, None]


@rule("topk_kl")
def _topk_kl(emit: Emitter, node: Node, dys: Gradients, needs: tuple[bool, ...]) -> Gradients:
    x, weight, *teacher = node.inputs
    # The outputs stand among the inputs because a lowering computes loss and gradient from the same logits.
    inputs = (x, weight, *teacher, node.outputs[0], only(node, dys))
    dx = emit.graph.new_value(x.shape, ACT)
    accumulates = weight.name if needs[1] else None
    emit.graph.nodes.append(Node("topk_kl_grad", inputs, (dx,), dict(node.attrs), emit.scope, accumulates))
    return [dx, None, None, None, None]


@rule("triplet_hinge")
def _triplet_hinge(emit: Emitter, node: Node, dys: Gradients, needs: tuple[bool, ...]) -> Gradients:
    # With K columns: da = 2/K (n - p), dp = 2/K (p - a), dn = 2/K (a - n), where the hinge is above 0.
    a, p, n, mask, *columns = node.inputs
    rest = [mask, node.outputs[0], only(node, dys), *columns]
    pairs = ((n, p), (p, a), (a, n))
    gradients: Gradients = [
        emit.one("triplet_hinge_grad", [u, v, *rest], a.type) if needed else None
        for (u, v), needed in zip(pairs, needs[:3], strict=True)
    ]
    return [*gradients, None, *[None for _ in columns]]


# Ops that pass a gradient to a parameter only through a node with `accumulates`.
TAKES_PARAMETERS = frozenset(
    {"embedding", "hashed_ngram_embedding", "linear", "rms_norm", "layer_norm", "cross_entropy_head", "topk_kl"}
)


def backward(
    graph: Graph,
    seeds: Mapping[Value, Value],
    *,
    wrt: Iterable[Value] = (),
    parameters: Collection[str] | None = None,
    recompute: Sequence[Region] = (),
) -> dict[Value, Value]:
    """Append the nodes that push gradients back from `seeds` (value -> its gradient, of the same type).

    parameters: names whose gradients are wanted; None means all. wrt: other values whose gradients are wanted; they
    are returned, by value (one that no seed depends on is absent). recompute: regions whose forward nodes are run
    again just before their backward nodes, so that nothing inside them outlives the forward pass; the numbers are the
    same, bit for bit.

    Errors: OpError for an op without a rule on the path of a gradient, and for a seed of another type than its value.
    """
    for value, seed in seeds.items():
        if value.type != seed.type:
            raise OpError(f"backward: a seed of type {seed.type} does not fit its value of type {value.type}")
    wanted = list(wrt)
    trainable = {p for name, p in graph.parameters.items() if parameters is None or name in parameters}
    forward = list(graph.nodes)
    active: set[Value] = trainable | set(wanted)
    for node in forward:
        if not active.isdisjoint(node.inputs):
            active.update(node.outputs)

    gradients: dict[Value, Value] = dict(seeds)
    regions = {index: region for region in recompute for index in range(region.first, region.last)}
    current: Region | None = None
    replaced: dict[Value, Value] = {}  # values of the current region -> recomputed ones
    start = end = 0  # where the recomputed nodes of the current region lie
    for index in range(len(forward) - 1, -1, -1):
        node = forward[index]
        region = regions.get(index)
        if region is not current:
            _drop_unused(graph, start, end)
            start = len(graph.nodes)
            replaced = _run_again(graph, forward[region.first : region.last]) if region else {}
            end = len(graph.nodes)
            current = region
        dys = [gradients.get(output) for output in node.outputs]
        if all(dy is None for dy in dys) or active.isdisjoint(node.inputs):
            continue
        scope = f"{node.scope}.backward" if node.scope else "backward"
        emit = Emitter(graph, scope)
        now = Node(
            node.op,
            tuple(replaced.get(value, value) for value in node.inputs),
            tuple(replaced.get(value, value) for value in node.outputs),
            node.attrs,
            node.scope,
        )
        needs = tuple(value in active for value in node.inputs)
        for value, gradient in zip(node.inputs, _rule_for(node, needs)(emit, now, dys, needs), strict=True):
            if gradient is None or value not in active:
                continue
            joined = gradients.get(value)
            gradients[value] = emit.one("add", [joined, gradient], value.type) if joined else gradient
    _drop_unused(graph, start, end)
    return {value: gradients[value] for value in wanted if value in gradients}


def _rule_for(node: Node, needs: tuple[bool, ...]) -> Rule:
    if node.op not in RULES:
        raise OpError(
            f"{node.op} in {node.scope!r} has no derivative: keep it off the path from parameters to the loss"
        )
    if node.op not in TAKES_PARAMETERS:
        for value, needed in zip(node.inputs, needs, strict=True):
            if needed and value.kind == "parameter":
                raise OpError(f"{node.op} in {node.scope!r} cannot pass a gradient to parameter {value.name!r}")
    return RULES[node.op]


def _run_again(graph: Graph, nodes: Sequence[Node]) -> dict[Value, Value]:
    """Append copies of `nodes` with outputs of their own; values from outside stay. Returns old value -> new value."""
    replaced: dict[Value, Value] = {}
    for node in nodes:
        inputs = tuple(replaced.get(value, value) for value in node.inputs)
        outputs = tuple(graph.new_value(value.shape, value.dtype) for value in node.outputs)
        scope = f"{node.scope}.recompute.backward"
        graph.nodes.append(Node(node.op, inputs, outputs, dict(node.attrs), scope, node.accumulates))
        replaced.update(zip(node.outputs, outputs, strict=True))
    return replaced


def _drop_unused(graph: Graph, start: int, end: int) -> None:
    """Remove the nodes `start <= index < end` that nothing after them reads, such as the last map of a layer."""
    if start == end:
        return
    read = {value for node in graph.nodes[end:] for value in node.inputs}
    kept = []
    for node in reversed(graph.nodes[start:end]):
        if not read.isdisjoint(node.outputs):
            read.update(node.inputs)
            kept.append(node)
    graph.nodes[start:end] = reversed(kept)
