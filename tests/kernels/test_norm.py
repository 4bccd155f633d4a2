"""RMS norm and layer norm against float64 formulas, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid.plan.kernels import norm, reduce
from kernels.harness import assert_close, run, stored

pytestmark = pytest.mark.webgpu
EPS = 1e-5
SHAPES = [(1, 1), (33, 36), (5, 257), (130, 64)]


def _inputs(rows: int, columns: int, precision: str):
    rng = np.random.default_rng(rows * 1000 + columns)
    x = stored(rng.normal(0.3, 1.5, (rows, columns)), precision)
    dy = stored(rng.normal(size=(rows, columns)), precision)
    weight, bias = (rng.normal(size=columns).astype(np.float32).astype(np.float64) for _ in range(2))
    return x, dy, weight, bias


def _statistics(x, layer: bool):
    mean = x.mean(1) if layer else np.zeros(len(x))
    return mean, 1 / np.sqrt(((x - mean[:, None]) ** 2).mean(1) + EPS)


@pytest.mark.parametrize("lanes", [1, 8])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["rms", "layer", "unbiased"])
def test_forward_is_the_formula(kind, shape, lanes, precision):
    rows, columns = shape
    x, _, weight, bias = _inputs(*shape, precision)
    mean, rstd = _statistics(x, kind != "rms")
    expected = (x - mean[:, None]) * rstd[:, None] * weight + (bias if kind == "layer" else 0)
    y, stat = np.zeros(shape), np.zeros(rows)
    if kind == "rms":
        launch = norm.rms_norm(rows, columns, eps=EPS, precision=precision, lanes=lanes)
        got_y, got_rstd = run(launch, [x, weight, y, stat], precision)
    else:
        launch = norm.layer_norm(rows, columns, eps=EPS, precision=precision, bias=kind == "layer", lanes=lanes)
        arrays = [x, weight, *([bias] if kind == "layer" else []), y, stat, stat]
        got_y, got_mean, got_rstd = run(launch, arrays, precision)
        assert_close(got_mean, mean)
    assert_close(got_y, expected, precision)
    assert_close(got_rstd, rstd)


@pytest.mark.parametrize("lanes", [1, 8])
@pytest.mark.parametrize("shape", [(33, 36), (5, 257), (130, 64)])
@pytest.mark.parametrize("layer", [False, True])
def test_input_gradient_is_the_formula(layer, shape, lanes, precision):
    rows, columns = shape
    x, dy, weight, _ = _inputs(*shape, precision)
    mean, rstd = (s.astype(np.float32).astype(np.float64) for s in _statistics(x, layer))
    n, g = (x - mean[:, None]) * rstd[:, None], dy * weight
    expected = g - n * (g * n).mean(1, keepdims=True) - (g.mean(1, keepdims=True) if layer else 0)
    expected *= rstd[:, None]
    if layer:
        launch = norm.layer_norm_dx(rows, columns, precision=precision, lanes=lanes)
        arrays = [x, weight, mean, rstd, dy, np.zeros(shape)]
    else:
        launch = norm.rms_norm_dx(rows, columns, precision=precision, lanes=lanes)
        arrays = [x, weight, rstd, dy, np.zeros(shape)]
    assert_close(run(launch, arrays, precision)[0], expected, precision)


@pytest.mark.parametrize("shape", [*SHAPES, (2100, 8)])
@pytest.mark.parametrize("kind", ["rms", "layer", "sum"])
def test_parameter_gradients_add_to_what_is_there(kind, shape, precision):
    rows, columns = shape
    x, dy, _, _ = _inputs(*shape, precision)
    mean, rstd = (s.astype(np.float32).astype(np.float64) for s in _statistics(x, kind == "layer"))
    terms = dy if kind == "sum" else dy * (x - mean[:, None]) * rstd[:, None]
    partials = np.zeros((reduce.blocks_of(rows), columns))
    if kind == "rms":
        launch, arrays = norm.rms_norm_dw(rows, columns, precision=precision), [x, rstd, dy, partials]
    elif kind == "layer":
        launch, arrays = norm.layer_norm_dw(rows, columns, precision=precision), [x, mean, rstd, dy, partials]
    else:
        launch, arrays = reduce.column_sum(rows, columns, precision=precision), [dy, partials]
    (partials,) = run(launch, arrays, precision)
    before = np.full(columns, 0.5)
    (gradient,) = run(reduce.column_reduce(rows, columns, precision=precision), [partials, before], precision)
    assert_close(gradient, before + terms.sum(0))


def test_a_large_activation_raises_the_flag_and_a_fitting_one_does_not(f16_device):
    x, weight = np.ones((2, 4)), np.ones(4)
    launch = norm.rms_norm(2, 4, eps=EPS, precision="mixed-f16")
    assert not run(launch, [x, weight * 65_504, np.zeros((2, 4)), np.zeros(2)], "mixed-f16").overflow
    assert run(launch, [x, weight * 65_600, np.zeros((2, 4)), np.zeros(2)], "mixed-f16").overflow


def test_more_than_65535_workgroups_are_folded():
    rows = 65_536 * 32 + 7  # one thread a row, 32 rows a workgroup
    launch = norm.rms_norm(rows, 1, eps=EPS, precision="f32")
    assert launch.workgroups[1] == 2
    x = np.where(np.arange(rows) % 3 == 0, 2.0, -3.0)[:, None]
    y, rstd = run(launch, [x, np.ones(1), np.zeros_like(x), np.zeros(rows)])
    assert_close(y, np.sign(x))
    assert_close(rstd, 1 / np.abs(x[:, 0]))
