"""Rotary position embedding: `rope.wgsl`."""

from __future__ import annotations

from hybrid.plan.kernels.base import Binding, Kernel, Launch, ceil_div, grid, vector_width

_WORKGROUP = 64


def rope(rows: int, heads: int, head_width: int, *, precision: str, inverse: bool = False) -> Launch:
    """Bindings: x act [N, heads, D], positions u32 [N] (each below P), table f32 [P, D], y act [N, heads, D].

    Row p of the table is [cos(0 .. D/2-1), sin(0 .. D/2-1)]; pairs are (i, i + D/2). inverse: rotate back, which is
    also the gradient. D is even.
    """
    if head_width % 2:
        raise ValueError(f"rope: head width {head_width} is odd: expected pairs")
    half = head_width // 2
    width = vector_width(half)
    kernel = Kernel(
        name=f"rope_x{width}",
        file="rope.wgsl",
        bindings=(
            Binding("x", "read", "act"),
            Binding("positions", "read", "u32"),
            Binding("table", "read", "f32"),
            Binding("y", "read_write", "act"),
        ),
        uniforms=(("count", "u32"), ("heads", "u32"), ("half", "u32"), ("sign", "f32")),
        constants=(("WORKGROUP", _WORKGROUP),),
        invocations=_WORKGROUP,
        vector=width,
    )
    count = rows * heads * (half // width)
    return Launch(kernel, (count, heads, half // width, -1.0 if inverse else 1.0), grid(ceil_div(count, _WORKGROUP)))
