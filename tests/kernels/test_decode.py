"""Key/value caches: what is appended is what attention sees, and decoding equals training's attention."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid.errors import LimitExceeded
from hybrid.plan.kernels import attention, decode
from kernels.harness import assert_close, run, stored

pytestmark = pytest.mark.webgpu


def test_rows_are_appended_at_start_and_none_beyond_the_end(precision):
    for columns in (8, 7):
        x = stored(np.random.default_rng(0).normal(size=(3, columns)), precision)
        launch = decode.cache_write(3, columns, cache_length=6, precision=precision)
        (cache,) = run(launch, [x, [2], np.full((6, columns), 5.0)], precision)
        assert np.array_equal(cache[2:5], x)
        assert np.all(cache[[0, 1, 5]] == 5)
        (cache,) = run(launch, [x, [5], np.full((6, columns), 5.0)], precision)
        assert np.array_equal(cache[5], x[0])
        assert np.all(cache[:5] == 5)


# T, start, H, K, D, window, L
CASES = [
    (1, 0, 1, 1, 8, None, 4),
    (1, 150, 4, 2, 32, None, 200),
    (5, 70, 2, 1, 36, 33, 80),
    (3, 61, 2, 2, 100, None, 64),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_queries_see_the_cache_up_to_themselves(case, precision):
    tokens, start, heads, kv_heads, width, window, length = case
    rng = np.random.default_rng(width)
    q = stored(rng.normal(size=(tokens, heads, width)), precision)
    k, v = (stored(rng.normal(size=(length, kv_heads, width)), precision) for _ in range(2))
    k[start + tokens :] = v[start + tokens :] = 60.0  # rows of the future would be noticed
    scale = width**-0.5
    expected = np.zeros_like(q)
    for t in range(tokens):
        end = start + t + 1
        seen = slice(max(0, end - (window or end)), end)
        for h in range(heads):
            scores = k[seen, h // (heads // kv_heads)] @ q[t, h] * scale
            p = np.exp(scores - scores.max())
            expected[t, h] = p / p.sum() @ v[seen, h // (heads // kv_heads)]
    launch = decode.attention_cached(
        tokens, heads, width, kv_heads=kv_heads, cache_length=length, scale=scale, window=window, precision=precision
    )
    assert_close(run(launch, [q, k, v, [start], np.zeros_like(q)], precision)[0], expected, precision)


def test_prefill_agrees_with_the_attention_that_trained():
    tokens, heads, width = 40, 2, 16
    q, k, v = np.random.default_rng(3).normal(size=(3, tokens, heads, width))
    options = {"kv_heads": heads, "cache_length": tokens, "scale": 0.25, "precision": "f32"}
    (cached,) = run(decode.attention_cached(tokens, heads, width, **options), [q, k, v, [0], np.zeros_like(q)])
    launch = attention.attention(1, tokens, heads, heads, width, scale=0.25, precision="f32")
    trained, _ = run(launch, [q, k, v, np.zeros(tokens), np.zeros_like(q), np.zeros((heads, tokens))])
    assert_close(cached, trained)


def test_heads_wider_than_a_workgroup_can_hold_are_refused():
    with pytest.raises(LimitExceeded, match="head width 256"):
        decode.attention_cached(1, 1, 256, kv_heads=1, cache_length=8, scale=1.0, precision="f32")
