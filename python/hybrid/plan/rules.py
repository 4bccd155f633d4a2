"""One lowering rule per primitive: which kernels compute it, on which slices.

To add an op: its signature in `ops`, its VJP in `graph.autodiff`, its NumPy function in `backends.reference.kernels`,
its WGSL with a launcher in `plan.kernels`, and its rule here or, for output heads, losses and sums, in
`plan.rules_losses`.
"""

from __future__ import annotations

from collections.abc import Callable

from hybrid.graph.ir import Node, Value
from hybrid.plan import rules_losses  # noqa: F401 (puts its rules into the table)
from hybrid.plan.kernels import attention, decode, elementwise, embedding, norm, reduce, rope
from hybrid.plan.lowering import Lowering, Slice, element_of
from hybrid.plan.rule_table import RULES, kernel_element, one_dispatch, product, rows_of, rule


def lower_node(low: Lowering, node: Node) -> None:
    """Append the dispatches of one node. KeyError for a primitive without a rule (a test compares the tables)."""
    RULES[node.op](low, node)


# Products


def _linear(low: Lowering, node: Node, residual: Value | None = None, output: Value | None = None) -> None:
    x, weight, *bias = node.inputs
    out = output or node.outputs[0]
    outs, ins = weight.shape
    for part in low.bindable_rows(low.parameter(weight, "act")):
        product(
            low,
            "nt",
            rows_of(x),
            part.rows,
            ins,
            low.whole(x),
            part.slice,
            low.whole(out),
            elements=(element_of(x), "act", element_of(out)),
            bias=low.rows(low.parameter(bias[0], "f32"), part.first, part.rows, 1) if bias else None,
            residual=low.whole(residual) if residual else None,
            ldc=outs,
            c_offset=part.first,
        )


def _linear_dx(low: Lowering, node: Node, residual: Value | None = None, output: Value | None = None) -> None:
    dy, weight = node.inputs
    out = output or node.outputs[0]
    outs, ins = weight.shape
    for part in low.bindable_rows(low.parameter(weight, "act")):
        first = part.first == 0
        product(
            low,
            "nn",
            rows_of(dy),
            ins,
            part.rows,
            low.whole(dy),
            part.slice,
            low.whole(out),
            elements=(element_of(dy), "act", element_of(out)),
            residual=low.whole(residual) if residual and first else None,
            lda=outs,
            a_offset=part.first,
            accumulate=not first,
        )


@rule("linear_dw")
def _linear_dw(low: Lowering, node: Node) -> None:
    x, dy = node.inputs
    assert node.accumulates is not None
    for part in low.bindable_rows(low.gradient(node.accumulates)):
        product(
            low,
            "tn",
            part.rows,
            x.shape[-1],
            rows_of(x),
            low.whole(dy),
            low.whole(x),
            part.slice,
            elements=(element_of(dy), element_of(x), "f32"),
            lda=dy.shape[-1],
            a_offset=part.first,
            accumulate=True,
        )


RESIDUAL_RULES: dict[str, Callable[[Lowering, Node, Value | None, Value | None], None]] = {
    "linear": _linear,
    "linear_dx": _linear_dx,
}


@rule("linear", "linear_dx")
def _plain_product(low: Lowering, node: Node) -> None:
    RESIDUAL_RULES[node.op](low, node, None, None)


@rule("add")
def _add(low: Lowering, node: Node) -> None:
    for value, other in (node.inputs, node.inputs[::-1]):
        deferred = low.deferred.get(value)
        if deferred is not None:
            RESIDUAL_RULES[deferred.op](low, deferred, other, node.outputs[0])
            return
    _binary(low, node)


# Elementwise


@rule("mul")
def _binary(low: Lowering, node: Node) -> None:
    (out,) = node.outputs
    launcher = elementwise.add if node.op == "add" else elementwise.mul
    launch = launcher(out.type.elements, element=kernel_element(low, out), precision=low.precision)
    one_dispatch(low, node, launch)


@rule("gelu", "silu", "relu2", "gelu_grad", "silu_grad", "relu2_grad", "swiglu", "swiglu_grad")
def _pointwise(low: Lowering, node: Node) -> None:
    launcher = getattr(elementwise, node.op)
    one_dispatch(low, node, launcher(node.outputs[0].type.elements, precision=low.precision))


@rule("scale")
def _scale(low: Lowering, node: Node) -> None:
    value = node.outputs[0]
    launch = elementwise.scale(
        value.type.elements, node.attrs["factor"], element=element_of(value), precision=low.precision
    )
    one_dispatch(low, node, launch)


@rule("cast")
def _cast(low: Lowering, node: Node) -> None:
    if low.storage_dtype(node.inputs[0].dtype) == low.storage_dtype(node.outputs[0].dtype):
        low.alias(node.outputs[0], node.inputs[0])
        return
    launch = elementwise.cast(node.outputs[0].type.elements, to=element_of(node.outputs[0]), precision=low.precision)
    one_dispatch(low, node, launch)


@rule("add_noise")
def _add_noise(low: Lowering, node: Node) -> None:
    one_dispatch(low, node, elementwise.add_noise(node.outputs[0].type.elements, precision=low.precision))


@rule("add_noise_grad")
def _add_noise_grad(low: Lowering, node: Node) -> None:
    (result,) = node.outputs
    launch = elementwise.add_noise_grad(
        result.type.elements, level=node.attrs["level"], to=element_of(result), precision=low.precision
    )
    one_dispatch(low, node, launch)


@rule("dropout")
def _dropout(low: Lowering, node: Node) -> None:
    x = node.inputs[0]
    samples = x.shape[0]
    launch = elementwise.dropout(
        samples, x.type.elements // samples, site=node.attrs["site"], rate=node.attrs["rate"], precision=low.precision
    )
    one_dispatch(low, node, launch)


@rule("reshape")
def _reshape(low: Lowering, node: Node) -> None:
    low.alias(node.outputs[0], node.inputs[0])


@rule("broadcast")
def _broadcast(low: Lowering, node: Node) -> None:
    if all(user.op in ("cross_entropy_head_grad", "topk_kl_grad") for user in low.users(node.outputs[0])):
        return  # the loss kernel reads the one value itself
    one_dispatch(low, node, elementwise.broadcast(node.outputs[0].type.elements, precision=low.precision))


@rule("split")
def _split(low: Lowering, node: Node) -> None:
    (x,) = node.inputs
    first = 0
    for part in node.outputs:
        launch = elementwise.copy_columns(
            rows_of(x),
            part.shape[-1],
            source_width=x.shape[-1],
            source_first=first,
            target_width=part.shape[-1],
            target_first=0,
            precision=low.precision,
            element=kernel_element(low, x),
        )
        low.emit(launch, [x, part])
        first += part.shape[-1]


@rule("concat")
def _concat(low: Lowering, node: Node) -> None:
    (whole,) = node.outputs
    first = 0
    for part in node.inputs:
        launch = elementwise.copy_columns(
            rows_of(part),
            part.shape[-1],
            source_width=part.shape[-1],
            source_first=0,
            target_width=whole.shape[-1],
            target_first=first,
            precision=low.precision,
            element=kernel_element(low, whole),
        )
        low.emit(launch, [part, whole])
        first += part.shape[-1]


@rule("gather_rows")
def _gather_rows(low: Lowering, node: Node) -> None:
    x, index = node.inputs
    one_dispatch(
        low, node, embedding.gather_rows(index.type.elements, rows_of(x), x.shape[-1], precision=low.precision)
    )


@rule("scatter_rows")
def _scatter_rows(low: Lowering, node: Node) -> None:
    dy, index = node.inputs
    launch = embedding.scatter_rows(index.type.elements, node.attrs["rows"], dy.shape[-1], precision=low.precision)
    one_dispatch(low, node, launch)


# Embedding


@rule("embedding")
def _embedding(low: Lowering, node: Node) -> None:
    ids, table = node.inputs
    _look_up(low, low.whole(ids), table, node.outputs[0])


@rule("hashed_ngram_embedding")
def _hashed_ngram_embedding(low: Lowering, node: Node) -> None:
    ids, context, table = node.inputs
    (out,) = node.outputs
    buckets = low.temporary(f"v{out.index}.buckets", ids.shape, "u32")
    launch = embedding.ngram_buckets(
        ids.type.elements,
        ids.shape[1],
        order=node.attrs["order"],
        buckets=table.shape[0],
        seed=node.attrs["seed"],
        history=context.shape[1] if node.attrs["decoding"] else 0,
        precision=low.precision,
    )
    low.emit(launch, [ids, context, buckets], what="ngram_buckets")
    _look_up(low, low.whole(buckets), table, out)


def _look_up(low: Lowering, ids: Slice, table: Value, out: Value) -> None:
    positions, width = rows_of(out), table.shape[1]
    whole = embedding.embedding(positions, width, row_begin=0, row_count=table.shape[0], precision=low.precision)
    for part in low.bindable_rows(low.parameter(table, whole.kernel.bindings[1].element)):
        launch = embedding.embedding(
            positions, width, row_begin=part.first, row_count=part.rows, precision=low.precision
        )
        low.emit(launch, [ids, part.slice, low.whole(out)])


@rule("embedding_grad")
def _embedding_grad(low: Lowering, node: Node) -> None:
    dy, *index = node.inputs
    assert node.accumulates is not None
    for part in low.bindable_rows(low.gradient(node.accumulates)):
        launch = embedding.embedding_grad(
            rows_of(dy), dy.shape[-1], row_begin=part.first, row_count=part.rows, precision=low.precision
        )
        low.emit(launch, [low.whole(dy), *(low.whole(i) for i in index), part.slice])


# Norms


@rule("rms_norm", "layer_norm")
def _norm(low: Lowering, node: Node) -> None:
    x, *weights = node.inputs
    rows, width, eps = rows_of(x), x.shape[-1], node.attrs["eps"]
    if node.op == "rms_norm":
        launch = norm.rms_norm(rows, width, eps=eps, precision=low.precision)
    else:
        launch = norm.layer_norm(rows, width, eps=eps, bias=len(weights) == 2, precision=low.precision)
    low.emit(launch, [x, *(low.parameter(w, "f32") for w in weights), *node.outputs])


@rule("rms_norm_dx", "layer_norm_dx")
def _norm_dx(low: Lowering, node: Node) -> None:
    x, weight, *rest = node.inputs
    launcher = norm.rms_norm_dx if node.op == "rms_norm_dx" else norm.layer_norm_dx
    launch = launcher(rows_of(x), x.shape[-1], precision=low.precision)
    low.emit(launch, [x, low.parameter(weight, "f32"), *rest, *node.outputs])


@rule("rms_norm_dw", "layer_norm_dw", "column_sum")
def _column_gradient(low: Lowering, node: Node) -> None:
    x = node.inputs[0]
    rows, width = rows_of(x), x.shape[-1]
    assert node.accumulates is not None
    launcher = {"rms_norm_dw": norm.rms_norm_dw, "layer_norm_dw": norm.layer_norm_dw, "column_sum": reduce.column_sum}[
        node.op
    ]
    partials = low.temporary(f"{node.accumulates}.partials{len(low.specs)}", (reduce.blocks_of(rows), width), "f32")
    low.emit(launcher(rows, width, precision=low.precision), [*node.inputs, partials])
    low.emit(
        reduce.column_reduce(rows, width, precision=low.precision),
        [partials, low.gradient(node.accumulates)],
        what="column_reduce",
    )


# Attention


@rule("rope")
def _rope(low: Lowering, node: Node) -> None:
    x = node.inputs[0]
    batch, time, heads, width = x.shape
    launch = rope.rope(batch * time, heads, width, inverse=node.attrs["inverse"], precision=low.precision)
    one_dispatch(low, node, launch)


@rule("attention")
def _attention(low: Lowering, node: Node) -> None:
    one_dispatch(low, node, attention.attention(*_attention_shape(node), **node.attrs, precision=low.precision))


@rule("attention_delta")
def _attention_delta(low: Lowering, node: Node) -> None:
    """The kernel packs delta with lse and segment into one buffer for the two kernels that follow."""
    o, do = node.inputs
    (delta,) = node.outputs
    lse, segment_ids = next((n.inputs[4], n.inputs[6]) for n in low.graph.nodes if delta in n.inputs)
    statistics = low.temporary(f"v{delta.index}", (*delta.shape, attention.STATISTICS_WORDS), "u32")
    low.assign(delta, statistics)
    low.emit(attention.attention_delta(*o.shape, precision=low.precision), [o, do, lse, segment_ids, statistics])


@rule("attention_dq", "attention_dkv")
def _attention_backward(low: Lowering, node: Node) -> None:
    q, k, v, do, _, delta, _ = node.inputs
    launcher = attention.attention_dq if node.op == "attention_dq" else attention.attention_dkv
    low.emit(
        launcher(*_attention_shape(node), **node.attrs, precision=low.precision), [q, k, v, do, delta, *node.outputs]
    )


def _attention_shape(node: Node) -> tuple[int, int, int, int, int]:
    """B, T, H, K, D."""
    q, k = node.inputs[0].shape, node.inputs[1].shape
    return q[0], q[1], q[2], k[2], q[3]


@rule("cache_write")
def _cache_write(low: Lowering, node: Node) -> None:
    x, cache, start = node.inputs
    tokens = x.shape[1]
    launch = decode.cache_write(tokens, x.type.elements // tokens, cache_length=cache.shape[0], precision=low.precision)
    low.emit(launch, [x, start, cache])


@rule("attention_cached")
def _attention_cached(low: Lowering, node: Node) -> None:
    q, cache, *_ = node.inputs
    _, tokens, heads, width = q.shape
    launch = decode.attention_cached(
        tokens,
        heads,
        width,
        kv_heads=cache.shape[1],
        cache_length=cache.shape[0],
        **node.attrs,
        precision=low.precision,
    )
    one_dispatch(low, node, launch)
