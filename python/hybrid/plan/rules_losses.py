"""The lowering rules of output heads, losses and sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybrid.graph.ir import U32, Node, Value
from hybrid.plan.kernels import loss, reduce
from hybrid.plan.lowering import Lowering, Slice, element_of
from hybrid.plan.rule_table import kernel_element, one_dispatch, product, rows_of, rule

# Logits exist for one chunk of rows at a time: as many rows (a multiple of 128) as fit this many bytes.
LOGITS_BYTES = 16 * 1024 * 1024
CHUNK_ROWS = 128


@rule("cross_entropy_head", "topk_kl")
def _head_alone(low: Lowering, node: Node) -> None:
    """In an evaluation, and where a later node reads the losses. Otherwise the gradient node computes them, from the
    same logits: an objective saves a product if it gives each loss a seed of its own instead of adding them up."""
    readers = [reader for value in node.outputs for reader in low.users(value)]
    if not readers or any(reader.op != f"{node.op}_grad" for reader in readers):
        lower = _cross_entropy if node.op == "cross_entropy_head" else _distil
        lower(low, node, None)


@rule("cross_entropy_head_grad")
def _cross_entropy_head_grad(low: Lowering, node: Node) -> None:
    forward = low.graph.producer()[node.inputs[4]]
    _cross_entropy(low, forward, node)


def _cross_entropy(low: Lowering, forward: Node, backward: Node | None) -> None:
    x, weight, targets, z_loss = forward.inputs
    head = _Head(low, x, weight)
    upstream = _upstream(low, backward.inputs[5]) if backward else None
    for chunk in head.chunks():
        logits = head.project(chunk)
        launch = loss.cross_entropy(
            chunk.rows,
            head.vocabulary,
            gradient=upstream is not None,
            shared_upstream=upstream is not None and upstream.shape == (1,),
            precision=low.precision,
        )
        drows = [] if upstream is None else [chunk.of_upstream(upstream)]
        results = [chunk.of(value) for value in forward.outputs]
        low.emit(launch, [logits, chunk.of(targets), low.whole(z_loss), *drows, *results], what="cross_entropy")
        if backward is not None:
            head.project_back(chunk, logits, backward)


@rule("topk_kl_grad")
def _topk_kl_grad(low: Lowering, node: Node) -> None:
    _distil(low, low.graph.producer()[node.inputs[5]], node)


def _distil(low: Lowering, forward: Node, backward: Node | None) -> None:
    x, weight, *teacher = forward.inputs
    head = _Head(low, x, weight)
    columns = teacher[0].shape[1]
    upstream = _upstream(low, backward.inputs[6]) if backward else None
    for chunk in head.chunks():
        logits = head.project(chunk)
        inputs = [logits, *(chunk.of(value) for value in teacher)]
        size = (chunk.rows, head.vocabulary, columns)
        launch = loss.topk_kl(*size, **forward.attrs, precision=low.precision)
        low.emit(launch, [*inputs, *(chunk.of(value) for value in forward.outputs)], what="top_k")
        if backward is None or upstream is None:
            continue
        shared = upstream.shape == (1,)
        launch = loss.topk_kl_grad(*size, **forward.attrs, shared_upstream=shared, precision=low.precision)
        low.emit(launch, [*inputs, chunk.of_upstream(upstream)], what="top_k_gradient")
        head.project_back(chunk, logits, backward)


def _upstream(low: Lowering, drows: Value) -> Value:
    """The gradients of the rows' losses, or the one value f32 [1] that all rows share."""
    producer = low.graph.producer().get(drows)
    return producer.inputs[0] if producer and producer.op == "broadcast" else drows


@dataclass(frozen=True)
class _Chunk:
    """Rows `first .. first + rows - 1` of values that have N of them."""

    low: Lowering
    first: int
    rows: int

    def of(self, value: Value) -> Slice:
        width = value.type.elements // value.shape[0]
        return self.low.rows(self.low.tensor(value), self.first, self.rows, width)

    def of_upstream(self, value: Value) -> Slice:
        return self.low.whole(value) if value.shape == (1,) else self.of(value)


class _Head:
    """Logits of x act [N, C] under a weight [V, C] for one chunk of rows at a time, and the way back from their
    gradients."""

    def __init__(self, low: Lowering, x: Value, weight: Value) -> None:
        self.low, self.x = low, x
        self.width, self.vocabulary = x.shape[-1], weight.shape[0]
        self.stride = loss.logits_stride(self.vocabulary)
        self.rows_at_once = _chunk_rows(rows_of(x), self.stride, low)
        self.logits = low.temporary(f"logits{len(low.specs)}", (self.rows_at_once, self.stride), "f32")
        # With their padding: it makes logits that the losses ignore, and meets gradients that they set to 0.
        self.weights = low.bindable_rows(low.parameter(weight, "act"), padded=True)

    def chunks(self) -> Iterator[_Chunk]:
        rows = rows_of(self.x)
        for first in range(0, rows, self.rows_at_once):
            yield _Chunk(self.low, first, min(self.rows_at_once, rows - first))

    def project(self, chunk: _Chunk) -> Slice:
        """The chunk's logits: f32 [rows, stride], until the next chunk's replace them."""
        logits = Slice(self.logits, 0, chunk.rows * self.stride * 4)
        for part in self.weights:
            product(
                self.low,
                "nt",
                chunk.rows,
                part.rows,
                self.width,
                chunk.of(self.x),
                part.slice,
                logits,
                elements=(element_of(self.x), "act", "f32"),
                ldc=self.stride,
                c_offset=part.first,
            )
        return logits

    def project_back(self, chunk: _Chunk, dlogits: Slice, backward: Node) -> None:
        """From the gradient of the chunk's logits to its rows of dx, and to the weight's gradient if that is wanted."""
        (dx,) = backward.outputs
        element = element_of(self.x)
        for part in self.weights:
            product(
                self.low,
                "nn",
                chunk.rows,
                self.width,
                part.rows,
                dlogits,
                part.slice,
                chunk.of(dx),
                elements=("f32", "act", element),
                lda=self.stride,
                a_offset=part.first,
                accumulate=part.first > 0,
            )
        if not backward.accumulates:
            return
        for part in self.low.bindable_rows(self.low.gradient(backward.accumulates)):
            product(
                self.low,
                "tn",
                part.rows,
                self.width,
                chunk.rows,
                dlogits,
                chunk.of(self.x),
                part.slice,
                elements=("f32", element, "f32"),
                lda=self.stride,
                a_offset=part.first,
                accumulate=True,
            )


def _chunk_rows(rows: int, stride: int, low: Lowering) -> int:
    budget = min(LOGITS_BYTES, low.profile.binding_bytes)
    if rows * stride * 4 <= budget:
        return rows
    return max(CHUNK_ROWS, budget // (stride * 4) // CHUNK_ROWS * CHUNK_ROWS)


@rule("sum", "mean")
def _sum(low: Lowering, node: Node) -> None:
    launcher = reduce.sum_all if node.op == "sum" else reduce.mean_all
    x = node.inputs[0]
    one_dispatch(low, node, launcher(x.type.elements, element=element_of(x), precision=low.precision))


@rule("mse")
def _mse(low: Lowering, node: Node) -> None:
    a = node.inputs[0]
    launch = reduce.mse(a.type.elements, element=kernel_element(low, a), precision=low.precision)
    one_dispatch(low, node, launch)


@rule("log_softmax", "log_softmax_grad")
def _log_softmax(low: Lowering, node: Node) -> None:
    forward = node.op == "log_softmax"
    x = node.inputs[0] if forward else node.outputs[0]
    launcher = loss.log_softmax if forward else loss.log_softmax_grad
    launch = launcher(rows_of(x), x.shape[-1], element=kernel_element(low, x), precision=low.precision)
    one_dispatch(low, node, launch)


@rule("triplet_hinge")
def _triplet_hinge(low: Lowering, node: Node) -> None:
    launch = loss.triplet_hinge(*_triplet_size(node), margin=node.attrs["margin"], precision=low.precision)
    one_dispatch(low, node, launch)


@rule("triplet_hinge_grad")
def _triplet_hinge_grad(low: Lowering, node: Node) -> None:
    one_dispatch(low, node, loss.triplet_hinge_grad(*_triplet_size(node), precision=low.precision))


def _triplet_size(node: Node) -> tuple[int, int, int | None]:
    """N, C, and K if the columns are listed."""
    first, *_, last = node.inputs
    rows, width = first.shape
    listed = last.dtype == U32 and len(last.shape) == 2
    return rows, width, last.shape[1] if listed else None
