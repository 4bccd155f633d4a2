"""The gradient of every op is that of finite differences, in float64, under random upstream weights."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from hybrid.graph.autodiff import RULES
from hybrid.ops import Ops
from ops.cases import CASES, Case, random_arrays, run, traced, upstream_weights

STEP = 1e-5
NOT_TRACED = {"block"}  # a scope, not an operation
NOT_IN_TABLE = {"dropout"}  # random: tests/ops/test_dropout.py


@pytest.mark.torch
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradient_equals_finite_differences(case: Case) -> None:
    it = traced(case, "f64")
    parameters, floats = random_arrays(case, 1)
    upstream = upstream_weights(case, it, 2)

    def loss() -> float:
        outputs, _ = run(it, parameters, floats, upstream)
        return sum(float(np.sum(y * w)) for y, w in zip(outputs, upstream, strict=True))

    _, gradients = run(it, parameters, floats, upstream)
    for name, array in {**parameters, **floats}.items():
        expected = np.empty_like(array)
        for place in np.ndindex(array.shape):
            value = array[place]
            array[place] = value + STEP
            above = loss()
            array[place] = value - STEP
            below = loss()
            array[place] = value
            expected[place] = (above - below) / (2 * STEP)
        np.testing.assert_allclose(gradients[name], expected, rtol=1e-7, atol=1e-8, err_msg=name)


@pytest.mark.torch
def test_the_table_covers_every_op_and_every_rule() -> None:
    covered = {node.op for case in CASES for node in traced(case, "f64").executor.graph.nodes}
    assert set(RULES) - NOT_IN_TABLE <= covered
    ops = {name for name, _ in inspect.getmembers(Ops, inspect.isfunction) if not name.startswith("_")}
    assert ops - NOT_TRACED == set(RULES)
