"""Decoding with a key/value cache, one sample at a time: `cache_write.wgsl`, `attention_cached.wgsl`.

Shapes: x act [T, K, D]; cache_k, cache_v act [L, K, D]; q, o act [T, H, D]; start u32 [1], the absolute position of
the first of the T tokens. start + T must not exceed L.
"""

from __future__ import annotations

from hybrid.errors import LimitExceeded
from hybrid.plan.kernels.attention import MAX_HEAD_WIDTH
from hybrid.plan.kernels.base import Binding, Kernel, Launch, ceil_div, grid, vector_width

_WORKGROUP = 64


def cache_write(tokens: int, columns: int, *, cache_length: int, precision: str) -> Launch:
    """Bindings: x act [T, columns], start, cache act [L, columns], columns = K * D. cache[start + t] = x[t]."""
    width = vector_width(columns)
    kernel = Kernel(
        name=f"cache_write_x{width}",
        file="cache_write.wgsl",
        bindings=(
            Binding("x", "read", "act"),
            Binding("start", "read", "u32"),
            Binding("cache", "read_write", "act"),
        ),
        uniforms=(("tokens", "u32"), ("columns", "u32"), ("length", "u32")),
        constants=(("WORKGROUP", _WORKGROUP),),
        invocations=_WORKGROUP,
        vector=width,
    )
    units = columns // width
    return Launch(kernel, (tokens, units, cache_length), grid(ceil_div(tokens * units, _WORKGROUP)))


def attention_cached(
    tokens: int,
    heads: int,
    head_width: int,
    *,
    kv_heads: int,
    cache_length: int,
    scale: float,
    window: int | None = None,
    precision: str,
) -> Launch:
    """Bindings: q, cache_k, cache_v, start, o.

    The query at absolute position start + t sees cache rows 0 .. start + t, or the last `window` of them. window:
    None or 0 for no limit.
    """
    if head_width > MAX_HEAD_WIDTH:
        raise LimitExceeded(
            f"attention_cached: head width {head_width} is more than the supported {MAX_HEAD_WIDTH}: "
            "use more, narrower heads"
        )
    if heads % kv_heads:
        raise ValueError(f"attention_cached: {heads} query heads cannot share {kv_heads} key heads evenly")
    width = vector_width(head_width)
    kernel = Kernel(
        name=f"attention_cached_d{head_width}",
        file="attention_cached.wgsl",
        bindings=(
            Binding("q", "read", "act"),
            Binding("cache_k", "read", "act"),
            Binding("cache_v", "read", "act"),
            Binding("start", "read", "u32"),
            Binding("o", "read_write", "act"),
        ),
        uniforms=(("heads", "u32"), ("kv_heads", "u32"), ("vectors", "u32"), ("window", "u32"), ("scale", "f32")),
        defines=(("WORKGROUP", _WORKGROUP), ("UNITS", head_width // width)),
        workgroup_storage=4 * _WORKGROUP,
        invocations=_WORKGROUP,
        vector=width,
    )
    seen = min(window or cache_length, cache_length)
    return Launch(kernel, (heads, kv_heads, tokens * heads, seen, scale), grid(tokens * heads))
