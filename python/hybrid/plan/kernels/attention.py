"""Causal attention for training: `attention_forward.wgsl`, `attention_delta.wgsl`, `attention_dq.wgsl`,
`attention_dkv.wgsl`.

Shapes: q, o, do, dq act [B, T, H, D]; k, v, dk, dv act [B, T, K, D] with H a multiple of K; segment_ids u32 [B, T];
lse f32 [B, H, T]. Query t sees key j <= t of its own segment with t - j < window. Any T; D up to 128 (a D divisible
by 4 is faster).

The backward kernels take one `statistics` buffer, u32 [B, H, T, 4], instead of lse, delta and segment_ids: WebGPU
promises eight storage buffers, and dkv has seven without them.
"""

from __future__ import annotations

from hybrid.errors import LimitExceeded
from hybrid.plan.kernels.base import Binding, Kernel, Launch, ceil_div, grid, vector_width

MAX_HEAD_WIDTH = 128
STATISTICS_WORDS = 4  # u32 words for each query and head: lse, delta (as bits), segment, unused

_WORKGROUP = 32
# Up to this head width a thread takes two rows, so that each load serves both; beyond it registers run out. Short
# sequences gain little by it, and their kernels compile in half the time with one row.
_SHARED_LOADS_WIDTH = 32
_SHARED_LOADS_TOKENS = 128
_QKV = (Binding("q", "read", "act"), Binding("k", "read", "act"), Binding("v", "read", "act"))
_DO = Binding("do_", "read", "act")
_SEGMENTS = Binding("segment_ids", "read", "u32")
_STATISTICS = Binding("statistics", "read", "u32")
_UNIFORMS = (
    ("tokens", "u32"),
    ("heads", "u32"),
    ("kv_heads", "u32"),
    ("vectors", "u32"),
    ("blocks", "u32"),
    ("window", "u32"),
    ("scale", "f32"),
)


def attention(
    batch: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_width: int,
    *,
    scale: float,
    window: int | None = None,
    precision: str,
    rows: int | None = None,
) -> Launch:
    """Bindings: q, k, v, segment_ids, o, lse."""
    bindings = (*_QKV, _SEGMENTS, Binding("o", "read_write", "act"), Binding("lse", "read_write", "f32"))
    shape = (batch, tokens, heads, kv_heads, head_width)
    return _walk("attention_forward", bindings, shape, heads, scale, window, rows)


def attention_delta(batch: int, tokens: int, heads: int, head_width: int, *, precision: str) -> Launch:
    """Bindings: o, do, lse, segment_ids, statistics u32 [B, H, T, 4] (written): the row sums of o * do, with lse and
    the segment beside them."""
    _check_head("attention_delta", head_width)
    width = vector_width(head_width)
    kernel = Kernel(
        name=f"attention_delta_x{width}",
        file="attention_delta.wgsl",
        bindings=(
            Binding("o", "read", "act"),
            _DO,
            Binding("lse", "read", "f32"),
            _SEGMENTS,
            Binding("statistics", "read_write", "u32"),
        ),
        uniforms=(("count", "u32"), ("tokens", "u32"), ("heads", "u32"), ("units", "u32")),
        constants=(("WORKGROUP", _WORKGROUP),),
        invocations=_WORKGROUP,
        vector=width,
    )
    count = batch * tokens * heads
    return Launch(kernel, (count, tokens, heads, head_width // width), grid(ceil_div(count, _WORKGROUP)))


def attention_dq(
    batch: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_width: int,
    *,
    scale: float,
    window: int | None = None,
    precision: str,
    rows: int | None = None,
) -> Launch:
    """Bindings: q, k, v, do, statistics, dq."""
    bindings = (*_QKV, _DO, _STATISTICS, Binding("dq", "read_write", "act"))
    return _walk("attention_dq", bindings, (batch, tokens, heads, kv_heads, head_width), heads, scale, window, rows)


def attention_dkv(
    batch: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_width: int,
    *,
    scale: float,
    window: int | None = None,
    precision: str,
    rows: int | None = None,
) -> Launch:
    """Bindings: q, k, v, do, statistics, dk, dv."""
    bindings = (*_QKV, _DO, _STATISTICS, Binding("dk", "read_write", "act"), Binding("dv", "read_write", "act"))
    return _walk("attention_dkv", bindings, (batch, tokens, heads, kv_heads, head_width), kv_heads, scale, window, rows)


def _walk(
    name: str,
    bindings: tuple[Binding, ...],
    shape: tuple[int, int, int, int, int],
    walkers: int,
    scale: float,
    window: int | None,
    rows: int | None,
) -> Launch:
    """One thread for `rows` tokens of one of `walkers` heads (query heads or key heads), workgroups within one
    head.
    """
    batch, tokens, heads, kv_heads, head_width = shape
    _check_head(name, head_width)
    if heads % kv_heads:
        raise ValueError(f"{name}: {heads} query heads cannot share {kv_heads} key heads evenly")
    if window is not None and window < 1:
        raise ValueError(f"{name}: window {window}: expected at least 1")
    width = vector_width(head_width)
    rows = rows or (2 if head_width <= _SHARED_LOADS_WIDTH and tokens >= _SHARED_LOADS_TOKENS else 1)
    kernel = Kernel(
        name=f"{name}_d{head_width}_r{rows}",
        file=f"{name}.wgsl",
        bindings=bindings,
        uniforms=_UNIFORMS,
        constants=(("WORKGROUP", _WORKGROUP),),
        defines=(("UNITS", head_width // width), ("ROWS", rows)),
        invocations=_WORKGROUP,
        vector=width,
    )
    vectors = batch * walkers
    blocks = ceil_div(tokens, _WORKGROUP * rows)
    seen = tokens if window is None else min(window, tokens)
    return Launch(kernel, (tokens, heads, kv_heads, vectors, blocks, seen, scale), grid(vectors * blocks))


def _check_head(name: str, head_width: int) -> None:
    if head_width > MAX_HEAD_WIDTH:
        raise LimitExceeded(
            f"{name}: head width {head_width} is more than the {MAX_HEAD_WIDTH} that a thread's registers hold: "
            "use more, narrower heads"
        )
