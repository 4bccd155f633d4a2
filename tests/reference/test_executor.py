"""The executor: storage types, overflow, liveness, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid.backends.reference.executor import Executor, to_half, working_copies
from hybrid.backends.reference.kernels import KERNELS
from hybrid.graph.autodiff import RULES
from hybrid.graph.ir import ACT, F32, Node
from hybrid.graph.tracer import Tracer
from hybrid.ops import OpError
from hybrid.plan.programs import decode_graph, training_graph
from models.small import LLAMA, inputs_of, random_batch, random_weights


def test_every_primitive_that_a_program_or_rule_uses_has_a_kernel() -> None:
    assert set(RULES) <= set(KERNELS)
    assert {"cache_write", "attention_cached", "embedding_grad", "scatter_rows", "broadcast"} <= set(KERNELS)
    for graph in (training_graph(LLAMA, 1, 4), decode_graph(LLAMA, 1, 4)):
        Executor(graph, "f32")


def test_an_unknown_primitive_is_refused_when_the_executor_is_made() -> None:
    tracer = Tracer()
    x = tracer.input("x", (2,), ACT)
    tracer.graph.nodes.append(Node("telepathy", (x,), (), {}))
    with pytest.raises(OpError, match="no kernel for telepathy"):
        Executor(tracer.graph, "f32")


@pytest.mark.parametrize(
    ("precision", "act", "wide"), [("f32", "f4", "f4"), ("f64", "f8", "f8"), ("mixed-f16", "f2", "f4")]
)
def test_values_have_the_storage_type_of_their_precision(precision: str, act: str, wide: str) -> None:
    tracer = Tracer()
    x = tracer.input("x", (3,), ACT)
    y = tracer.gelu(x)
    tracer.graph.outputs.update(y=y, z=tracer.cast(y, F32))
    out = Executor(tracer.graph, precision).run({"x": np.ones(3)}, {}).outputs
    assert out["y"].dtype == np.dtype(act)
    assert out["z"].dtype == np.dtype(wide)


@pytest.mark.parametrize(
    ("value", "fits"),
    [(65504.0, True), (65505.0, False), (-65519.0, False), (np.inf, False), (np.nan, False), (1e-9, True)],
)
def test_an_f16_store_that_does_not_fit_raises_the_flag_and_becomes_zero(value: float, fits: bool) -> None:
    tracer = Tracer()
    x = tracer.input("x", (2,), ACT)
    tracer.graph.outputs["y"] = tracer.scale(x, 1.0)
    run = Executor(tracer.graph, "mixed-f16").run({"x": np.array([value, 2.0])}, {})
    assert run.overflow == (not fits)
    assert run.outputs["y"].tolist() == [float(np.float16(value)) if fits else 0.0, 2.0]
    assert not Executor(tracer.graph, "f32").run({"x": np.array([value, 2.0])}, {}).overflow


def test_arithmetic_of_mixed_precision_is_f32() -> None:
    tracer = Tracer()
    x = tracer.input("x", (4,), ACT)
    tracer.graph.outputs["y"] = tracer.mse(tracer.scale(x, 2.0), x)
    # In f16 arithmetic the squares, 90,000, would overflow.
    run = Executor(tracer.graph, "mixed-f16").run({"x": np.full(4, 300.0)}, {})
    assert run.outputs["y"] == 90_000.0
    assert not run.overflow


def test_half_copies_round_matrices_and_leave_gains_alone() -> None:
    weights = {"matrix": np.full((2, 2), 1.0001, np.float32), "gain": np.full(2, 1.0001, np.float32)}
    copies, fits = working_copies(weights, "mixed-f16")
    assert fits
    assert (copies["matrix"] == np.float32(np.float16(1.0001))).all()
    assert copies["gain"] is weights["gain"]
    assert not working_copies({"matrix": np.full((1, 1), 7e4, np.float32)}, "mixed-f16")[1]
    copies, _ = working_copies(weights, "f32")
    assert copies["matrix"] is weights["matrix"]


def test_to_half_keeps_what_is_half_already() -> None:
    half = np.ones(3, np.float16)
    assert to_half(half)[0] is half


def test_values_are_freed_after_their_last_use() -> None:
    tracer = Tracer()
    x = tracer.input("x", (1000,), ACT)
    for _ in range(10):
        x = tracer.gelu(tracer.reshape(x, (10, 100)))
        x = tracer.reshape(x, (1000,))
    tracer.graph.outputs["y"] = x
    executor = Executor(tracer.graph, "f32")
    assert executor.peak_bytes == 2 * 1000 * 4  # one in, one out; reshapes cost nothing
    assert Executor(tracer.graph, "mixed-f16").peak_bytes == 2 * 1000 * 2


def test_mixed_precision_needs_at_most_sixty_percent_of_the_activations() -> None:
    graph = training_graph(LLAMA, 4, 24)
    full, half = (Executor(graph, precision).peak_bytes for precision in ("f32", "mixed-f16"))
    assert half <= 0.6 * full


def test_an_output_may_be_an_input_and_may_have_two_names() -> None:
    tracer = Tracer()
    x = tracer.input("x", (2,), ACT)
    y = tracer.gelu(x)
    tracer.graph.outputs.update(x=x, y=y, also_y=y)
    out = Executor(tracer.graph, "f64").run({"x": np.ones(2)}, {}).outputs
    np.testing.assert_array_equal(out["x"], 1.0)
    np.testing.assert_array_equal(out["y"], out["also_y"])


def test_gradients_add_up_over_runs() -> None:
    weights, batch = random_weights(LLAMA), random_batch(LLAMA)
    graph = training_graph(LLAMA, *batch.ids.shape)
    executor = Executor(graph, "f64")
    gradients = {name: np.zeros_like(w) for name, w in weights.items()}
    executor.run(inputs_of(batch, graph), weights, gradients)
    once = {name: g.copy() for name, g in gradients.items()}
    executor.run(inputs_of(batch, graph), weights, gradients)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, 2 * once[name], rtol=1e-12)


def test_missing_and_misshapen_inputs_are_named() -> None:
    weights, batch = random_weights(LLAMA), random_batch(LLAMA)
    graph = training_graph(LLAMA, *batch.ids.shape)
    executor = Executor(graph, "f64")
    inputs = inputs_of(batch, graph)
    with pytest.raises(OpError, match="needs input 'targets'"):
        executor.run({k: v for k, v in inputs.items() if k != "targets"}, weights, {})
    with pytest.raises(OpError, match=r"input 'z_loss' has shape \[2\], the graph was made for \[1\]"):
        executor.run({**inputs, "z_loss": np.zeros(2)}, weights, {})
    with pytest.raises(OpError, match="the run needs gradient buffers"):
        executor.run(inputs, weights)
