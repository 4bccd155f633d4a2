"""Cross-entropy with z-loss and log-softmax, against float64 and torch."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid.graph.ir import IGNORE
from hybrid.plan.kernels import loss
from kernels.harness import assert_close, padded, run, stored

pytestmark = pytest.mark.webgpu
SHAPES = [(1, 1), (33, 257), (5, 1000), (40, 64), (7, 65), (7, 63), (3, 50_257)]
Z = 1e-3


def _inputs(rows, vocabulary):
    rng = np.random.default_rng(rows + vocabulary)
    logits = rng.normal(0, 3, (rows, vocabulary)).astype(np.float32)
    targets = rng.integers(0, vocabulary, rows).astype(np.uint32)
    targets[rows // 2 + 1 :: 3] = IGNORE
    return logits, targets, rng.normal(size=rows).astype(np.float32)


def _expected(logits, targets, drows, z):
    x = logits.astype(np.float64)
    top = x.max(1, keepdims=True)
    lse = (top + np.log(np.exp(x - top).sum(1, keepdims=True)))[:, 0]
    counted = targets != IGNORE
    chosen = x[np.arange(len(x)), np.where(counted, targets, 0)]
    nll = np.where(counted, lse - chosen, 0)
    rows = np.where(counted, nll + z * lse**2, 0)
    gradient = (1 + 2 * z * lse[:, None]) * np.exp(x - lse[:, None])
    gradient[np.arange(len(x)), np.where(counted, targets, 0)] -= 1
    return rows, nll, lse, np.where(counted, drows, 0)[:, None] * gradient


@pytest.mark.parametrize("z", [0.0, Z])
@pytest.mark.parametrize("shape", SHAPES)
def test_losses_and_gradients_are_the_formula_for_any_row_weights(shape, z):
    rows, vocabulary = shape
    logits, targets, drows = _inputs(*shape)
    expected_rows, nll, lse, gradient = _expected(logits, targets, drows, z)
    empty = np.zeros(rows)
    logits = padded(logits)
    forward = loss.cross_entropy(rows, vocabulary, gradient=False, precision="f32")
    got = run(forward, [logits, targets, [z], empty, empty, empty])
    both = loss.cross_entropy(rows, vocabulary, gradient=True, precision="f32")
    got_gradient, *again = run(both, [logits, targets, [z], drows, empty, empty, empty])
    for a, b, e in zip(got, again, (expected_rows, nll, lse), strict=True):
        assert_close(a, e)
        assert np.array_equal(a, b)
    if vocabulary > 1:
        assert_close(got_gradient[:, :vocabulary], gradient)
    assert not got_gradient[:, vocabulary:].any()
    ignored = targets == IGNORE
    for result in (got[0], got[1], got_gradient):
        assert np.all(result[ignored] == 0)


def test_an_ignored_row_gives_exactly_nothing_even_if_its_logits_are_broken():
    logits = np.zeros((2, 8), np.float32)
    logits[0, 3] = np.nan
    launch = loss.cross_entropy(2, 8, gradient=True, precision="f32")
    targets = np.array([IGNORE, 5], np.uint32)
    gradient, rows, nll, _ = run(launch, [logits, targets, [Z], np.ones(2), *[np.zeros(2)] * 3])
    assert rows[0] == nll[0] == 0
    assert np.all(gradient[0] == 0)
    assert np.isfinite(gradient[1]).all()


@pytest.mark.parametrize("padding", [np.nan, np.inf, 3e38, -3e38])
def test_what_pads_a_row_counts_for_nothing(padding):
    logits = np.full((2, 8), padding, np.float32)
    logits[:, :5] = [[-300, -301, -302, -303, -304], [0, 1, 2, 3, 4]]
    launch = loss.cross_entropy(2, 5, gradient=True, precision="f32")
    gradient, rows, nll, lse = run(launch, [logits, [4, 1], [Z], np.ones(2), *[np.zeros(2)] * 3])
    expected_rows, expected_nll, expected_lse, expected = _expected(logits[:, :5], np.array([4, 1]), np.ones(2), Z)
    for mine, theirs in ((rows, expected_rows), (nll, expected_nll), (lse, expected_lse), (gradient[:, :5], expected)):
        assert_close(mine, theirs)
    assert not gradient[:, 5:].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("vocabulary", [64, 257])
def test_a_logit_that_is_not_finite_shows_in_the_loss(bad, vocabulary):
    logits = np.zeros((3, vocabulary), np.float32)
    logits[1, 17] = bad
    launch = loss.cross_entropy(3, vocabulary, gradient=False, precision="f32")
    rows, nll, _ = run(launch, [padded(logits), np.array([1, 2, 3]), [0.0], *[np.zeros(3)] * 3])
    assert np.isfinite(rows).tolist() == np.isfinite(nll).tolist() == [True, False, True]


def test_huge_logits_are_no_overflow():
    logits = np.array([[30_000.0, 29_999.0, -30_000.0, 0.0]], np.float32)
    launch = loss.cross_entropy(1, 4, gradient=False, precision="f32")
    rows, _, _ = run(launch, [logits, [1], [0.0], *[np.zeros(1)] * 3])
    np.testing.assert_allclose(rows, 1 + np.log1p(np.exp(-1)), atol=2e-3)  # an ulp of 30,000 is 0.002


@pytest.mark.torch
def test_torch_agrees_on_loss_and_gradient():
    import torch

    logits, targets, _ = _inputs(33, 257)
    x = torch.tensor(logits, requires_grad=True)
    labels = torch.tensor(np.where(targets == IGNORE, -100, targets.astype(np.int64)))
    rows = torch.nn.functional.cross_entropy(x, labels, reduction="none")
    rows = rows + Z * torch.logsumexp(x, 1) ** 2 * (labels >= 0)
    seed = 1 / float((labels >= 0).sum())
    (rows.sum() * seed).backward()
    launch = loss.cross_entropy(33, 257, gradient=True, precision="f32")
    gradient, got, _, _ = run(launch, [padded(logits), targets, [Z], np.full(33, seed), *[np.zeros(33)] * 3])
    assert_close(got, rows.detach().numpy())
    assert_close(gradient[:, :257], x.grad.numpy())


@pytest.mark.parametrize("shape", [(1, 1), (33, 257), (40, 64)])
def test_log_softmax_and_its_gradient(shape, precision):
    rng = np.random.default_rng(1)
    x = stored(rng.normal(0, 2, shape), precision)
    dy = rng.normal(size=shape).astype(np.float32)
    (y,) = run(loss.log_softmax(*shape, precision=precision), [x, np.zeros(shape)], precision)
    expected = x - np.log(np.exp(x).sum(1, keepdims=True))
    assert_close(y, expected)
    (dx,) = run(loss.log_softmax_grad(*shape, precision=precision), [y, dy, np.zeros(shape)], precision)
    if shape[1] > 1:
        assert_close(dx, dy - np.exp(expected) * dy.sum(1, keepdims=True), precision)
