"""Values and gradients of every op agree with torch, in double precision and in float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybrid.graph.ir import F32
from hybrid.graph.tracer import Tracer
from hybrid.ops import rope_table
from ops.cases import CASES, Array, Case, random_arrays, run, traced, upstream_weights

pytestmark = pytest.mark.torch

# Norm of the difference over norm: the contract for one op in f32, and rounding in f64.
TOLERANCE = {"f32": 1e-5, "f64": 1e-12}


def relative_error(got: Array, expected: Array) -> float:
    """Norm of the difference over norm; absolute below norm 1, where some gradients are exactly zero."""
    return float(np.linalg.norm(got - expected) / max(float(np.linalg.norm(expected)), 1.0))


@pytest.mark.parametrize("precision", ["f64", "f32"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_value_and_gradient_equal_torch(case: Case, precision: str) -> None:
    it = traced(case, precision)
    parameters, floats = random_arrays(case, 3)
    upstream = upstream_weights(case, it, 4)
    outputs, gradients = run(it, parameters, floats, upstream)

    leaves = {n: torch.tensor(a, dtype=torch.float64, requires_grad=True) for n, a in {**parameters, **floats}.items()}
    ids = {n: torch.tensor(a.astype(np.int64)) for n, a in case.ids.items()}
    fixed = {n: torch.tensor(a) for n, a in case.fixed.items()}
    expected = case.torch({**leaves, **ids, **fixed})
    expected = expected if isinstance(expected, tuple) else (expected,)
    torch.autograd.backward(expected, [torch.tensor(w) for w in upstream])
    # Rotary tables are float32 constants in every precision; all else is exact to rounding.
    limit = 1e-6 if case.name == "rope" and precision == "f64" else TOLERANCE[precision]
    for got, want in zip(outputs, expected, strict=True):
        assert relative_error(got, want.detach().numpy()) < limit
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert relative_error(gradients[name], leaf.grad.numpy()) < limit, name


def test_rope_equals_the_llama_rotary_embedding() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    from hybrid.backends.reference import kernels

    heads, width, length, base = 3, 16, 64, 5000.0
    config = LlamaConfig(
        hidden_size=heads * width,
        num_attention_heads=heads,
        max_position_embeddings=length,
        rope_parameters={"rope_type": "default", "rope_theta": base},
    )
    x = np.random.default_rng(0).standard_normal((2, length, heads, width)).astype(np.float32)
    positions = np.tile(np.arange(length, dtype=np.uint32), (2, 1))
    cosine, sine = LlamaRotaryEmbedding(config)(torch.tensor(x), torch.tensor(positions.astype(np.int64)))
    expected, _ = apply_rotary_pos_emb(torch.tensor(x), torch.tensor(x), cosine, sine, unsqueeze_dim=2)
    table = np.frombuffer(rope_table(length, width, base), "<f4").reshape(length, width)
    got = kernels.rope(x, positions, table, inverse=False)
    assert relative_error(got, expected.numpy()) < 1e-5
    assert relative_error(kernels.rope(got, positions, table, inverse=True), x) < 1e-6


def test_attention_equals_scaled_dot_product_attention() -> None:
    from hybrid.backends.reference import kernels

    draw = np.random.default_rng(1).standard_normal
    q, k, v = draw((2, 40, 4, 8)), draw((2, 40, 2, 8)), draw((2, 40, 2, 8))
    ones = np.ones((2, 40), np.uint32)
    got, lse = kernels.attention(q, k, v, ones, scale=8**-0.5, window=None)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(torch.tensor(x).transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    assert relative_error(got, expected.transpose(1, 2).numpy()) < 1e-12
    assert lse.shape == (2, 4, 40)


def test_attention_is_the_same_however_it_is_chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybrid.backends.reference import kernels

    draw = np.random.default_rng(2).standard_normal
    q, k, v, do = draw((3, 9, 4, 8)), draw((3, 9, 2, 8)), draw((3, 9, 2, 8)), draw((3, 9, 4, 8))
    segments = np.repeat(np.array([[1, 2, 3]], np.uint32), 3, axis=1).repeat(3, axis=0)
    settings = {"scale": 0.3, "window": 4}
    results = []
    for chunk in (1, 500, 1 << 20):
        monkeypatch.setattr(kernels, "CHUNK", chunk)
        o, lse = kernels.attention(q, k, v, segments, **settings)
        rest = (do, lse, kernels.attention_delta(o, do), segments)
        gradients = kernels.attention_dq(q, k, v, *rest, **settings), *kernels.attention_dkv(q, k, v, *rest, **settings)
        results.append((o, lse, *gradients))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_head_is_the_same_however_it_is_chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybrid.backends.reference import kernels

    draw = np.random.default_rng(3).standard_normal
    x, weight, drows = draw((11, 4)), draw((9, 4)), draw(11)
    targets, z = np.arange(11, dtype=np.uint32) % 9, np.array([0.1])
    results = []
    for chunk in (1, 5, 1 << 20):
        monkeypatch.setattr(kernels, "CHUNK", chunk)
        loss, nll, lse = kernels.cross_entropy_head(x, weight, targets, z)
        dw = np.zeros_like(weight)
        dx = kernels.cross_entropy_head_grad(x, weight, targets, z, lse, drows, into=dw)
        results.append((loss, nll, lse, dx, dw))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)


def test_ignored_rows_give_exactly_nothing_even_where_the_logits_are_not_finite() -> None:
    from hybrid.backends.reference import kernels
    from hybrid.data.batch import IGNORE

    x, weight = np.ones((2, 2)), np.ones((3, 2))
    x[0] = np.inf
    targets, z, drows = np.array([IGNORE, 1], np.uint32), np.array([0.1]), np.ones(2)
    with np.errstate(invalid="ignore"):
        loss, nll, lse = kernels.cross_entropy_head(x, weight, targets, z)
        dx = kernels.cross_entropy_head_grad(x, weight, targets, z, lse, drows, into=None)
    assert loss[0] == nll[0] == 0.0
    assert (dx[0] == 0.0).all()
    assert np.isfinite(dx).all()


def test_f32_values_stay_f32_in_mixed_precision() -> None:
    tracer = Tracer()
    x = tracer.input("x", (3,), F32)
    assert tracer.sum(x).dtype == F32
