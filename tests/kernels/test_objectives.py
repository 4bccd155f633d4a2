"""The kernels of n-gram tables, distillation, triplets and noise, against their definitions in float64 or integers."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid.graph.ir import IGNORE
from hybrid.ops import NO_TOKEN, ngram_bucket
from hybrid.plan.kernels import elementwise, embedding, loss
from kernels.harness import assert_close, padded, run, stored
from ops.golden import check_distillation, check_triplets, distillations, triplets

pytestmark = pytest.mark.webgpu


# --- n-grams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("order", "buckets", "seed"), [(2, 5, 0), (3, 29_744, 1), (11, 2**32 - 1, 2**32 - 1)])
def test_buckets_are_those_of_the_hash_in_integers(order, buckets, seed):
    rng = np.random.default_rng(order)
    ids = rng.integers(0, 2**32, (3, 40), dtype=np.uint64).astype(np.uint32)
    segments = np.sort(rng.integers(0, 4, (3, 40)), axis=1)
    launch = embedding.ngram_buckets(120, 40, order=order, buckets=buckets, seed=seed, precision="f32")
    (rows,) = run(launch, [ids, segments, np.zeros((3, 40))])
    for b, t in np.ndindex(3, 40):
        gram = [
            int(ids[b, i]) if i >= 0 and segments[b, i] == segments[b, t] else NO_TOKEN
            for i in range(t - order + 1, t + 1)
        ]
        assert rows[b, t] == ngram_bucket(gram, buckets, seed)


@pytest.mark.parametrize(("order", "history"), [(2, 1), (2, 3), (4, 3), (6, 3)])
def test_decoding_continues_the_tokens_before(order, history):
    rng = np.random.default_rng(history)
    before, ids = rng.integers(0, 50, history), rng.integers(0, 50, 5)
    options = {"order": order, "buckets": 1009, "seed": 3, "precision": "f32"}
    launch = embedding.ngram_buckets(5, 5, history=history, **options)
    (rows,) = run(launch, [ids, before, np.zeros(5)])
    known = [NO_TOKEN] * order + before.tolist() + ids.tolist()
    start = order + history
    grams = [known[start + t - order + 1 : start + t + 1] for t in range(5)]
    assert rows.tolist() == [ngram_bucket(gram, 1009, 3) for gram in grams]


# --- distillation ----------------------------------------------------------------------------------------------------

SETTINGS = {"temperature": 2.0, "alpha_kl": 0.7, "alpha_nll": 0.4}


def _teacher(rows, vocabulary, columns):
    rng = np.random.default_rng(rows + vocabulary)
    logits = rng.normal(0, 2, (rows, vocabulary)).astype(np.float32)
    ids = np.stack([rng.permutation(vocabulary)[:columns] for _ in range(rows)]).astype(np.uint32)
    ids[::4, columns // 2] = IGNORE
    ids[2::7] = IGNORE  # rows that nobody teaches
    probs = rng.random((rows, columns)).astype(np.float32)
    probs[1::5] = 0
    targets = rng.integers(0, columns, rows).astype(np.uint32)
    targets[3::4] = IGNORE
    return logits, ids, probs, targets, rng.normal(size=rows).astype(np.float32)


def _distilled(logits, ids, probs, targets, temperature, alpha_kl, alpha_nll):
    """(loss, kl, nll, gradient of the logits), a row at a time, in float64."""
    results = []
    for row, i, p, target in zip(logits.astype(np.float64), ids, probs.astype(np.float64), targets, strict=True):
        there, gradient = i != IGNORE, np.zeros(len(row))
        if not there.any():
            results.append((0.0, 0.0, 0.0, gradient))
            continue
        x, p = row[i[there]] / temperature, np.maximum(p[there], 0)
        p = p / p.sum() if p.sum() > 0 else np.full(len(p), 1 / len(p))
        log_q = x - np.log(np.exp(x - x.max()).sum()) - x.max()
        floored = np.maximum(p, 1e-8)
        kl = (floored * (np.log(floored) - np.maximum(log_q, np.log(1e-8)))).sum()
        slope, nll = alpha_kl * (np.exp(log_q) - p), 0.0
        if target != IGNORE and there[target]:
            one_hot = (np.arange(len(i)) == target)[there]
            nll = -np.maximum(log_q, np.log(1e-8))[one_hot][0]
            slope = slope + alpha_nll * (np.exp(log_q) - one_hot)
        np.add.at(gradient, i[there], slope / temperature)
        results.append((alpha_kl * kl + alpha_nll * nll, kl, nll, gradient))
    return [np.array(part) for part in zip(*results, strict=True)]


@pytest.mark.parametrize("shape", [(1, 2, 1), (33, 257, 8), (5, 1000, 256), (40, 64, 64)])
def test_distillation_and_its_gradient_are_the_formula_for_any_row_weights(shape):
    rows = shape[0]
    logits, *teacher, drows = _teacher(*shape)
    *expected, gradient = _distilled(logits, *teacher, **SETTINGS)
    launch = loss.topk_kl(*shape, **SETTINGS, precision="f32")
    logits = padded(logits)
    got = run(launch, [logits, *teacher, *[np.full(rows, 9.0)] * 3])
    for mine, theirs in zip(got, expected, strict=True):
        assert_close(mine, theirs)
    launch = loss.topk_kl_grad(*shape, **SETTINGS, precision="f32")
    (mine,) = run(launch, [logits, *teacher, drows])
    gradient = np.pad(gradient, ((0, 0), (0, logits.shape[1] - shape[1])))
    if shape[2] > 1:
        assert_close(mine, gradient * drows[:, None])
    assert not mine[gradient == 0].any()
    launch = loss.topk_kl_grad(*shape, **SETTINGS, shared_upstream=True, precision="f32")
    (mine,) = run(launch, [logits, *teacher, [0.5]])
    if shape[2] > 1:
        assert_close(mine, gradient * 0.5)


def test_a_token_listed_twice_counts_twice():
    logits = np.array([[1.0, 0.0, -1.0]], np.float32)
    ids, probs, target = np.array([[1, 0, 1]]), np.array([[0.25, 0.5, 0.25]]), [IGNORE]
    *_, gradient = _distilled(logits, ids, probs, target, **SETTINGS)
    launch = loss.topk_kl_grad(1, 3, 3, **SETTINGS, precision="f32")
    (mine,) = run(launch, [padded(logits), ids, probs, target, np.ones(1)])
    assert_close(mine[:, :3], gradient)


def test_the_floor_bounds_the_loss_and_not_the_gradient():
    logits = np.array([[100.0, 0.0, 5.0]], np.float32)
    arguments = [padded(logits), np.array([[1, 0]]), np.array([[1.0, 0.0]]), [0]]
    settings = {"temperature": 1.0, "alpha_kl": 1.0, "alpha_nll": 1.0}
    total, kl, nll = run(loss.topk_kl(1, 3, 2, **settings, precision="f32"), [*arguments, *[np.zeros(1)] * 3])
    np.testing.assert_allclose([kl[0], nll[0], total[0]], [-np.log(1e-8), -np.log(1e-8), -2 * np.log(1e-8)], rtol=1e-6)
    (gradient,) = run(loss.topk_kl_grad(1, 3, 2, **settings, precision="f32"), [*arguments, np.ones(1)])
    np.testing.assert_allclose(gradient, [[2.0, -2.0, 0.0, 0.0]], atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gathered_logit_that_is_not_finite_shows_in_the_loss_of_its_row_alone(bad):
    logits = np.zeros((3, 8), np.float32)
    logits[:, 7] = bad
    ids = np.array([[0, 1], [7, 2], [IGNORE, IGNORE]])
    arguments = [logits, ids, np.ones((3, 2)), [IGNORE] * 3]
    total, kl, _ = run(loss.topk_kl(3, 8, 2, **SETTINGS, precision="f32"), [*arguments, *[np.zeros(3)] * 3])
    assert np.isfinite(total).tolist() == np.isfinite(kl).tolist() == [True, False, True]
    assert total[2] == 0
    (gradient,) = run(loss.topk_kl_grad(3, 8, 2, **SETTINGS, precision="f32"), [*arguments, np.ones(3)])
    assert not gradient[2].any()
    assert np.isfinite(gradient[0]).all()


def test_distillation_is_that_of_the_vectors():
    for case in distillations():
        size, teacher = (*case.logits.shape, case.ids.shape[1]), (case.ids, case.probs, case.targets)
        launch = loss.topk_kl(*size, **case.settings, precision="f32")
        logits = padded(case.logits)
        losses = run(launch, [logits, *teacher, *[np.zeros(size[0])] * 3])
        launch = loss.topk_kl_grad(*size, **case.settings, shared_upstream=True, precision="f32")
        (gradient,) = run(launch, [logits, *teacher, np.ones(1)])
        check_distillation(case, *(rows.astype(np.float64) for rows in losses), gradient[:, : size[1]])


# --- triplets --------------------------------------------------------------------------------------------------------


def _triplets(rows, width, listed, precision):
    rng = np.random.default_rng(rows + width)
    sides = [stored(rng.normal(size=(rows, width)), precision) for _ in range(3)]
    sides[2][::3] += 3  # far enough to be inactive
    mask = np.ones(rows)
    mask[1::4] = 0
    columns = rng.integers(0, width, (rows, listed)) if listed else None
    return sides, mask, columns, rng.normal(size=rows).astype(np.float32)


@pytest.mark.parametrize(("rows", "width", "listed"), [(1, 1, None), (9, 257, None), (5, 36, 7), (3, 8, 20)])
def test_triplets_are_hinged_and_pull_and_push(rows, width, listed, precision):
    sides, mask, columns, drows = _triplets(rows, width, listed, precision)
    index = [] if columns is None else [columns]
    chosen = sides if columns is None else [np.take_along_axis(x, columns, 1) for x in sides]
    a, p, n = chosen
    expected = np.where(mask, np.maximum(0, 0.2 + ((a - p) ** 2).mean(1) - ((a - n) ** 2).mean(1)), 0)
    launch = loss.triplet_hinge(rows, width, listed, margin=0.2, precision=precision)
    (hinge,) = run(launch, [*sides, mask, *index, np.full(rows, 9.0)], precision)
    assert_close(hinge, expected)
    assert np.array_equal(hinge == 0, expected == 0)
    launch = loss.triplet_hinge_grad(rows, width, listed, precision=precision)
    for left, right in ((2, 1), (1, 0), (0, 2)):
        part = 2 * (chosen[left] - chosen[right]) / (listed or width) * (drows * (expected > 0))[:, None]
        gradient = part if columns is None else np.zeros((rows, width))
        if columns is not None:
            np.add.at(gradient, (np.arange(rows)[:, None], columns), part)
        arrays = [sides[left], sides[right], mask, hinge, drows, *index, np.full((rows, width), 9.0)]
        (mine,) = run(launch, arrays, precision)
        assert_close(mine, gradient, precision)
        assert not mine[expected == 0].any()


def test_triplets_are_those_of_the_vectors():
    for case in triplets():
        (rows, width), listed = case.sides[0].shape, None if case.columns is None else case.columns.shape[1]
        index = [] if case.columns is None else [case.columns]
        launch = loss.triplet_hinge(rows, width, listed, margin=case.margin, precision="f32")
        (hinge,) = run(launch, [*case.sides, case.mask, *index, np.zeros(rows)])
        launch = loss.triplet_hinge_grad(rows, width, listed, precision="f32")
        rest = [case.mask, hinge, np.ones(rows), *index, np.zeros((rows, width))]
        a, p, n = case.sides
        gradients = [run(launch, [*pair, *rest])[0] for pair in ((n, p), (p, a), (a, n))]
        check_triplets(case, hinge.astype(np.float64), *gradients)


def test_a_masked_row_gives_nothing_even_if_it_is_broken():
    broken = np.array([[np.nan, 1.0], [1.0, 2.0]])
    sides = [broken, np.zeros((2, 2)), np.zeros((2, 2))]
    launch = loss.triplet_hinge(2, 2, None, margin=0.5, precision="f32")
    assert run(launch, [*sides, [0, 1], np.zeros(2)])[0].tolist() == [0.0, 0.5]
    assert np.isnan(run(launch, [*sides, [1, 1], np.zeros(2)])[0][0])
    launch = loss.triplet_hinge_grad(2, 2, None, precision="f32")
    (gradient,) = run(launch, [broken, np.zeros((2, 2)), [0, 1], [0.0, 0.5], np.ones(2), np.zeros((2, 2))])
    np.testing.assert_allclose(gradient, [[0, 0], [1, 2]])


# --- noise -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 257, 1188])
def test_noise_is_added_at_its_level(size, precision):
    rng = np.random.default_rng(size)
    x, noise = stored(rng.normal(size=size), precision), rng.normal(size=size).astype(np.float32)
    levels = np.array([0.8, -0.6], np.float32)
    (y,) = run(elementwise.add_noise(size, precision=precision), [x, noise, levels, np.zeros(size)], precision)
    assert_close(y, levels[0] * x + levels[1].astype(np.float64) * noise, precision)
    for level, to in ((0, "act"), (1, "f32")):
        launch = elementwise.add_noise_grad(size, level=level, to=to, precision=precision)
        (result,) = run(launch, [x, levels, np.zeros(size)], precision)
        assert_close(result, levels[level].astype(np.float64) * x, precision)


def test_noise_that_f16_cannot_hold_raises_the_flag(f16_device):
    outputs = run(elementwise.add_noise(2, precision="mixed-f16"), [[1, 1], [1e6, 1], [1, 1], [0, 0]], "mixed-f16")
    assert outputs.overflow
    assert outputs[0].tolist() == [0.0, 2.0]
