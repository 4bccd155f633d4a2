"""Functions applied element by element, against float64 formulas."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid.plan.kernels import elementwise
from kernels.harness import assert_close, run, stored

pytestmark = pytest.mark.webgpu
SIZES = [1, 257, 1188]


def sigmoid(v):
    return 1 / (1 + np.exp(-v))


def gelu(v):
    return 0.5 * v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3)))


def gelu_slope(v):
    inner = np.sqrt(2 / np.pi) * (v + 0.044715 * v**3)
    slope = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * v**2)
    return 0.5 * (1 + np.tanh(inner)) + 0.5 * v * (1 - np.tanh(inner) ** 2) * slope


def silu_slope(v):
    return sigmoid(v) * (1 + v * (1 - sigmoid(v)))


UNARY = {"gelu": gelu, "silu": lambda v: v * sigmoid(v), "relu2": lambda v: np.maximum(v, 0) ** 2}
BINARY = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "swiglu": lambda gate, up: gate * sigmoid(gate) * up,
    "gelu_grad": lambda x, dy: dy * gelu_slope(x),
    "silu_grad": lambda x, dy: dy * silu_slope(x),
    "relu2_grad": lambda x, dy: dy * 2 * np.maximum(x, 0),
}


def _draw(size, precision, count):
    rng = np.random.default_rng(size)
    return [stored(rng.normal(0, 2, size), precision) for _ in range(count)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_tensor(name, size, precision):
    (x,) = _draw(size, precision, 1)
    (y,) = run(getattr(elementwise, name)(size, precision=precision), [x, np.zeros(size)], precision)
    assert_close(y, UNARY[name](x), precision)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_tensors(name, size, precision):
    a, b = _draw(size, precision, 2)
    (y,) = run(getattr(elementwise, name)(size, precision=precision), [a, b, np.zeros(size)], precision)
    assert_close(y, BINARY[name](a, b), precision)


@pytest.mark.parametrize("size", SIZES)
def test_swiglu_gradient(size, precision):
    gate, up, dy = _draw(size, precision, 3)
    launch = elementwise.swiglu_grad(size, precision=precision)
    dgate, dup = run(launch, [gate, up, dy, np.zeros(size), np.zeros(size)], precision)
    assert_close(dgate, dy * up * silu_slope(gate), precision)
    assert_close(dup, dy * gate * sigmoid(gate), precision)


@pytest.mark.parametrize("size", SIZES)
def test_scale_cast_and_broadcast(size, precision):
    (x,) = _draw(size, precision, 1)
    zeros = np.zeros(size)
    (scaled,) = run(elementwise.scale(size, -0.37, precision=precision), [x, zeros], precision)
    assert_close(scaled, -0.37 * x, precision)
    in_f32 = elementwise.scale(size, 3.7, precision=precision, element="f32")
    assert_close(run(in_f32, [x, zeros], precision)[0], 3.7 * x)
    (wide,) = run(elementwise.cast(size, to="f32", precision=precision), [x, zeros], precision)
    assert np.array_equal(wide, x.astype(np.float32))
    (narrow,) = run(elementwise.cast(size, to="act", precision=precision), [x + 1e-5, zeros], precision)
    assert_close(narrow, x + 1e-5, precision)
    (filled,) = run(elementwise.broadcast(size, precision=precision), [np.array([2.5]), zeros], precision)
    assert np.all(filled == 2.5)


@pytest.mark.parametrize("name", [*UNARY, *[n for n in BINARY if n.endswith("_grad")]])
def test_far_arguments_neither_overflow_nor_turn_into_nan(name):
    x = np.array([-1e4, -300.0, -90.0, -20.0, 20.0, 90.0, 300.0, 1e4])
    arrays = [x, np.zeros(8)] if name in UNARY else [x, np.ones(8), np.zeros(8)]
    (y,) = run(getattr(elementwise, name)(8, precision="f32"), arrays)
    limit = {"gelu": np.maximum(x, 0), "silu": np.maximum(x, 0), "relu2": np.maximum(x, 0) ** 2}
    slope = {"gelu_grad": (x > 0) * 1.0, "silu_grad": (x > 0) * 1.0, "relu2_grad": 2 * np.maximum(x, 0)}
    np.testing.assert_allclose(y, {**limit, **slope}[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_nan_is_never_hidden(name):
    x = np.array([1.0, np.nan, 2.0, 3.0])
    arrays = [x, np.zeros(4)] if name in UNARY else [x, np.ones(4), np.zeros(4)]
    (y,) = run(getattr(elementwise, name)(4, precision="f32"), arrays)
    assert np.isnan(y).tolist() == [False, True, False, False]


def test_a_product_beyond_f16_raises_the_flag(f16_device):
    for size in (4, 5):
        launch = elementwise.mul(size, precision="mixed-f16")
        fits, overflows = np.full(size, 250.0), np.full(size, 263.0)
        assert not run(launch, [fits, fits, np.zeros(size)], "mixed-f16").overflow
        assert run(launch, [overflows, fits, np.zeros(size)], "mixed-f16").overflow


def test_split_and_concat_are_copies_of_columns(precision):
    (x,) = _draw((5, 12), precision, 1)
    left, right = np.zeros((5, 5)), np.zeros((5, 7))
    copy = lambda **where: elementwise.copy_columns(5, precision=precision, **where)  # noqa: E731
    options = {"source_width": 12, "target_first": 0}
    (left,) = run(copy(columns=5, source_first=0, target_width=5, **options), [x, left], precision)
    (right,) = run(copy(columns=7, source_first=5, target_width=7, **options), [x, right], precision)
    assert np.array_equal(left, x[:, :5])
    assert np.array_equal(right, x[:, 5:])
    options = {"source_first": 0, "target_width": 12}
    (whole,) = run(copy(columns=7, source_width=7, target_first=0, **options), [right, np.zeros((5, 12))], precision)
    (whole,) = run(copy(columns=5, source_width=5, target_first=7, **options), [left, whole], precision)
    assert np.array_equal(whole, np.concatenate([x[:, 5:], x[:, :5]], 1))


def test_more_than_65535_workgroups_are_folded():
    size = 65_536 * 64 + 3
    launch = elementwise.scale(size, 2.0, precision="f32")
    assert launch.workgroups[1] == 2
    x = np.arange(size, dtype=np.float32)
    (y,) = run(launch, [x, np.zeros(size, np.float32)])
    assert np.array_equal(y, 2 * x)
