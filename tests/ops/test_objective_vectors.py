"""`bridge/vectors/kd.json` and `triplet.json`: the losses and gradients of `topk_kl` and `triplet_hinge`, in the
reference and, where there is torch, in torch; `tests/kernels/test_objectives.py` holds the device to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hybrid.backends.reference.executor import Executor
from hybrid.graph.autodiff import backward
from hybrid.graph.ir import ACT, F32, U32
from hybrid.graph.tracer import Tracer
from hybrid.ops import Linear
from ops.golden import (
    Array,
    Distillation,
    Triplets,
    check_distillation,
    check_triplets,
    distillations,
    triplets,
)


def reference(inputs: dict[str, tuple[Array, str]], parameters: dict[str, Array], function: Any) -> dict[str, Array]:
    """Outputs of `function(tracer, inputs, parameters)`, a loss [N] first, and gradients of the act inputs under
    upstream 1."""
    tracer = Tracer()
    values = {name: tracer.input(name, array.shape, dtype) for name, (array, dtype) in inputs.items()}
    leaves = {name: tracer.parameter(name, array.shape) for name, array in parameters.items()}
    outputs = function(tracer, {**values, **leaves})
    graph = tracer.graph
    graph.outputs.update({f"y{i}": y for i, y in enumerate(outputs)})
    wanted = [value for value in values.values() if value.dtype == ACT]
    given = backward(graph, {outputs[0]: tracer.input("one", outputs[0].shape, F32)}, wrt=wanted)
    graph.outputs.update({f"d_{value.name}": gradient for value, gradient in given.items()})
    arrays = {name: array for name, (array, _) in inputs.items()}
    gradients = {name: np.zeros(array.shape) for name, array in parameters.items()}
    ones = np.ones(outputs[0].shape)
    return Executor(graph, "f64").run({**arrays, "one": ones}, parameters, gradients).outputs


@pytest.mark.parametrize("case", list(distillations()), ids=lambda case: case.name)
def test_the_reference_distils_as_the_vectors_say(case: Distillation) -> None:
    """Hidden states are the logits, under an output projection that is the identity."""
    inputs = {
        "x": (case.logits, ACT),
        "ids": (case.ids, U32),
        "probs": (case.probs, F32),
        "targets": (case.targets, U32),
    }
    identity = np.eye(case.logits.shape[1])
    out = reference(
        inputs,
        {"head": identity},
        lambda ops, v: ops.topk_kl(v["x"], Linear(v["head"]), v["ids"], v["probs"], v["targets"], **case.settings),
    )
    check_distillation(case, out["y0"], out["y1"], out["y2"], out["d_x"])


@pytest.mark.parametrize("case", list(triplets()), ids=lambda case: case.name)
def test_the_reference_has_the_hinges_of_the_vectors(case: Triplets) -> None:
    inputs = {name: (side, ACT) for name, side in zip("apn", case.sides, strict=True)}
    inputs["mask"] = (case.mask, U32)
    if case.columns is not None:
        inputs["columns"] = (case.columns, U32)
    out = reference(
        inputs,
        {},
        lambda ops, v: [
            ops.triplet_hinge(v["a"], v["p"], v["n"], v["mask"], v.get("columns"), margin=case.margin),
        ],
    )
    check_triplets(case, out["y0"], *(out[f"d_{name}"] for name in "apn"))


@pytest.mark.torch
def test_torch_distils_and_hinges_as_the_vectors_say() -> None:
    import torch

    from hybrid.backends.torch.ops import TorchOps

    def ids(array: Array) -> Any:
        return torch.tensor(array.astype(np.int64))

    ops = TorchOps()
    for case in distillations():
        x = torch.tensor(case.logits, requires_grad=True)
        teacher = (ids(case.ids), torch.tensor(case.probs, dtype=torch.float32), ids(case.targets))
        head = Linear(torch.eye(case.logits.shape[1], requires_grad=True))
        outputs = ops.topk_kl(x, head, *teacher, **case.settings)
        outputs[0].sum().backward()
        assert x.grad is not None
        check_distillation(case, *(y.detach().numpy().astype(np.float64) for y in outputs), x.grad.numpy())
    for triple in triplets():
        sides = [torch.tensor(side, requires_grad=True) for side in triple.sides]
        columns = None if triple.columns is None else ids(triple.columns)
        hinge = ops.triplet_hinge(*sides, ids(triple.mask), columns, margin=triple.margin)
        hinge.sum().backward()
        check_triplets(triple, hinge.detach().numpy().astype(np.float64), *(side.grad.numpy() for side in sides))


def test_all_cases_are_there() -> None:
    assert len(list(distillations())) == 22
    assert len(list(triplets())) == 17
