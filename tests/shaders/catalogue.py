"""One launch of every kernel in every variant that changes its source."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from hybrid.contracts.loss_scaler import DynamicLossScaler
from hybrid.plan.kernels import (
    attention,
    decode,
    elementwise,
    embedding,
    loss,
    matmul,
    norm,
    optimizer,
    reduce,
    rope,
    state,
)
from hybrid.plan.kernels.base import Launch


def launches(precision: str) -> Iterator[Launch]:
    p = {"precision": precision}
    for n in (8, 7):  # numbers that do and do not divide by four
        for name in ("gelu", "silu", "relu2", "swiglu", "swiglu_grad", "broadcast"):
            yield getattr(elementwise, name)(n, **p)
        for name in ("gelu_grad", "silu_grad", "relu2_grad"):
            yield getattr(elementwise, name)(n, **p)
        for element in ("act", "f32"):
            yield elementwise.scale(n, 2.0, element=element, **p)
            yield elementwise.cast(n, to=element, **p)
            yield reduce.sum_all(n, element=element, **p)
            yield reduce.mean_all(n, element=element, **p)
            yield reduce.mse(n, element=element, **p)
            yield elementwise.add(n, element=element, **p)
            yield elementwise.mul(n, element=element, **p)
            yield loss.log_softmax(3, n, element=element, **p)
            yield loss.log_softmax_grad(3, n, element=element, **p)
        yield reduce.column_sum(3, n, **p)
        yield reduce.column_reduce(3, n, **p)
        for lanes in (1, 8):
            yield norm.rms_norm(3, n, eps=1e-5, lanes=lanes, **p)
            yield norm.rms_norm_dx(3, n, lanes=lanes, **p)
            yield norm.layer_norm_dx(3, n, lanes=lanes, **p)
            for bias in (True, False):
                yield norm.layer_norm(3, n, eps=1e-5, bias=bias, lanes=lanes, **p)
        yield norm.rms_norm_dw(3, n, **p)
        yield norm.layer_norm_dw(3, n, **p)
        yield rope.rope(3, 2, 2 * n, **p)
        yield embedding.embedding(3, n, row_begin=0, row_count=5, **p)
        yield embedding.embedding_grad(3, n, row_begin=0, row_count=5, **p)
        yield embedding.gather_rows(2, 3, n, **p)
        yield embedding.scatter_rows(2, 3, n, **p)
        for gradient in (True, False):
            yield loss.cross_entropy(3, n, gradient=gradient, **p)
        yield elementwise.add_noise(n, **p)
        yield elementwise.add_noise_grad(n, level=0, to="act", **p)
        yield elementwise.add_noise_grad(n, level=1, to="f32", **p)
        for rows in (1, 2):
            options = {"scale": 0.5, "rows": rows, **p}
            yield attention.attention(1, 5, 2, 1, n, **options)
            yield attention.attention_dq(1, 5, 2, 1, n, **options)
            yield attention.attention_dkv(1, 5, 2, 1, n, **options)
        yield attention.attention_delta(1, 5, 2, n, **p)
        yield decode.cache_write(2, n, cache_length=5, **p)
        yield decode.attention_cached(2, 2, n, kv_heads=1, cache_length=5, scale=0.5, **p)
    for history in (0, 3):
        yield embedding.ngram_buckets(6, 3, order=2, buckets=5, seed=0, history=history, **p)
    distillation = {"temperature": 2.0, "alpha_kl": 1.0, "alpha_nll": 0.5, **p}
    yield loss.topk_kl(3, 8, 4, **distillation)
    yield loss.topk_kl_grad(3, 8, 4, **distillation)
    for listed in (None, 2):
        yield loss.triplet_hinge(3, 8, listed, margin=0.2, **p)
        yield loss.triplet_hinge_grad(3, 8, listed, **p)
    yield elementwise.dropout(2, 12, site=0, rate=0.1, **p)
    where = {"source_width": 4, "source_first": 0, "target_width": 8, "target_first": 4}
    for element in ("act", "f32"):
        yield elementwise.copy_columns(3, 4, **where, element=element, **p)

    yield state.step_begin(**p)
    yield state.loss_accumulate(5, **p)
    yield state.grad_stats(8, partial_offset=0, **p)
    yield state.step_finalize(1, ring_rows=4, max_norm=1.0, scaler=DynamicLossScaler(), **p)
    yield optimizer.adamw(8, group=0, groups=2, beta1=0.9, beta2=0.999, eps=1e-8, **p)
    if precision == "mixed-f16":  # the only one with f16 copies of the weights
        yield optimizer.adamw(8, group=0, groups=2, beta1=0.9, beta2=0.999, eps=1e-8, half=True, **p)
        yield optimizer.to_half(8, **p)

    kinds = ("act", "f32")
    for form, a, b, c, k in product(matmul.FORMS, kinds, kinds, kinds, (8, 7)):
        yield matmul.product(form, 8, 8, k, a=a, b=b, c=c, **p)
    for form, bias, residual, k in product(matmul.FORMS, (True, False), (True, False), (8, 7)):
        yield matmul.product(form, 8, 8, k, bias=bias, residual=residual, **p)
    for form, variant in product(matmul.FORMS, matmul.tune_variants("nt", 64, 64, 64)):
        yield matmul.product(form, 64, 64, 64, variant=variant, **p)
