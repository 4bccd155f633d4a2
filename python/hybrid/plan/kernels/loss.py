"""Cross-entropy over a chunk of logits, and log-softmax: `cross_entropy.wgsl`, `log_softmax.wgsl`."""

from __future__ import annotations

from hybrid.plan.kernels.base import Binding, Kernel, Launch, grid, vector_width

_WORKGROUP = 32  # of one row


def cross_entropy(
    rows: int, vocabulary: int, *, gradient: bool, shared_upstream: bool = False, precision: str
) -> Launch:
    """Bindings: logits f32 [R, V], targets u32 [R], z_loss f32 [1], (drows f32 [R]), loss_rows, nll_rows, lse f32
    [R].

    nll = lse - logits[target]; loss = nll + z * lse^2. With `gradient` the logits are replaced by
    ((1 + 2 z lse) softmax - [target]) * drows. A row whose target is IGNORE has loss, nll and gradient exactly 0; a
    row with a logit that is not finite has a loss that is not finite either.
    shared_upstream: drows is f32 [1], one value for all rows.
    """
    width = vector_width(vocabulary)
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
        f"cross_entropy{'_gradient' if gradient else ''}_x{width}",
        "cross_entropy.wgsl",
        bindings,
        (("rows", "u32"), ("columns", "u32"), ("upstream_stride", "u32")),
        defines=(("WORKGROUP", _WORKGROUP),),
        switches=frozenset({*(["GRADIENT"] if gradient else []), *(["SCALAR"] if width == 1 else [])}),
        workgroup_storage=12 * _WORKGROUP,
        invocations=_WORKGROUP,
        vector=width,
    )
    return Launch(kernel, (rows, vocabulary // width, 0 if shared_upstream else 1), grid(rows))


def log_softmax(rows: int, columns: int, *, precision: str) -> Launch:
    """Bindings: x act [N, V], y f32 [N, V]. y = x - log(sum(exp(x))), per row."""
    bindings = (Binding("x", "read", "act"), Binding("y", "read_write", "f32"))
    return _rows("log_softmax", bindings, frozenset(), rows, columns)


def log_softmax_grad(rows: int, columns: int, *, precision: str) -> Launch:
    """Bindings: y f32 [N, V], dy f32 [N, V], dx act [N, V]. dx = dy - exp(y) * sum(dy), per row."""
    bindings = (Binding("y", "read", "f32"), Binding("dy", "read", "f32"), Binding("dx", "read_write", "act"))
    return _rows("log_softmax_grad", bindings, frozenset({"GRADIENT"}), rows, columns)


def _rows(name: str, bindings: tuple[Binding, ...], switches: frozenset[str], rows: int, columns: int) -> Launch:
    kernel = Kernel(
        name,
        "log_softmax.wgsl",
        bindings,
        (("rows", "u32"), ("columns", "u32")),
        defines=(("WORKGROUP", _WORKGROUP),),
        switches=switches,
        invocations=_WORKGROUP,
    )
    return Launch(kernel, (rows, columns), grid(-(-rows // _WORKGROUP)))
