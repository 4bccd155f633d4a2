"""The tracer records what a model does, and refuses what no op is defined for, naming op, block and shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hybrid.graph.ir import ACT, F32, U32, Type, Value
from hybrid.graph.tracer import Tracer
from hybrid.ops import Linear, Norm, OpError, Table


@pytest.fixture
def tracer() -> Tracer:
    return Tracer()


def act(tracer: Tracer, *shape: int) -> Value:
    return tracer.input(f"act{shape}", shape, ACT)


def f32(tracer: Tracer, *shape: int) -> Value:
    return tracer.input(f"f32{shape}", shape, F32)


def u32(tracer: Tracer, *shape: int) -> Value:
    return tracer.input(f"u32{shape}", shape, U32)


def parameter(tracer: Tracer, *shape: int) -> Value:
    return tracer.parameter(f"p{shape}", shape)


def ngram(tracer: Tracer, segment_ids: Value | None, **settings: int) -> Value:
    return tracer.hashed_ngram_embedding(u32(tracer, 2, 3), segment_ids, Table(parameter(tracer, 9, 5)), **settings)  # type: ignore[arg-type]


def distil(
    tracer: Tracer,
    *,
    ids: Value | None = None,
    probs: Value | None = None,
    targets: Value | None = None,
    bias: Value | None = None,
    **settings: float,
) -> object:
    teacher = (ids or u32(tracer, 6, 3), probs or f32(tracer, 6, 3), targets or u32(tracer, 6))
    return tracer.topk_kl(act(tracer, 2, 3, 4), Linear(parameter(tracer, 9, 4), bias), *teacher, **settings)


def triplet(tracer: Tracer, negative: Value, mask: Value, columns: Value | None = None, margin: float = 0.2) -> Value:
    return tracer.triplet_hinge(act(tracer, 3, 4), act(tracer, 3, 4), negative, mask, columns, margin=margin)


def test_types_of_every_result(tracer: Tracer) -> None:
    x, ids, rows = act(tracer, 2, 3, 4), u32(tracer, 2, 3), f32(tracer, 6)
    heads = tracer.reshape(x, (0, 0, 2, 2))
    split = tracer.split(x, (1, 3))
    loss, nll = tracer.cross_entropy_head(x, Linear(parameter(tracer, 9, 4)), ids, f32(tracer, 1))
    distilled = tracer.topk_kl(x, Linear(parameter(tracer, 9, 4)), u32(tracer, 6, 3), f32(tracer, 6, 3), ids)
    flat = tracer.reshape(x, (6, 4))
    expected = {
        **dict.fromkeys(distilled, Type((6,), F32)),
        tracer.hashed_ngram_embedding(ids, ids, Table(parameter(tracer, 9, 5)), order=2): Type((2, 3, 5), ACT),
        tracer.add_noise(x, f32(tracer, 2, 3, 4), f32(tracer, 2)): Type((2, 3, 4), ACT),
        tracer.triplet_hinge(flat, flat, flat, u32(tracer, 6), margin=0.0): Type((6,), F32),
        tracer.triplet_hinge(flat, flat, flat, u32(tracer, 6), u32(tracer, 6, 9), margin=0.5): Type((6,), F32),
        tracer.embedding(ids, Table(parameter(tracer, 9, 5))): Type((2, 3, 5), ACT),
        tracer.linear(x, Linear(parameter(tracer, 7, 4))): Type((2, 3, 7), ACT),
        tracer.rms_norm(x, Norm(parameter(tracer, 4)), 1e-5): Type((2, 3, 4), ACT),
        tracer.layer_norm(x, Norm(parameter(tracer, 4), parameter(tracer, 4)), 1e-5): Type((2, 3, 4), ACT),
        tracer.rope(heads, ids, base=10.0, length=3): Type((2, 3, 2, 2), ACT),
        tracer.attention(heads, heads, heads, ids, scale=1.0): Type((2, 3, 2, 2), ACT),
        tracer.dropout(x, "site", 0.5): Type((2, 3, 4), ACT),
        tracer.cast(x, F32): Type((2, 3, 4), F32),
        tracer.reshape(x, (-1, 8)): Type((3, 8), ACT),
        split[0]: Type((2, 3, 1), ACT),
        tracer.concat(split): Type((2, 3, 4), ACT),
        tracer.gather_rows(x, u32(tracer, 5)): Type((5, 4), ACT),
        tracer.sum(rows): Type((1,), F32),
        tracer.mean(rows): Type((1,), F32),
        tracer.mse(x, x): Type((1,), F32),
        tracer.log_softmax(tracer.reshape(x, (6, 4))): Type((6, 4), F32),
        loss: Type((6,), F32),
        nll: Type((6,), F32),
    }
    for op in ("gelu", "silu", "relu2"):
        expected[getattr(tracer, op)(x)] = x.type
    for op in ("add", "mul", "swiglu"):
        expected[getattr(tracer, op)(x, x)] = x.type
    for value, type in expected.items():
        assert value.type == type


def test_casting_and_reshaping_to_what_it_is_records_nothing(tracer: Tracer) -> None:
    x = act(tracer, 2, 3)
    assert tracer.cast(x, ACT) is x
    assert tracer.reshape(x, (2, -1)) is x
    assert tracer.graph.nodes == []


WRONG: list[tuple[str, Callable[[Tracer], object], str]] = [
    ("embedding", lambda t: t.embedding(act(t, 2, 3), Table(parameter(t, 9, 5))), "ids must be u32"),
    ("embedding", lambda t: t.embedding(u32(t, 3), Table(parameter(t, 9, 5))), "rank 2"),
    ("embedding", lambda t: t.embedding(u32(t, 2, 3), Table(act(t, 9, 5))), "table must be a parameter"),
    ("linear", lambda t: t.linear(act(t, 2, 3), Linear(parameter(t, 5, 4))), r"weight must have shape \[\*, 3\]"),
    ("linear", lambda t: t.linear(act(t, 2, 3), Linear(parameter(t, 5, 3), parameter(t, 4))), r"bias .*\[5\]"),
    ("linear", lambda t: t.linear(f32(t, 2, 3), Linear(parameter(t, 5, 3))), "x must be act"),
    ("rms_norm", lambda t: t.rms_norm(act(t, 2, 3), Norm(parameter(t, 4)), 1e-5), r"\[3\]"),
    ("rms_norm", lambda t: t.rms_norm(act(t, 2, 3), Norm(parameter(t, 3), parameter(t, 3)), 1e-5), "no bias"),
    ("rms_norm", lambda t: t.rms_norm(act(t, 2, 3), Norm(parameter(t, 3)), 0.0), "eps"),
    ("layer_norm", lambda t: t.layer_norm(act(t, 2, 3), Norm(parameter(t, 3), parameter(t, 4)), 1e-5), "bias"),
    ("layer_norm", lambda t: t.layer_norm(act(t, 2, 3), Norm(parameter(t, 3)), float("nan")), "eps"),
    ("rope", lambda t: t.rope(act(t, 2, 3, 1, 5), u32(t, 2, 3), base=10.0, length=3), "even"),
    ("rope", lambda t: t.rope(act(t, 2, 3, 1, 4), u32(t, 3, 2), base=10.0, length=3), "positions"),
    ("rope", lambda t: t.rope(act(t, 2, 3, 1, 4), u32(t, 2, 3), base=10.0, length=0), "length 0"),
    (
        "attention",
        lambda t: t.attention(act(t, 2, 3, 4, 4), *[act(t, 2, 3, 3, 4)] * 2, u32(t, 2, 3), scale=1.0),
        "multiple",
    ),
    (
        "attention",
        lambda t: t.attention(act(t, 2, 3, 4, 4), act(t, 2, 3, 2, 4), act(t, 2, 3, 4, 4), u32(t, 2, 3), scale=1.0),
        "one shape",
    ),
    ("attention", lambda t: t.attention(*[act(t, 2, 3, 4, 4)] * 3, None, scale=1.0), "segment_ids are needed"),
    ("attention", lambda t: t.attention(*[act(t, 2, 3, 4, 4)] * 3, u32(t, 3, 3), scale=1.0), "segment_ids"),
    ("attention", lambda t: t.attention(*[act(t, 2, 3, 4, 4)] * 3, u32(t, 2, 3), scale=1.0, window=0), "window 0"),
    ("add", lambda t: t.add(act(t, 2, 3), act(t, 3, 2)), "one shape"),
    ("add", lambda t: t.add(act(t, 2, 3), f32(t, 2, 3)), "one shape and element type"),
    ("add", lambda t: t.add(act(t, 2, 3), 1.0), "one shape"),
    ("add", lambda t: t.add(1.0, act(t, 2, 3)), "must be a traced value"),
    ("mul", lambda t: t.mul(u32(t, 2, 3), u32(t, 2, 3)), "act or f32"),
    ("scale", lambda t: t.scale(act(t, 2), float("inf")), "finite"),
    ("gelu", lambda t: t.gelu(f32(t, 2)), "x must be act"),
    ("swiglu", lambda t: t.swiglu(act(t, 2), act(t, 3)), "one shape"),
    ("dropout", lambda t: t.dropout(act(t, 2, 3, 4), "s", 1.0), "rate 1.0"),
    ("dropout", lambda t: t.dropout(act(t, 2, 3), "s", 0.5), "rank 3"),
    ("cast", lambda t: t.cast(act(t, 2), "f16"), "'f16'"),
    ("reshape", lambda t: t.reshape(act(t, 2, 3), (4, 2)), "does not hold the 6 elements"),
    ("reshape", lambda t: t.reshape(act(t, 2, 3), (-1, -1)), "does not hold"),
    ("reshape", lambda t: t.reshape(act(t, 2, 3), (-1, 4)), "does not hold"),
    ("reshape", lambda t: t.reshape(act(t, 2, 3), (2, 3, 0)), "keeps a dimension that x lacks"),
    ("split", lambda t: t.split(act(t, 2, 3), (1, 1)), "add up"),
    ("split", lambda t: t.split(act(t, 2, 3), (3, 0)), "positive"),
    ("concat", lambda t: t.concat([]), "something to join"),
    ("concat", lambda t: t.concat([act(t, 2, 3), act(t, 3, 3)]), "all but the last axis"),
    ("gather_rows", lambda t: t.gather_rows(act(t, 2, 3), u32(t, 2, 3)), "rank 1"),
    ("sum", lambda t: t.sum(act(t, 2)), "x must be f32"),
    ("mean", lambda t: t.mean(f32(t, 2, 3)), "rank 1"),
    ("mse", lambda t: t.mse(act(t, 2), f32(t, 2)), "one shape"),
    ("log_softmax", lambda t: t.log_softmax(act(t, 2)), "rank 2"),
    ("hashed_ngram_embedding", lambda t: ngram(t, u32(t, 2, 3), order=1), "order 1"),
    ("hashed_ngram_embedding", lambda t: ngram(t, u32(t, 2, 3), order=2, seed=2**32), "seed 4294967296"),
    ("hashed_ngram_embedding", lambda t: ngram(t, u32(t, 3, 2), order=2), r"segment_ids must be \[B, T\]"),
    ("hashed_ngram_embedding", lambda t: ngram(t, None, order=2), "segment_ids are needed"),
    ("add_noise", lambda t: t.add_noise(act(t, 2, 3), f32(t, 3, 2), f32(t, 2)), "one shape"),
    ("add_noise", lambda t: t.add_noise(act(t, 2, 3), act(t, 2, 3), f32(t, 2)), "noise must be f32"),
    ("add_noise", lambda t: t.add_noise(act(t, 2, 3), f32(t, 2, 3), f32(t, 1)), "levels must have 2 entries"),
    ("topk_kl", lambda t: distil(t, ids=u32(t, 6, 2)), r"must be \[6, K\]"),
    ("topk_kl", lambda t: distil(t, targets=u32(t, 5)), "teacher_targets have 6 entries"),
    ("topk_kl", lambda t: distil(t, ids=u32(t, 6, 257), probs=f32(t, 6, 257)), "K must be at most 256"),
    ("topk_kl", lambda t: distil(t, temperature=1e-5), "temperature 1e-05"),
    ("topk_kl", lambda t: distil(t, alpha_kl=float("nan")), "alpha_kl nan"),
    ("topk_kl", lambda t: distil(t, bias=parameter(t, 9)), "bias"),
    ("triplet_hinge", lambda t: triplet(t, act(t, 3, 5), u32(t, 3)), "one shape"),
    ("triplet_hinge", lambda t: triplet(t, act(t, 3, 4), u32(t, 4)), "mask must have 3 entries"),
    ("triplet_hinge", lambda t: triplet(t, act(t, 3, 4), u32(t, 3), u32(t, 4, 2)), r"columns must be \[3, K\]"),
    ("triplet_hinge", lambda t: triplet(t, act(t, 3, 4), u32(t, 3), margin=-0.1), "margin -0.1"),
    (
        "cross_entropy_head",
        lambda t: t.cross_entropy_head(act(t, 6, 4), Linear(parameter(t, 9, 4)), u32(t, 5), f32(t, 1)),
        "targets must have 6 entries",
    ),
    (
        "cross_entropy_head",
        lambda t: t.cross_entropy_head(act(t, 6, 4), Linear(parameter(t, 9, 4), parameter(t, 9)), u32(t, 6), f32(t, 1)),
        "bias",
    ),
]


@pytest.mark.parametrize(("op", "call", "message"), WRONG)
def test_wrong_arguments_are_refused_by_name(
    tracer: Tracer, op: str, call: Callable[[Tracer], object], message: str
) -> None:
    with pytest.raises(OpError, match=rf"(?s)^{op} in block 'layers.3': .*{message}"), tracer.scope("layers.3"):
        call(tracer)


def test_blocks_are_scopes_and_the_outermost_are_regions(tracer: Tracer) -> None:
    x = act(tracer, 2, 3)

    def inner(ops: Tracer, p: str, x: Value) -> Value:
        return ops.gelu(x)

    def outer(ops: Tracer, p: str, x: Value) -> Value:
        return ops.silu(ops.block("inner", inner, p, x))

    tracer.gelu(x)
    tracer.block("outer", outer, "parameters", x)
    assert [node.scope for node in tracer.graph.nodes] == ["", "outer.inner", "outer"]
    assert [(r.label, r.first, r.last) for r in tracer.regions] == [("outer", 1, 3)]


def test_an_input_asked_for_again_must_be_the_same(tracer: Tracer) -> None:
    ids = tracer.input("ids", (2, 3), U32)
    assert tracer.input("ids", (2, 3), U32) is ids
    with pytest.raises(OpError, match=r"'ids' is ids u32\[2, 3\] and was asked for again as u32\[3, 2\]"):
        tracer.input("ids", (3, 2), U32)


def test_rotary_tables_are_shared_constants(tracer: Tracer) -> None:
    x, ids = act(tracer, 2, 3, 1, 4), u32(tracer, 2, 3)
    tracer.rope(x, ids, base=10.0, length=8)
    tracer.rope(x, ids, base=10.0, length=8)
    tracer.rope(x, ids, base=20.0, length=8)
    assert len(tracer.graph.constants) == 2
    assert all(len(tracer.graph.constant_data[name]) == 8 * 4 * 4 for name in tracer.graph.constants)


def test_decoding_has_one_cache_pair_for_each_attention_call() -> None:
    tracer = Tracer(training=False, cache_length=8)
    q, kv = act(tracer, 1, 2, 4, 4), act(tracer, 1, 2, 2, 4)
    for scope in ("a", "a", "b"):
        with tracer.scope(scope):
            tracer.attention(q, kv, kv, None, scale=1.0)
    assert list(tracer.graph.caches) == ["a.key", "a.value", "a.1.key", "a.1.value", "b.key", "b.value"]
    assert {cache.type for cache in tracer.graph.caches.values()} == {Type((8, 2, 4), ACT)}
    assert [node.op for node in tracer.graph.nodes] == ["cache_write", "cache_write", "attention_cached"] * 3


def test_decoding_asks_for_as_many_earlier_tokens_as_the_largest_order_needs() -> None:
    tracer = Tracer(training=False, cache_length=8)
    table = Table(parameter(tracer, 9, 5))
    for order in (2, 4, 3):
        tracer.hashed_ngram_embedding(u32(tracer, 1, 3), None, table, order=order)
    assert tracer.graph.inputs["previous_ids"].type == Type((1, 3), U32)
    with pytest.raises(OpError, match="no segment_ids"):
        tracer.hashed_ngram_embedding(u32(tracer, 1, 3), u32(tracer, 1, 3), table, order=2)
    with pytest.raises(OpError, match="batch 1"):
        tracer.hashed_ngram_embedding(u32(tracer, 2, 3), None, table, order=2)


@pytest.mark.parametrize(
    ("shape", "segments", "message"),
    [((2, 2, 4, 4), False, "batch 1"), ((1, 9, 4, 4), False, "8 rows"), ((1, 2, 4, 4), True, "no segment_ids")],
)
def test_decoding_refuses_what_a_cache_cannot_hold(shape: tuple[int, ...], segments: bool, message: str) -> None:
    tracer = Tracer(training=False, cache_length=8)
    x = act(tracer, *shape)
    with pytest.raises(OpError, match=message):
        tracer.attention(x, x, x, u32(tracer, *shape[:2]) if segments else None, scale=1.0)
