"""Autodiff emits what is needed and no more; what has no derivative is refused; recomputation changes memory, not
bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hybrid.backends.reference.executor import Executor
from hybrid.graph.autodiff import backward
from hybrid.graph.ir import ACT, F32, U32, Type
from hybrid.graph.tracer import Tracer
from hybrid.models.config import ModelConfig
from hybrid.ops import Linear, Norm, OpError, Table
from hybrid.plan.programs import training_graph
from models.small import LOOPED, MODELS, losses_and_gradients, random_batch, random_weights


def ops_after(tracer: Tracer, count: int) -> list[str]:
    return [node.op for node in tracer.graph.nodes[count:]]


def test_only_what_is_asked_for_gets_a_gradient() -> None:
    tracer = Tracer()
    x, y = tracer.input("x", (2, 3), ACT), tracer.input("y", (2, 4), ACT)
    weight, gain = tracer.parameter("weight", (4, 3)), tracer.parameter("gain", (4,))
    z = tracer.mul(tracer.rms_norm(tracer.linear(x, Linear(weight)), Norm(gain), 1e-5), y)
    seed = tracer.input("seed", z.shape, ACT)
    forward = len(tracer.graph.nodes)
    assert backward(tracer.graph, {z: seed}, parameters={"gain"}) == {}
    assert ops_after(tracer, forward) == ["mul", "rms_norm_dw"]
    del tracer.graph.nodes[forward:]
    backward(tracer.graph, {z: seed})
    assert ops_after(tracer, forward) == ["mul", "rms_norm_dw", "rms_norm_dx", "linear_dw"]
    del tracer.graph.nodes[forward:]
    assert backward(tracer.graph, {z: seed}, parameters=(), wrt=[y]).keys() == {y}
    assert ops_after(tracer, forward) == ["mul"]


def test_a_value_used_twice_gets_the_sum() -> None:
    tracer = Tracer()
    x = tracer.input("x", (3,), ACT)
    y = tracer.add(tracer.mul(x, x), tracer.add(x, x))
    (dx,) = backward(tracer.graph, {y: tracer.input("seed", (3,), ACT)}, wrt=[x]).values()
    tracer.graph.outputs["dx"] = dx
    values = np.array([1.0, -2.0, 0.5])
    out = Executor(tracer.graph, "f64").run({"x": values, "seed": np.ones(3)}, {}).outputs["dx"]
    np.testing.assert_allclose(out, 2 * values + 2)


def test_pieces_of_a_split_that_nobody_uses_count_as_zero() -> None:
    tracer = Tracer()
    x = tracer.input("x", (2, 5), ACT)
    _, middle, _ = tracer.split(x, (2, 1, 2))
    (dx,) = backward(tracer.graph, {middle: tracer.input("seed", (2, 1), ACT)}, wrt=[x]).values()
    tracer.graph.outputs["dx"] = dx
    out = Executor(tracer.graph, "f64").run({"x": np.ones((2, 5)), "seed": np.ones((2, 1))}, {}).outputs["dx"]
    np.testing.assert_array_equal(out, [[0, 0, 1, 0, 0]] * 2)


def test_what_the_seed_does_not_depend_on_is_absent() -> None:
    tracer = Tracer()
    x, y = tracer.input("x", (3,), ACT), tracer.input("y", (3,), ACT)
    z = tracer.gelu(x)
    tracer.silu(y)
    assert backward(tracer.graph, {z: tracer.input("seed", (3,), ACT)}, wrt=[x, y]).keys() == {x}


def test_every_parameter_of_every_model_gets_a_gradient_and_backward_nodes_say_so() -> None:
    for cfg in MODELS.values():
        graph = training_graph(cfg, 2, 8)
        assert {node.accumulates for node in graph.nodes} - {None} == set(graph.parameters)
        first = next(i for i, node in enumerate(graph.nodes) if node.scope.endswith("backward"))
        assert all(node.scope.endswith(".backward") for node in graph.nodes[first:])
        assert all(node.accumulates is None for node in graph.nodes[:first])
        assert all(not node.outputs for node in graph.nodes if node.accumulates and "cross_entropy" not in node.op)


def test_values_are_made_before_they_are_used_and_only_once() -> None:
    for cfg in MODELS.values():
        for recompute in (False, True):
            graph = training_graph(replace(cfg, dropout=0.1), 2, 8, recompute=recompute)
            known = {*graph.inputs.values(), *graph.parameters.values(), *graph.constants.values()}
            for node in graph.nodes:
                assert known.issuperset(node.inputs), (node.op, node.scope)
                assert known.isdisjoint(node.outputs)
                known.update(node.outputs)


def test_no_backward_node_is_useless() -> None:
    graph = training_graph(replace(LOOPED, dropout=0.1), 2, 8, recompute=True)
    used = {value for node in graph.nodes for value in node.inputs} | set(graph.outputs.values())
    backward_nodes = [node for node in graph.nodes if node.scope.endswith("backward")]
    assert all(node.accumulates or not used.isdisjoint(node.outputs) for node in backward_nodes)


@pytest.mark.parametrize("cfg", MODELS.values(), ids=MODELS)
def test_recomputation_gives_the_same_bits_from_less_memory(cfg: ModelConfig) -> None:
    cfg = replace(cfg, dropout=0.2)
    weights, batch = random_weights(cfg, dtype=np.float32), random_batch(cfg)
    loss, gradients = losses_and_gradients(cfg, weights, batch, "f32", z=0.01)
    again_loss, again = losses_and_gradients(cfg, weights, batch, "f32", z=0.01, recompute=True)
    np.testing.assert_array_equal(loss, again_loss)
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient, again[name], err_msg=name)
    deep = replace(cfg, schedule=(*cfg.schedule, 0, 1, 0, 1))
    plain, less = (Executor(training_graph(deep, 2, 16, recompute=r), "f32").peak_bytes for r in (False, True))
    assert less < 0.6 * plain


def test_an_op_without_a_derivative_is_refused() -> None:
    tracer = Tracer(training=False, cache_length=4)
    x = tracer.input("x", (1, 2, 1, 4), ACT)
    with tracer.scope("layers.0"):
        y = tracer.attention(x, x, x, None, scale=1.0)
    with pytest.raises(OpError, match=r"attention_cached in 'layers.0' has no derivative"):
        backward(tracer.graph, {y: tracer.input("seed", y.shape, ACT)}, wrt=[x])


def test_an_embedding_of_ids_without_a_row_index_is_refused() -> None:
    tracer = Tracer()
    y = tracer.embedding(tracer.input("other", (1, 2), U32), Table(tracer.parameter("table", (4, 3))))
    with pytest.raises(OpError, match=r"'table' needs a row index .* inputs ids and positions, not for 'other'"):
        backward(tracer.graph, {y: tracer.input("seed", y.shape, ACT)})


def test_an_ngram_table_over_other_ids_or_segments_is_refused() -> None:
    tracer = Tracer()
    ids, segments, other = (tracer.input(name, (1, 2), U32) for name in ("ids", "segment_ids", "other"))
    table = Table(tracer.parameter("table", (4, 3)))
    for arguments, named in (((other, segments), "'other' and 'segment_ids'"), ((ids, other), "'ids' and 'other'")):
        y = tracer.hashed_ngram_embedding(*arguments, table, order=2)
        with pytest.raises(OpError, match=f"'table' needs a row index .* not for {named}"):
            backward(tracer.graph, {y: tracer.input("seed", y.shape, ACT)})


def test_the_levels_of_noise_have_no_gradient() -> None:
    tracer = Tracer()
    x, levels = tracer.input("x", (3,), ACT), tracer.input("levels", (2,), F32)
    y = tracer.add_noise(x, tracer.input("noise", (3,), F32), levels)
    with pytest.raises(OpError, match="cannot pass a gradient to its levels"):
        backward(tracer.graph, {y: tracer.input("seed", (3,), ACT)}, wrt=[levels])


def test_a_parameter_in_an_elementwise_op_is_refused() -> None:
    tracer = Tracer()
    y = tracer.scale(tracer.parameter("p", (3,)), 2.0)
    with pytest.raises(OpError, match="scale in '' cannot pass a gradient to parameter 'p'"):
        backward(tracer.graph, {y: tracer.input("seed", y.shape, F32)})


def test_statistics_cannot_be_differentiated() -> None:
    tracer = Tracer()
    weight = tracer.parameter("weight", (3,))
    tracer.rms_norm(tracer.input("x", (2, 3), ACT), Norm(weight), 1e-5)
    rstd = tracer.graph.nodes[-1].outputs[1]
    with pytest.raises(OpError, match="only its first output can be differentiated"):
        backward(tracer.graph, {rstd: tracer.input("seed", rstd.shape, F32)})


def test_a_seed_of_another_type_is_refused() -> None:
    tracer = Tracer()
    y = tracer.gelu(tracer.input("x", (3,), ACT))
    assert y.type == Type((3,), ACT)
    with pytest.raises(OpError, match="seed of type"):
        backward(tracer.graph, {y: tracer.input("seed", (3,), F32)})
