"""One lowering rule per primitive: which kernels compute it, on which slices.

To add an op: its signature in `ops`, its VJP in `graph.autodiff`, its NumPy function in `backends.reference.kernels`,
its WGSL with a launcher in `plan.kernels`, and its rule here.
"""

from __future__ import annotations

from collections.abc import Callable

from hybrid.graph.ir import Node, Value
from hybrid.plan.kernels import attention, decode, elementwise, embedding, loss, matmul, norm, reduce, rope
from hybrid.plan.kernels.base import Launch
from hybrid.plan.lowering import Lowering, Slice, Tensor, element_of

Rule = Callable[[Lowering, Node], None]
RULES: dict[str, Rule] = {}

# Logits exist for one chunk of rows at a time: as many rows (a multiple of 128) as fit this many bytes.
LOGITS_BYTES = 16 * 1024 * 1024
CHUNK_ROWS = 128


def rule(*ops: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for op in ops:
            RULES[op] = function
        return function

    return register


def lower_node(low: Lowering, node: Node) -> None:
    """Append the dispatches of one node. KeyError for a primitive without a rule (a test compares the tables)."""
    RULES[node.op](low, node)


def rows_of(value: Value) -> int:
    """N: everything but the last axis."""
    return value.type.elements // value.shape[-1]


# Products


def product(
    low: Lowering,
    form: str,
    m: int,
    n: int,
    k: int,
    a: Slice,
    b: Slice,
    c: Slice,
    *,
    elements: tuple[str, str, str],
    bias: Slice | None = None,
    residual: Slice | None = None,
    accumulate: bool = False,
    lda: int | None = None,
    ldc: int | None = None,
    a_offset: int = 0,
    c_offset: int = 0,
) -> None:
    """C[m, n] from A and B in one dispatch, with the variants that are worth timing."""
    if low.precision == "f32":  # act is f32 there: one kernel serves all mixes of elements
        elements = ("act", "act", "act")
    of_a, of_b, of_c = elements
    product_class = matmul.product_class(form, m, n, k, a=of_a, b=of_b, c=of_c)
    launches: dict[Launch, str] = {}  # awkward shapes have one launch whatever the variant
    size, cpu = low.profile.subgroup_size, low.profile.cpu
    usual = matmul.variants(form, m, n, k, subgroup_size=size, cpu=cpu)
    every = matmul.tune_variants(form, m, n, k, subgroup_size=size, cpu=cpu)
    for variant in low.variants(product_class, usual, every):
        launch = matmul.product(
            form,
            m,
            n,
            k,
            a=of_a,
            b=of_b,
            c=of_c,
            bias=bias is not None,
            residual=residual is not None,
            accumulate=accumulate,
            lda=lda,
            ldc=ldc,
            a_offset=a_offset,
            c_offset=c_offset,
            variant=variant,
            precision=low.precision,
        )
        launches.setdefault(launch, variant)
    slices = [a, b, *([bias] if bias else []), *([residual] if residual else []), c]
    low.emit(launches, slices, product_class=product_class)


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
    low.emit(elementwise.add(node.outputs[0].type.elements, precision=low.precision), [*node.inputs, node.outputs[0]])


# Elementwise


def _elementwise(low: Lowering, node: Node, launch: Launch) -> None:
    low.emit(launch, [*node.inputs, *node.outputs])


@rule("mul", "gelu", "silu", "relu2", "gelu_grad", "silu_grad", "relu2_grad", "swiglu", "swiglu_grad")
def _pointwise(low: Lowering, node: Node) -> None:
    launcher = getattr(elementwise, node.op)
    _elementwise(low, node, launcher(node.outputs[0].type.elements, precision=low.precision))


@rule("scale")
def _scale(low: Lowering, node: Node) -> None:
    value = node.outputs[0]
    launch = elementwise.scale(
        value.type.elements, node.attrs["factor"], element=element_of(value), precision=low.precision
    )
    _elementwise(low, node, launch)


@rule("cast")
def _cast(low: Lowering, node: Node) -> None:
    if low.storage_dtype(node.inputs[0].dtype) == low.storage_dtype(node.outputs[0].dtype):
        low.alias(node.outputs[0], node.inputs[0])
        return
    launch = elementwise.cast(node.outputs[0].type.elements, to=element_of(node.outputs[0]), precision=low.precision)
    _elementwise(low, node, launch)


@rule("dropout")
def _dropout(low: Lowering, node: Node) -> None:
    x = node.inputs[0]
    samples = x.shape[0]
    launch = elementwise.dropout(
        samples, x.type.elements // samples, site=node.attrs["site"], rate=node.attrs["rate"], precision=low.precision
    )
    _elementwise(low, node, launch)


@rule("reshape")
def _reshape(low: Lowering, node: Node) -> None:
    low.alias(node.outputs[0], node.inputs[0])


@rule("broadcast")
def _broadcast(low: Lowering, node: Node) -> None:
    if all(user.op == "cross_entropy_head_grad" for user in low.users(node.outputs[0])):
        return  # the loss kernel reads the one value itself
    _elementwise(low, node, elementwise.broadcast(node.outputs[0].type.elements, precision=low.precision))


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
        )
        low.emit(launch, [part, whole])
        first += part.shape[-1]


@rule("gather_rows")
def _gather_rows(low: Lowering, node: Node) -> None:
    x, index = node.inputs
    _elementwise(
        low, node, embedding.gather_rows(index.type.elements, rows_of(x), x.shape[-1], precision=low.precision)
    )


@rule("scatter_rows")
def _scatter_rows(low: Lowering, node: Node) -> None:
    dy, index = node.inputs
    launch = embedding.scatter_rows(index.type.elements, node.attrs["rows"], dy.shape[-1], precision=low.precision)
    _elementwise(low, node, launch)


# Embedding


@rule("embedding")
def _embedding(low: Lowering, node: Node) -> None:
    ids, table = node.inputs
    (out,) = node.outputs
    launch = embedding.embedding(
        ids.type.elements, table.shape[1], row_begin=0, row_count=table.shape[0], precision=low.precision
    )
    element = launch.kernel.bindings[1].element
    for part in low.bindable_rows(low.parameter(table, element)):
        launch = embedding.embedding(
            ids.type.elements, table.shape[1], row_begin=part.first, row_count=part.rows, precision=low.precision
        )
        low.emit(launch, [low.whole(ids), part.slice, low.whole(out)])


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
    _elementwise(low, node, launch)


@rule("attention")
def _attention(low: Lowering, node: Node) -> None:
    _elementwise(low, node, attention.attention(*_attention_shape(node), **node.attrs, precision=low.precision))


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
    _elementwise(low, node, launch)


# Head and losses


@rule("cross_entropy_head")
def _cross_entropy_head(low: Lowering, node: Node) -> None:
    """Alone in an evaluation; in training the gradient node computes the losses from the same logits."""
    if not any(
        other.op == "cross_entropy_head_grad" and other.inputs[4] is node.outputs[2] for other in low.graph.nodes
    ):
        _head(low, node, None)


@rule("cross_entropy_head_grad")
def _cross_entropy_head_grad(low: Lowering, node: Node) -> None:
    forward = low.graph.producer()[node.inputs[4]]
    _head(low, forward, node)


def _head(low: Lowering, forward: Node, backward: Node | None) -> None:
    x, weight, targets, z_loss = forward.inputs
    rows, width = rows_of(x), x.shape[-1]
    vocabulary = weight.shape[0]
    chunk = _chunk_rows(rows, vocabulary, low)
    logits = low.temporary(f"logits{len(low.specs)}", (chunk, vocabulary), "f32")
    weights = low.bindable_rows(low.parameter(weight, "act"))
    element = element_of(x)
    upstream = low.graph.producer().get(backward.inputs[5]) if backward else None
    scalar = upstream.inputs[0] if upstream and upstream.op == "broadcast" else None
    xs, dxs = low.tensor(x), low.tensor(backward.outputs[0]) if backward else None
    for first in range(0, rows, chunk):
        count = min(chunk, rows - first)
        x_rows = low.rows(xs, first, count, width)
        whole_logits = Slice(logits, 0, count * vocabulary * 4)
        for part in weights:
            product(
                low,
                "nt",
                count,
                part.rows,
                width,
                x_rows,
                part.slice,
                whole_logits,
                elements=(element, "act", "f32"),
                ldc=vocabulary,
                c_offset=part.first,
            )

        def per_row(value: Value | Tensor, first: int = first, count: int = count) -> Slice:
            return low.rows(low.tensor(value) if isinstance(value, Value) else value, first, count, 1)

        results = [per_row(v) for v in forward.outputs]
        launch = loss.cross_entropy(
            count,
            vocabulary,
            gradient=backward is not None,
            shared_upstream=scalar is not None,
            precision=low.precision,
        )
        gradient = [] if backward is None else [low.whole(scalar) if scalar else per_row(backward.inputs[5])]
        low.emit(launch, [whole_logits, per_row(targets), low.whole(z_loss), *gradient, *results], what="cross_entropy")
        if backward is None:
            continue
        assert dxs is not None
        for part in weights:
            product(
                low,
                "nn",
                count,
                width,
                part.rows,
                whole_logits,
                part.slice,
                low.rows(dxs, first, count, width),
                elements=("f32", "act", element),
                lda=vocabulary,
                a_offset=part.first,
                accumulate=part.first > 0,
            )
        if backward.accumulates:
            for part in low.bindable_rows(low.gradient(backward.accumulates)):
                product(
                    low,
                    "tn",
                    part.rows,
                    width,
                    count,
                    whole_logits,
                    x_rows,
                    part.slice,
                    elements=("f32", element, "f32"),
                    lda=vocabulary,
                    a_offset=part.first,
                    accumulate=True,
                )


def _chunk_rows(rows: int, vocabulary: int, low: Lowering) -> int:
    budget = min(LOGITS_BYTES, low.profile.binding_bytes)
    if rows * vocabulary * 4 <= budget:
        return rows
    return max(CHUNK_ROWS, budget // (vocabulary * 4) // CHUNK_ROWS * CHUNK_ROWS)


@rule("sum", "mean")
def _sum(low: Lowering, node: Node) -> None:
    launcher = reduce.sum_all if node.op == "sum" else reduce.mean_all
    x = node.inputs[0]
    _elementwise(low, node, launcher(x.type.elements, element=element_of(x), precision=low.precision))


@rule("mse")
def _mse(low: Lowering, node: Node) -> None:
    _elementwise(low, node, reduce.mse(node.inputs[0].type.elements, precision=low.precision))


@rule("log_softmax", "log_softmax_grad")
def _log_softmax(low: Lowering, node: Node) -> None:
    x = node.inputs[0]
    launcher = loss.log_softmax if node.op == "log_softmax" else loss.log_softmax_grad
    _elementwise(low, node, launcher(rows_of(x), x.shape[-1], precision=low.precision))
