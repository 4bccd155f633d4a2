"""The lowering rules of ops that no model's plan covers: a traced graph, run dispatch by dispatch, gives the values and
gradients of the float64 reference, also where logits come in chunks and tables in slices."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid.backends.reference.kernels import KERNELS
from hybrid.backends.row_index import row_indices
from hybrid.data.batch import Batch
from hybrid.graph.autodiff import Emitter, backward
from hybrid.graph.ir import ACT, F32, IGNORE, U32, Type
from hybrid.graph.tracer import Tracer
from hybrid.ops import Linear, Table
from hybrid.plan import rules_losses
from hybrid.plan.rule_table import RULES
from kernels.graphs import on_device, on_reference
from kernels.harness import assert_close

pytestmark = pytest.mark.webgpu
BATCH, TIME = 2, 20


def draw(shape, seed):
    return np.random.default_rng(seed).standard_normal(shape)


def check(tracer, losses, inputs, parameters, precision, wrt=(), binding_bytes=None, shared=False):
    """Differentiates `losses` under random upstream gradients, or one for all rows of each, and compares everything.

    Returns the labels of the dispatches.
    """
    graph = tracer.graph
    seeds = {}
    for i, loss in enumerate(losses):
        graph.outputs[f"y{i}"] = loss
        name = f"upstream{i}"
        if shared:
            seed = tracer.input(name, (1,), F32)
            seeds[loss] = Emitter(graph, "").broadcast(seed, loss.type)
        else:
            seeds[loss] = tracer.input(name, loss.shape, loss.dtype)
        inputs = {**inputs, name: draw(graph.inputs[name].shape, 99 + i)}
    given = backward(graph, seeds, wrt=list(wrt))
    graph.outputs.update({f"d{i}": given[value] for i, value in enumerate(wrt)})
    got, got_gradients, labels = on_device(graph, inputs, parameters, precision, binding_bytes)
    expected, gradients = on_reference(graph, inputs, parameters, precision)
    for name, value in expected.items():
        assert_close(got[name], value, precision)
    for name, value in gradients.items():
        assert_close(got_gradients[name], value, precision)
    return labels


def test_every_primitive_of_the_reference_has_a_lowering_rule():
    assert set(RULES) == set(KERNELS)


def batch():
    rng = np.random.default_rng(5)
    ids = rng.integers(0, 9, (BATCH, TIME)).astype(np.uint32)
    segments = np.sort(rng.integers(1, 4, (BATCH, TIME)), axis=1).astype(np.uint32)
    return Batch(ids, ids, ids, segments, np.zeros(BATCH, np.uint32))


@pytest.mark.parametrize("binding_bytes", [None, 128 * 1024])
def test_two_ngram_tables_are_looked_up_and_learnt(binding_bytes, precision):
    tracer = Tracer()
    ids, segments = (tracer.input(name, (BATCH, TIME), U32) for name in ("ids", "segment_ids"))
    # 5,000 rows of 16 need more than one binding of 128 KiB.
    pairs, fours = (tracer.parameter(name, (rows, 16)) for name, rows in (("pairs", 5000), ("fours", 13)))
    x = tracer.concat(
        [
            tracer.hashed_ngram_embedding(ids, segments, Table(pairs), order=2),
            tracer.hashed_ngram_embedding(ids, segments, Table(fours), order=4, seed=9),
        ]
    )
    given = batch()
    parameters = {"pairs": draw((5000, 16), 1), "fours": draw((13, 16), 2)}
    # The gradient is known only after `backward` has named the inputs it needs.
    inputs = {"ids": given.ids, "segment_ids": given.segment_ids}
    prefixes = [f"ngram_{name}_" for name in ("2_5000_0", "4_13_9")]
    inputs |= row_indices([f"{prefix}row_order" for prefix in prefixes], given)
    labels = check(tracer, [x], inputs, parameters, precision, binding_bytes=binding_bytes)
    assert labels.count("ngram_buckets") == 2
    slices = {None: 2, 128 * 1024: {"f32": 4, "mixed-f16": 3}[precision]}[binding_bytes]
    assert labels.count("hashed_ngram_embedding") == slices


def test_decoding_looks_up_the_rows_that_training_would():
    given = batch()
    table = draw((31, 8), 3)
    whole = Tracer()
    ids, segments = (whole.input(name, (1, TIME), U32) for name in ("ids", "segment_ids"))
    whole.graph.outputs["y"] = whole.hashed_ngram_embedding(
        ids, segments, Table(whole.parameter("table", (31, 8))), order=3
    )
    inputs = {"ids": given.ids[:1], "segment_ids": np.ones((1, TIME), np.uint32)}
    expected, _, _ = on_device(whole.graph, inputs, {"table": table}, "f32")
    tracer = Tracer(training=False, cache_length=TIME)
    part = tracer.parameter("table", (31, 8))
    tracer.graph.outputs["y"] = tracer.hashed_ngram_embedding(
        tracer.input("ids", (1, 4), U32), None, Table(part), order=3
    )
    for start in (2, 9, 16):
        inputs = {"ids": given.ids[:1, start : start + 4], "previous_ids": given.ids[:1, start - 2 : start]}
        got, _, _ = on_device(tracer.graph, inputs, {"table": table}, "f32")
        assert np.array_equal(got["y"], expected["y"][:, start : start + 4])
        reference, _ = on_reference(tracer.graph, inputs, {"table": table}, "f32")
        assert np.array_equal(got["y"], reference["y"])


@pytest.mark.parametrize("vocabulary", [260, 257])
@pytest.mark.parametrize(
    ("budget", "shared", "added_up"), [(None, False, False), (1 << 17, True, False), (1 << 17, False, True)]
)
def test_distillation_and_cross_entropy_under_one_head(budget, shared, added_up, vocabulary, precision, monkeypatch):
    rows, width, columns = 300, 12, 5
    if budget:
        monkeypatch.setattr(rules_losses, "LOGITS_BYTES", budget)
    tracer = Tracer()
    rng = np.random.default_rng(11)
    x = tracer.input("x", (rows, width), ACT)
    head = Linear(tracer.parameter("head", (vocabulary, width)))
    ids = np.stack([rng.permutation(vocabulary)[:columns] for _ in range(rows)]).astype(np.uint32)
    ids[::7] = IGNORE
    teacher_targets = rng.integers(0, columns, rows).astype(np.uint32)
    teacher_targets[::5] = IGNORE
    inputs = {
        "x": draw((rows, width), 12),
        "ids": ids,
        "probs": rng.random((rows, columns)),
        "at": teacher_targets,
        "targets": np.where(np.arange(rows) % 3, rng.integers(0, vocabulary, rows), IGNORE).astype(np.uint32),
        "z": np.array([1e-3]),
    }
    types = {"ids": U32, "probs": F32, "at": U32, "targets": U32, "z": F32}
    v = {name: tracer.input(name, inputs[name].shape, dtype) for name, dtype in types.items()}
    ce, nll = tracer.cross_entropy_head(x, head, v["targets"], v["z"])
    distilled, kl, aux = tracer.topk_kl(
        x, head, v["ids"], v["probs"], v["at"], temperature=1.7, alpha_kl=0.8, alpha_nll=0.3
    )
    tracer.graph.outputs.update(kl=kl, aux=aux, nll=nll)
    losses = [tracer.add(ce, tracer.scale(distilled, 0.5))] if added_up else [ce, distilled]
    labels = check(tracer, losses, inputs, {"head": draw((vocabulary, width), 13)}, precision, [x], shared=shared)
    # A gradient node makes the losses from the logits that it needs anyway, unless somebody reads them before.
    chunks = 3 if budget else 1
    assert len([label for label in labels if label.endswith("top_k")]) == chunks * (2 if added_up else 1)
    assert len([label for label in labels if label.endswith("top_k_gradient")]) == chunks
    assert len([label for label in labels if label.endswith("cross_entropy")]) == chunks * (2 if added_up else 1)


def test_an_evaluation_distils_without_a_gradient():
    tracer = Tracer()
    x, head = tracer.input("x", (6, 4), ACT), Linear(tracer.parameter("head", (9, 4)))
    names = {"ids": ((6, 3), U32), "probs": ((6, 3), F32), "at": ((6,), U32)}
    teacher = [tracer.input(name, *type) for name, type in names.items()]
    loss, kl, nll = tracer.topk_kl(x, head, *teacher, alpha_nll=1.0)
    tracer.graph.outputs.update(loss=loss, kl=kl, nll=nll)
    rng = np.random.default_rng(0)
    inputs = {
        "x": draw((6, 4), 1),
        "ids": rng.integers(0, 9, (6, 3)),
        "probs": rng.random((6, 3)),
        "at": np.arange(6) % 3,
    }
    parameters = {"head": draw((9, 4), 2)}
    got, _, labels = on_device(tracer.graph, inputs, parameters, "f32")
    expected, _ = on_reference(tracer.graph, inputs, parameters, "f32")
    assert labels == ["topk_kl", "top_k"]  # the product and the loss
    for name, value in expected.items():
        assert_close(got[name], value)


@pytest.mark.parametrize("listed", [None, 3])
def test_triplets_of_noisy_rows(listed, precision):
    tracer = Tracer()
    shape = (6, 8)
    sides = [tracer.input(name, shape, ACT) for name in "apn"]
    noise, levels = tracer.input("noise", shape, F32), tracer.input("levels", (2,), F32)
    mask = tracer.input("mask", shape[:1], U32)
    columns = [tracer.input("columns", (6, listed), U32)] if listed else []
    noisy = tracer.add_noise(sides[0], noise, levels)
    hinge = tracer.triplet_hinge(noisy, *sides[1:], mask, *columns, margin=0.7)
    inputs = {name: draw(shape, i) for i, name in enumerate([*"apn", "noise"])}
    inputs |= {"levels": np.array([0.75, 0.5]), "mask": np.array([1, 1, 0, 1, 1, 1], np.uint32)}
    if listed:
        inputs["columns"] = np.random.default_rng(4).integers(0, 8, (6, listed)).astype(np.uint32)
    check(tracer, [hinge], inputs, {}, precision, [*sides, noise])


def test_f32_values_are_added_multiplied_split_and_compared_in_mixed_precision(precision):
    tracer = Tracer()
    shape = (4, 6)
    a, b = (tracer.input(name, shape, F32) for name in "ab")
    left, right = tracer.split(tracer.add(tracer.mul(a, b), b), (2, 4))
    y = tracer.log_softmax(tracer.concat([right, left]))
    z = tracer.mse(y, a)
    assert z.type == Type((1,), F32)
    inputs = {"a": draw(shape, 0) * 1e5, "b": draw(shape, 1)}  # beyond what f16 holds
    inputs["a"][0] = draw(6, 2)
    check(tracer, [z], inputs, {}, precision, [a, b])
