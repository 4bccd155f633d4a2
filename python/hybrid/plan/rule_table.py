"""The table of lowering rules, and what rules in several files share."""

from __future__ import annotations

from collections.abc import Callable

from hybrid.graph.ir import ACT, Node, Value
from hybrid.plan.kernels import matmul
from hybrid.plan.kernels.base import Launch
from hybrid.plan.lowering import Lowering, Slice, element_of

Rule = Callable[[Lowering, Node], None]
RULES: dict[str, Rule] = {}


def rule(*ops: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for op in ops:
            RULES[op] = function
        return function

    return register


def rows_of(value: Value) -> int:
    """N: everything but the last axis."""
    return value.type.elements // value.shape[-1]


def kernel_element(low: Lowering, value: Value) -> str:
    """The element of a kernel that takes "act" or "f32": in f32 precision one kernel serves both."""
    return ACT if low.precision == "f32" else element_of(value)


def one_dispatch(low: Lowering, node: Node, launch: Launch) -> None:
    """The node is this launch on its inputs and outputs as they come."""
    low.emit(launch, [*node.inputs, *node.outputs])


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
