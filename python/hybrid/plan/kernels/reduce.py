"""Sums: over rows into a gradient (two stages), and over everything into one number.

No kernel adds floats atomically: the order of every sum is fixed, so a run is repeatable bit for bit on one device.
"""

from __future__ import annotations

from hybrid.plan.kernels.base import Binding, Kernel, Launch, ceil_div, grid, vector_width

_WORKGROUP = 64
_REDUCE_WORKGROUP = 32
_ALL_WORKGROUP = 128
_MAX_BLOCKS = 64
_MIN_BLOCK_ROWS = 16


def blocks_of(rows: int) -> int:
    """How many partial sums the column kernels write for `rows` rows: the workspace is f32 [blocks_of(N), C]."""
    return ceil_div(rows, _block_rows(rows))


def column_sum(rows: int, columns: int, *, precision: str) -> Launch:
    """Bindings: dy act [N, C], partials f32 [blocks_of(N), C]. Then `column_reduce`."""
    return column_partials("column_sum", (Binding("dy", "read", "act"),), "", rows, columns)


def column_partials(name: str, bindings: tuple[Binding, ...], switch: str, rows: int, columns: int) -> Launch:
    """First stage of a sum over rows: see `column_partials.wgsl` for the switches."""
    width = vector_width(columns)
    kernel = Kernel(
        name=f"{name}_x{width}",
        file="column_partials.wgsl",
        bindings=(*bindings, Binding("partials", "read_write", "f32")),
        uniforms=(("rows", "u32"), ("columns", "u32"), ("block", "u32"), ("blocks", "u32")),
        constants=(("WORKGROUP", _WORKGROUP),),
        switches=frozenset({switch} if switch else ()),
        invocations=_WORKGROUP,
        vector=width,
    )
    blocks = blocks_of(rows)
    uniforms = (rows, columns // width, _block_rows(rows), blocks)
    return Launch(kernel, uniforms, grid(ceil_div(blocks * (columns // width), _WORKGROUP)))


def column_reduce(rows: int, columns: int, *, precision: str) -> Launch:
    """Bindings: partials f32 [blocks_of(N), C], gradient f32 [C], to which the sum over the blocks is added."""
    width = vector_width(columns)
    kernel = Kernel(
        name=f"column_reduce_x{width}",
        file="column_reduce.wgsl",
        bindings=(Binding("partials", "read", "f32"), Binding("gradient", "read_write", "f32")),
        uniforms=(("columns", "u32"), ("blocks", "u32")),
        constants=(("WORKGROUP", _REDUCE_WORKGROUP),),
        invocations=_REDUCE_WORKGROUP,
        vector=width,
    )
    return Launch(kernel, (columns // width, blocks_of(rows)), grid(ceil_div(columns // width, _REDUCE_WORKGROUP)))


def _block_rows(rows: int) -> int:
    return max(_MIN_BLOCK_ROWS, ceil_div(rows, _MAX_BLOCKS))


def sum_all(elements: int, *, precision: str, element: str = "f32") -> Launch:
    """Bindings: a of `element` [elements], y f32 [1]. y = sum(a)."""
    return _all("sum_all", (Binding("a", "read", element),), elements, 1.0)


def mean_all(elements: int, *, precision: str, element: str = "f32") -> Launch:
    """Bindings: a of `element` [elements], y f32 [1]. y = sum(a) / elements."""
    return _all("mean_all", (Binding("a", "read", element),), elements, 1.0 / elements)


def mse(elements: int, *, precision: str, element: str = "act") -> Launch:
    """Bindings: a, b of `element` [elements], y f32 [1]. y = sum((a - b)^2) / elements."""
    return _all("mse", tuple(Binding(n, "read", element) for n in "ab"), elements, 1.0 / elements)


def _all(name: str, inputs: tuple[Binding, ...], elements: int, factor: float) -> Launch:
    """One workgroup over everything: these ops measure, and are no part of a training step's cost."""
    width = vector_width(elements)
    element = inputs[0].element
    kernel = Kernel(
        name=f"{name}_{element}_x{width}",
        file="reduce_all.wgsl",
        bindings=(*inputs, Binding("y", "read_write", "f32")),
        uniforms=(("count", "u32"), ("factor", "f32")),
        defines=(("WORKGROUP", _ALL_WORKGROUP),),
        switches=frozenset({element.upper(), *(["MSE"] if len(inputs) == 2 else [])}),
        workgroup_storage=4 * _ALL_WORKGROUP,
        invocations=_ALL_WORKGROUP,
        vector=width,
    )
    return Launch(kernel, (elements // width, factor), (1, 1, 1))
