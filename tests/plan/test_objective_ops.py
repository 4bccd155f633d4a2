"""Ops that no model uses yet compile into a plan like all others: their kernels, inputs and limits are checked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hybrid.graph.autodiff import Emitter, backward
from hybrid.graph.ir import ACT, F32, U32, Graph
from hybrid.graph.tracer import Tracer
from hybrid.models.config import ModelConfig
from hybrid.ops import Linear, Table, ngram_prefix
from hybrid.plan import compiler
from hybrid.plan.compiler import PlanSettings, compile_plan
from hybrid.plan.document import Plan
from hybrid.plan.profile import DeviceProfile

MODEL = ModelConfig(vocabulary_size=256, context_length=64, layers=1, width=64, heads=4, feed_forward_width=96)
F16 = DeviceProfile(features=frozenset({"shader-f16"}))
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHAPE = (4, 32)


def trace(tracer: Tracer) -> Graph:
    """Tokens and n-grams under noise, then cross-entropy, distillation and triplets of the sequences' last rows."""
    batch, rows = SHAPE[0], SHAPE[0] * SHAPE[1]
    v = {name: tracer.input(name, SHAPE, U32) for name in ("ids", "targets", "segment_ids")}
    table = Table(tracer.parameter(TABLE, (256, 64)))
    head = Linear(tracer.parameter(HEAD, (256, 64)))
    with tracer.scope("embed"):
        grams = tracer.hashed_ngram_embedding(v["ids"], v["segment_ids"], table, order=3, seed=1)
        x = tracer.add(tracer.embedding(v["ids"], table), grams)
        x = tracer.add_noise(x, tracer.input("noise", x.shape, F32), tracer.input("levels", (2,), F32))
    with tracer.scope("head"):
        teacher = (
            tracer.input("teacher_ids", (rows, 16), U32),
            tracer.input("teacher_probs", (rows, 16), F32),
            tracer.input("teacher_targets", SHAPE, U32),
        )
        loss, nll = tracer.cross_entropy_head(x, head, v["targets"], tracer.input("z_loss", (1,), F32))
        distilled, _, _ = tracer.topk_kl(x, head, *teacher, temperature=2.0)
        sides = [tracer.gather_rows(x, tracer.input(name, (batch,), U32)) for name in ("last_a", "last_p", "last_n")]
        logits = [tracer.linear(side, head) for side in sides]
        index = tracer.input("columns", (batch, 16), U32)
        hinge = tracer.triplet_hinge(*logits, tracer.input("mask", (batch,), U32), index, margin=0.2)
    tracer.graph.outputs.update(loss_rows=loss, nll_rows=nll, distilled=distilled, hinge=hinge)
    if tracer.training:
        seed = tracer.input("loss_seed", (1,), F32)
        emit = Emitter(tracer.graph, "head.backward")
        backward(tracer.graph, {value: emit.broadcast(seed, value.type) for value in (loss, distilled, hinge)})
    return tracer.graph


@pytest.fixture(params=["f32", "mixed-f16"])
def plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plan]:
    monkeypatch.setattr(compiler, "training_graph", lambda *_, **__: trace(Tracer(training=True)))
    monkeypatch.setattr(compiler, "evaluation_graph", lambda *_: trace(Tracer(training=False)))
    yield compile_plan(PlanSettings(MODEL, *SHAPE, request.param, cache_length=0), F16)


def test_their_kernels_are_dispatched_forward_and_backward(plan: Plan) -> None:
    training = {d.choices[0].kernel for d in plan.dispatches("forward_backward")}
    evaluation = {d.choices[0].kernel for d in plan.dispatches("evaluate")}
    forward = {"ngram_buckets", "add_noise_x4", "topk_kl", "triplet_hinge_on_columns"}
    gradients = {"topk_kl_grad", "triplet_hinge_grad_on_columns", "embedding_grad_x4", "add_noise_grad_act_x4"}
    assert forward | gradients <= training
    assert forward <= evaluation
    assert evaluation.isdisjoint(gradients)


def test_what_they_read_beside_a_batch_are_inputs_of_the_plan(plan: Plan) -> None:
    rows = SHAPE[0] * SHAPE[1]
    prefix = ngram_prefix(3, 256, 1)
    expected = {
        prefix + "row_order": ((rows,), "u32"),
        prefix + "row_starts": ((rows + 1,), "u32"),
        "noise": ((*SHAPE, 64), "f32"),
        "levels": ((2,), "f32"),
        "teacher_ids": ((rows, 16), "u32"),
        "teacher_probs": ((rows, 16), "f32"),
        "columns": ((SHAPE[0], 16), "u32"),
    }
    for name, (shape, dtype) in expected.items():
        tensor = plan.tensors[name]
        assert (tensor.arena, tuple(tensor.shape), tensor.dtype) == ("inputs", shape, dtype)


def test_an_ngram_table_asks_a_decoder_for_the_tokens_before() -> None:
    tracer = Tracer(training=False, cache_length=8)
    table = Table(tracer.parameter(TABLE, (256, 64)))
    x = tracer.hashed_ngram_embedding(tracer.input("ids", (1, 4), U32), None, table, order=5)
    assert x.dtype == ACT
    assert tracer.graph.inputs["previous_ids"].shape == (1, 4)
