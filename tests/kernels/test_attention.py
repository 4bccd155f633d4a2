"""Flash-style attention, forward and backward, against the T x T formula in float64."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid.errors import LimitExceeded
from hybrid.plan.kernels import attention
from kernels.harness import assert_close, run, stored

pytestmark = pytest.mark.webgpu

# B, T, H, K, D, window, segments a sample
CASES = [
    (1, 1, 1, 1, 8, None, 1),
    (2, 33, 4, 2, 32, None, 1),
    (1, 70, 2, 2, 16, None, 3),
    (2, 37, 4, 1, 36, 5, 2),
    (1, 9, 2, 1, 7, 3, 2),
]
# Wide heads hold many registers and take seconds to compile on a software driver.
WIDE_CASES = [(1, 100, 1, 1, 64, 40, 1), (1, 40, 2, 1, 128, None, 2)]


class Reference:
    """Attention and its gradients as one would write them on paper."""

    def __init__(self, case, precision):
        batch, tokens, heads, kv_heads, width, window, segments = case
        rng = np.random.default_rng(tokens * 7 + width)
        draw = lambda h: stored(rng.normal(size=(batch, tokens, h, width)), precision)  # noqa: E731
        self.q, self.k, self.v, self.do = draw(heads), draw(kv_heads), draw(kv_heads), draw(heads)
        cuts = np.sort(rng.integers(0, tokens, (batch, segments - 1)), 1)
        self.segment_ids = (np.arange(tokens)[None, :, None] >= cuts[:, None, :]).sum(2)
        self.scale = 0.3 / np.sqrt(width) * 4
        distance = np.arange(tokens)[:, None] - np.arange(tokens)[None]
        seen = (distance >= 0) & (distance < (window or tokens))
        seen = seen[None] & (self.segment_ids[:, :, None] == self.segment_ids[:, None, :])
        k, v = (np.repeat(a, heads // kv_heads, 2) for a in (self.k, self.v))
        scores = np.where(seen[:, None], np.einsum("bthd,bjhd->bhtj", self.q, k) * self.scale, -np.inf)
        top = scores.max(-1, keepdims=True)
        self.lse = (top + np.log(np.exp(scores - top).sum(-1, keepdims=True)))[..., 0]
        p = np.exp(scores - self.lse[..., None])
        self.o = np.einsum("bhtj,bjhd->bthd", p, v)
        dp = np.einsum("bthd,bjhd->bhtj", self.do, v)
        self.delta = np.einsum("bthd,bthd->bht", self.o, self.do)
        ds = p * (dp - self.delta[..., None]) * self.scale
        group = lambda a: a.reshape(batch, tokens, kv_heads, heads // kv_heads, width).sum(3)  # noqa: E731
        self.dq = np.einsum("bhtj,bjhd->bthd", ds, k)
        self.dk = group(np.einsum("bhtj,bthd->bjhd", ds, self.q))
        self.dv = group(np.einsum("bhtj,bthd->bjhd", p, self.do))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_the_formula_forward_and_backward(case, precision):
    _check(case, precision)


@pytest.mark.parametrize("case", WIDE_CASES, ids=str)
def test_wide_heads_are_the_formula_too(case):
    _check(case, "f32")


def _check(case, precision):
    batch, tokens, heads, kv_heads, width, window, _ = case
    ref = Reference(case, precision)
    shape = (batch, tokens, heads, kv_heads, width)
    options = {"scale": ref.scale, "window": window, "precision": precision}

    forward = attention.attention(*shape, **options)
    empty = np.zeros_like
    o, lse = run(forward, [ref.q, ref.k, ref.v, ref.segment_ids, empty(ref.o), empty(ref.lse)], precision)
    assert_close(o, ref.o, precision)
    assert_close(lse, ref.lse)

    launch = attention.attention_delta(batch, tokens, heads, width, precision=precision)
    statistics = np.zeros((batch, heads, tokens, attention.STATISTICS_WORDS), np.uint32)
    o = stored(ref.o, precision)
    (statistics,) = run(launch, [o, ref.do, ref.lse, ref.segment_ids, statistics], precision)
    delta = np.einsum("bthd,bthd->bht", o, ref.do)
    scale = np.abs(np.einsum("bthd,bthd->bht", np.abs(o), np.abs(ref.do)))
    assert np.all(np.abs(statistics[..., 1].view(np.float32) - delta) <= 1e-5 * scale)
    assert_close(statistics[..., 0].view(np.float32), ref.lse)
    assert np.array_equal(statistics[..., 2], np.repeat(ref.segment_ids[:, None], heads, 1))

    statistics[..., 1] = ref.delta.astype(np.float32).view(np.uint32)
    inputs = [ref.q, ref.k, ref.v, ref.do, statistics]
    (dq,) = run(attention.attention_dq(*shape, **options), [*inputs, empty(ref.q)], precision)
    dk, dv = run(attention.attention_dkv(*shape, **options), [*inputs, empty(ref.k), empty(ref.v)], precision)
    assert_close(dv, ref.dv, precision)
    if tokens > 1:  # a single key has probability 1, and its score no gradient
        assert_close(dq, ref.dq, precision)
        assert_close(dk, ref.dk, precision)


def test_a_query_alone_in_its_segment_copies_its_value():
    tokens = 12
    v = np.random.default_rng(1).normal(size=(1, tokens, 1, 8))
    launch = attention.attention(1, tokens, 1, 1, 8, scale=1.0, precision="f32")
    q = np.ones((1, tokens, 1, 8))
    o, _ = run(launch, [q, q, v, np.arange(tokens), np.zeros_like(v), np.zeros((1, 1, tokens))])
    assert_close(o, v)


def test_large_scores_neither_overflow_nor_lose_the_winner():
    tokens = 40
    q = np.full((1, tokens, 1, 4), 30.0)
    k = q.copy()
    k[0, 3] *= 2  # score 7,200 against 3,600
    v = np.random.default_rng(2).normal(size=(1, tokens, 1, 4))
    launch = attention.attention(1, tokens, 1, 1, 4, scale=1.0, precision="f32")
    o, lse = run(launch, [q, k, v, np.zeros(tokens), np.zeros_like(v), np.zeros((1, 1, tokens))])
    assert_close(o[0, 3:], np.repeat(v[:, 3], tokens - 3, 0))
    assert lse[0, 0, -1] == 7200.0


def test_nan_in_a_key_reaches_every_query_that_sees_it():
    tokens = 8
    q = np.ones((1, tokens, 1, 4))
    k = q.copy()
    k[0, 5] = np.nan
    launch = attention.attention(1, tokens, 1, 1, 4, scale=1.0, precision="f32")
    o, _ = run(launch, [q, k, q, np.zeros(tokens), np.zeros_like(q), np.zeros((1, 1, tokens))])
    assert not np.isnan(o[0, :5]).any()
    assert np.isnan(o[0, 5:]).all()


def test_heads_that_registers_cannot_hold_are_refused():
    with pytest.raises(LimitExceeded, match="head width 256"):
        attention.attention(1, 8, 1, 1, 256, scale=1.0, precision="f32")
