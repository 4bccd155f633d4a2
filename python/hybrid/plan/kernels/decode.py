"""Decoding against key/value caches: `cache_write.wgsl`, `attention_cached.wgsl`. Batch 1."""

from __future__ import annotations

from hybrid.errors import LimitExceeded
from hybrid.plan.kernels.attention import MAX_HEAD_WIDTH
from hybrid.plan.kernels.base import Binding, Kernel, Launch, ceil_div, grid

_THREADS = 64


def cache_write(tokens: int, width: int, *, cache_length: int, precision: str) -> Launch:
    """Bindings: x act [T, width], start u32 [1], cache act [cache_length, width]. cache[start + t] = x[t]; rows beyond the cache are dropped."""
    bindings = (Binding("x", "read", "act"), Binding("start", "read", "u32"), Binding("cache", "read_write", "act"))
    kernel = Kernel(
        "cache_write", "cache_write.wgsl", bindings, (("tokens", "u32"), ("width", "u32"), ("cache_length", "u32")),
        defines=(("THREADS", _THREADS),), invocations=_THREADS,
    )  # fmt: skip
    return Launch(kernel, (tokens, width, cache_length), grid(ceil_div(tokens * width, _THREADS)))


def attention_cached(
    tokens: int, heads: int, head_width: int, *, kv_heads: int, cache_length: int, scale: float, window: int | None, precision: str
) -> Launch:
    """Bindings: q act [T, H, D], cache_k, cache_v act [cache_length, K, D], start u32 [1], o act [T, H, D].

    Query t at position start + t sees the cache rows up to its own, the last `window` of them if there is one. One workgroup a query row
    and head; its threads share the keys and combine their partial softmax sums in a fixed order.
    """
    if head_width > MAX_HEAD_WIDTH:
        raise LimitExceeded(f"attention_cached: head width {head_width} is more than {MAX_HEAD_WIDTH}: use more, narrower heads")
    names = ("tokens", "heads", "kv_heads", "cache_length", "window")
    bindings = (
        Binding("q", "read", "act"), Binding("cache_k", "read", "act"), Binding("cache_v", "read", "act"), Binding("start", "read", "u32"),
        Binding("o", "read_write", "act"),
    )  # fmt: skip
    threads = 16
    kernel = Kernel(
        f"attention_cached_d{head_width}", "attention_cached.wgsl", bindings, (*((n, "u32") for n in names), ("scale", "f32")),
        defines=(("THREADS", threads), ("HEAD_WIDTH", head_width)), workgroup_storage=4 * threads * (head_width + 2), invocations=threads,
    )  # fmt: skip
    return Launch(kernel, (tokens, heads, kv_heads, cache_length, window or 0, scale), grid(tokens * heads))
