"""Table look-ups and their gradients: `embedding.wgsl`, `embedding_grad.wgsl`, `ngram_buckets.wgsl`, `rows.wgsl`."""

from __future__ import annotations

from hybrid.plan.kernels.base import Binding, Kernel, Launch, ceil_div, grid, vector_width

_WORKGROUP = 64


def embedding(rows: int, columns: int, *, row_begin: int, row_count: int, precision: str) -> Launch:
    """Bindings: ids u32 [N], table act [row_count, C], y act [N, C].

    `table` is rows row_begin .. row_begin + row_count - 1 of the whole table; only positions whose id lies there are
    written, so that a table larger than a binding is looked up slice by slice.
    """
    width = vector_width(columns)
    bindings = (Binding("ids", "read", "u32"), Binding("table", "read", "act"), Binding("y", "read_write", "act"))
    uniforms = (("rows", "u32"), ("columns", "u32"), ("row_begin", "u32"), ("row_count", "u32"))
    kernel = Kernel(
        f"embedding_x{width}",
        "embedding.wgsl",
        bindings,
        uniforms,
        defines=(("WORKGROUP", _WORKGROUP),),
        invocations=_WORKGROUP,
        vector=width,
    )
    values = (rows, columns // width, row_begin, row_count)
    return Launch(kernel, values, grid(ceil_div(rows * (columns // width), _WORKGROUP)))


def embedding_grad(rows: int, columns: int, *, row_begin: int, row_count: int, precision: str) -> Launch:
    """Bindings: dy act [N, C], row_order u32 [N], row_starts u32 [N + 1], row_ids u32 [N], row_count u32 [1],
    gradient f32 [row_count, C].

    Adds to gradient row `row_ids[u] - row_begin` the sum of dy over the positions of distinct id u, in their order
    in `row_order`: no atomics, and the same bits every time. See `backends.row_index`.
    """
    width = vector_width(columns)
    bindings = (
        Binding("dy", "read", "act"),
        *(Binding(name, "read", "u32") for name in ("row_order", "row_starts", "row_ids", "distinct")),
        Binding("gradient", "read_write", "f32"),
    )
    uniforms = (("rows", "u32"), ("columns", "u32"), ("row_begin", "u32"), ("row_count", "u32"))
    kernel = Kernel(
        f"embedding_grad_x{width}",
        "embedding_grad.wgsl",
        bindings,
        uniforms,
        defines=(("WORKGROUP", _WORKGROUP),),
        invocations=_WORKGROUP,
        vector=width,
    )
    values = (rows, columns // width, row_begin, row_count)
    return Launch(kernel, values, grid(ceil_div(rows * (columns // width), _WORKGROUP)))


def ngram_buckets(
    count: int, time: int, *, order: int, buckets: int, seed: int, history: int = 0, precision: str
) -> Launch:
    """Bindings: ids u32 [N], context u32, rows u32 [N], for N positions in sequences of T.

    rows[n] is `ops.ngram_bucket` of the n-gram that ends at position n. history: 0 for training, where context is the
    positions' segment ids u32 [N]; otherwise context is the `history` ids before the first.
    """
    kernel = Kernel(
        "ngram_buckets" + ("_decoding" if history else ""),
        "ngram_buckets.wgsl",
        (Binding("ids", "read", "u32"), Binding("context", "read", "u32"), Binding("rows", "read_write", "u32")),
        tuple((name, "u32") for name in ("count", "time", "history", "order", "buckets", "start")),
        defines=(("WORKGROUP", _WORKGROUP),),
        switches=frozenset({"DECODING"} if history else ()),
        invocations=_WORKGROUP,
    )
    start = (seed + order * 0x9E3779B9) & 0xFFFFFFFF
    return Launch(kernel, (count, time, history, order, buckets, start), grid(ceil_div(count, _WORKGROUP)))


def gather_rows(count: int, rows: int, columns: int, *, precision: str) -> Launch:
    """Bindings: x act [rows, C], index u32 [count], y act [count, C].

    y[i] = x[index[i]]; an index beyond the end gives zeros.
    """
    return _rows("gather_rows", frozenset(), count, rows, columns)


def scatter_rows(count: int, rows: int, columns: int, *, precision: str) -> Launch:
    """Bindings: dy act [count, C], index u32 [count], dx act [rows, C].

    dx[r] = sum of dy[i] over all i with index[i] = r.
    """
    return _rows("scatter_rows", frozenset({"SCATTER"}), count, rows, columns)


def _rows(name: str, switches: frozenset[str], count: int, rows: int, columns: int) -> Launch:
    bindings = (
        Binding("source", "read", "act"),
        Binding("index", "read", "u32"),
        Binding("result", "read_write", "act"),
    )
    kernel = Kernel(
        name,
        "rows.wgsl",
        bindings,
        (("count", "u32"), ("rows", "u32"), ("columns", "u32")),
        defines=(("WORKGROUP", _WORKGROUP),),
        switches=switches,
        invocations=_WORKGROUP,
    )
    written = rows if "SCATTER" in switches else count
    return Launch(kernel, (count, rows, columns), grid(ceil_div(written * columns, _WORKGROUP)))
