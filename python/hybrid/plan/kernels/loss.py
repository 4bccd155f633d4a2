"""Losses: `cross_entropy.wgsl` and `topk_kl.wgsl` over a chunk of logits, `log_softmax.wgsl`, `triplet_hinge.wgsl`."""

from __future__ import annotations

from hybrid.ops import TOP_K_LIMIT
from hybrid.plan.kernels.base import Binding, Kernel, Launch, ceil_div, grid

_WORKGROUP = 32  # of one row
_ELEMENT_WORKGROUP = 64
_TEACHER = (
    Binding("teacher_ids", "read", "u32"),
    Binding("teacher_probs", "read", "f32"),
    Binding("teacher_targets", "read", "u32"),
)


def logits_stride(vocabulary: int) -> int:
    """Elements from one row of logits to the next: the products that make and use them move four at a time."""
    return ceil_div(vocabulary, 4) * 4


def cross_entropy(
    rows: int, vocabulary: int, *, gradient: bool, shared_upstream: bool = False, precision: str
) -> Launch:
    """Bindings: logits f32 [R, `logits_stride(V)`], targets u32 [R], z_loss f32 [1], (drows f32 [R]), loss_rows,
    nll_rows, lse f32 [R].

    nll = lse - logits[target]; loss = nll + z * lse^2. With `gradient` the logits are replaced by
    ((1 + 2 z lse) softmax - [target]) * drows. A row whose target is IGNORE has loss, nll and gradient exactly 0; a
    row with a logit that is not finite has a loss that is not finite either. What pads a row counts for nothing, and
    its gradient is exactly 0.
    shared_upstream: drows is f32 [1], one value for all rows.
    """
    tail = vocabulary % 4 != 0
    bindings = (
        Binding("logits", "read_write" if gradient else "read", "f32"),
        Binding("targets", "read", "u32"),
        Binding("z_loss", "read", "f32"),
        *((Binding("drows", "read", "f32"),) if gradient else ()),
        Binding("loss_rows", "read_write", "f32"),
        Binding("nll_rows", "read_write", "f32"),
        Binding("lse", "read_write", "f32"),
    )
    kernel = Kernel(
        f"cross_entropy{'_gradient' if gradient else ''}{'_tail' if tail else ''}",
        "cross_entropy.wgsl",
        bindings,
        (("rows", "u32"), ("vocabulary", "u32"), ("upstream_stride", "u32")),
        defines=(("WORKGROUP", _WORKGROUP),),
        switches=frozenset({*(["GRADIENT"] if gradient else []), *(["TAIL"] if tail else [])}),
        workgroup_storage=12 * _WORKGROUP,
        invocations=_WORKGROUP,
        vector=4,
    )
    return Launch(kernel, (rows, vocabulary, 0 if shared_upstream else 1), grid(rows))


def topk_kl(
    rows: int,
    vocabulary: int,
    columns: int,
    *,
    temperature: float,
    alpha_kl: float,
    alpha_nll: float,
    precision: str,
) -> Launch:
    """Bindings: logits f32 [R, `logits_stride(V)`], teacher_ids u32 [R, K], teacher_probs f32 [R, K], teacher_targets
    u32 [R], loss_rows, kl_rows, nll_rows f32 [R].

    See `Ops.topk_kl`. An id that is no row of the vocabulary is absent. K is at most `ops.TOP_K_LIMIT`.
    """
    results = tuple(Binding(f"{name}_rows", "read_write", "f32") for name in ("loss", "kl", "nll"))
    bindings = (Binding("logits", "read", "f32"), *_TEACHER, *results)
    return _teacher_rows(
        "topk_kl", bindings, frozenset(), (rows, vocabulary, columns, 1), (temperature, alpha_kl, alpha_nll)
    )


def topk_kl_grad(
    rows: int,
    vocabulary: int,
    columns: int,
    *,
    temperature: float,
    alpha_kl: float,
    alpha_nll: float,
    shared_upstream: bool = False,
    precision: str,
) -> Launch:
    """Bindings: logits f32 [R, `logits_stride(V)`], which become their gradient, teacher_ids, teacher_probs,
    teacher_targets, drows f32 [R], or f32 [1] with shared_upstream."""
    bindings = (Binding("logits", "read_write", "f32"), *_TEACHER, Binding("drows", "read", "f32"))
    size = (rows, vocabulary, columns, 0 if shared_upstream else 1)
    return _teacher_rows("topk_kl_grad", bindings, frozenset({"GRADIENT"}), size, (temperature, alpha_kl, alpha_nll))


def _teacher_rows(
    name: str,
    bindings: tuple[Binding, ...],
    switches: frozenset[str],
    size: tuple[int, int, int, int],
    settings: tuple[float, float, float],
) -> Launch:
    numbers = ("rows", "vocabulary", "columns", "upstream_stride")
    kernel = Kernel(
        name,
        "topk_kl.wgsl",
        bindings,
        (*((n, "u32") for n in numbers), *((n, "f32") for n in ("temperature", "alpha_kl", "alpha_nll"))),
        defines=(("WORKGROUP", _WORKGROUP), ("MAX_COLUMNS", TOP_K_LIMIT)),
        switches=switches,
        workgroup_storage=8 * TOP_K_LIMIT,
        invocations=_WORKGROUP,
    )
    return Launch(kernel, (*size, *settings), grid(size[0]))


def triplet_hinge(rows: int, width: int, listed: int | None, *, margin: float, precision: str) -> Launch:
    """Bindings: anchor, positive, negative act [N, C], mask u32 [N], (columns u32 [N, K]), hinge f32 [N].

    listed: K, or None for all C columns.
    """
    bindings = (
        *(Binding(name, "read", "act") for name in ("anchor", "positive", "negative")),
        Binding("mask", "read", "u32"),
        *((Binding("columns", "read", "u32"),) if listed else ()),
        Binding("hinge", "read_write", "f32"),
    )
    kernel = Kernel(
        "triplet_hinge" + ("_on_columns" if listed else ""),
        "triplet_hinge.wgsl",
        bindings,
        (("rows", "u32"), ("width", "u32"), ("counted", "u32"), ("margin", "f32")),
        defines=(("WORKGROUP", _WORKGROUP),),
        switches=frozenset({"COLUMNS"} if listed else ()),
        workgroup_storage=8 * _WORKGROUP,
        invocations=_WORKGROUP,
    )
    return Launch(kernel, (rows, width, listed or width, margin), grid(rows))


def triplet_hinge_grad(rows: int, width: int, listed: int | None, *, precision: str) -> Launch:
    """Bindings: left, right act [N, C], mask u32 [N], hinge f32 [N], drows f32 [N], (columns u32 [N, K]), result act
    [N, C].

    result = 2 / K (left - right) drows where the hinge is above 0: (negative, positive) for the anchor's gradient,
    (positive, anchor) for the positive's, (anchor, negative) for the negative's.
    """
    bindings = (
        *(Binding(name, "read", "act") for name in ("left", "right")),
        Binding("mask", "read", "u32"),
        *(Binding(name, "read", "f32") for name in ("hinge", "drows")),
        *((Binding("columns", "read", "u32"),) if listed else ()),
        Binding("result", "read_write", "act"),
    )
    kernel = Kernel(
        "triplet_hinge_grad" + ("_on_columns" if listed else ""),
        "triplet_hinge_grad.wgsl",
        bindings,
        (("rows", "u32"), ("width", "u32"), ("counted", "u32")),
        defines=(("WORKGROUP", _ELEMENT_WORKGROUP),),
        switches=frozenset({"COLUMNS"} if listed else ()),
        invocations=_ELEMENT_WORKGROUP,
    )
    return Launch(kernel, (rows, width, listed or width), grid(ceil_div(rows * width, _ELEMENT_WORKGROUP)))


def log_softmax(rows: int, columns: int, *, precision: str, element: str = "act") -> Launch:
    """Bindings: x of `element` [N, V], y f32 [N, V]. y = x - log(sum(exp(x))), per row."""
    bindings = (Binding("x", "read", element), Binding("y", "read_write", "f32"))
    return _rows("log_softmax", bindings, frozenset({element.upper()}), rows, columns)


def log_softmax_grad(rows: int, columns: int, *, precision: str, element: str = "act") -> Launch:
    """Bindings: y f32 [N, V], dy f32 [N, V], dx of `element` [N, V]. dx = dy - exp(y) * sum(dy), per row."""
    bindings = (Binding("y", "read", "f32"), Binding("dy", "read", "f32"), Binding("dx", "read_write", element))
    return _rows("log_softmax_grad", bindings, frozenset({"GRADIENT", element.upper()}), rows, columns)


def _rows(name: str, bindings: tuple[Binding, ...], switches: frozenset[str], rows: int, columns: int) -> Launch:
    kernel = Kernel(
        f"{name}_f32" if "F32" in switches else name,
        "log_softmax.wgsl",
        bindings,
        (("rows", "u32"), ("columns", "u32")),
        defines=(("WORKGROUP", _WORKGROUP),),
        switches=switches,
        invocations=_WORKGROUP,
    )
    return Launch(kernel, (rows, columns), grid(-(-rows // _WORKGROUP)))
