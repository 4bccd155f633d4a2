"""One table of small cases that covers every op: how it is traced, and what torch makes of the same arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from hybrid.backends.reference.executor import Executor
from hybrid.backends.row_index import row_indices
from hybrid.data.batch import IGNORE, Batch
from hybrid.graph.autodiff import backward
from hybrid.graph.ir import ACT, F32, U32, Graph, Value
from hybrid.graph.tracer import Tracer
from hybrid.ops import Linear, Norm, Table

Array = NDArray[Any]
Named = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """parameters and floats: shapes of what is differentiated; f32: floats of type f32 instead of act; ids: u32 inputs;
    fixed: f32 inputs that nobody differentiates.

    trace(tracer, values) gives one value, or a tuple of values that all get a gradient; torch(tensors) the same from
    torch tensors.
    """

    name: str
    trace: Callable[[Tracer, Named], Any]
    torch: Callable[[Named], Any]
    parameters: dict[str, tuple[int, ...]] = field(default_factory=dict)
    floats: dict[str, tuple[int, ...]] = field(default_factory=dict)
    f32: frozenset[str] = frozenset()
    ids: dict[str, Any] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)


def attention(q: Any, k: Any, v: Any, segments: Any, scale: float, window: int | None) -> Any:
    """Dense attention from its definition, in torch."""
    time, group = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    i, j = torch.arange(time)[:, None], torch.arange(time)[None, :]
    seen = (j <= i) & (segments[:, :, None] == segments[:, None, :])[:, None]
    if window is not None:
        seen = seen & (i - j < window)
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def rotate(x: Any, positions: Any, base: float) -> Any:
    """Rotary embedding by complex multiplication."""
    half = x.shape[-1] // 2
    angle = positions[..., None].to(torch.float64) * base ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(
        torch.ones_like(angle), angle
    ).unsqueeze(2)
    return torch.cat([turned.real, turned.imag], -1).to(x.dtype)


def losses(x: Any, weight: Any, targets: Any, z: Any) -> Any:
    logits = x @ weight.T
    counted = targets != IGNORE
    lse = logits.logsumexp(-1)
    nll = F.cross_entropy(logits, torch.where(counted, targets, 0), reduction="none")
    return torch.where(counted, nll + z * lse**2, torch.zeros_like(nll))


def mixed(word: Any) -> Any:
    """The 32-bit mixer on int64 tensors; products in halves, so that none leaves 48 bits."""

    def times(a: Any, b: int) -> Any:
        return (a * (b & 0xFFFF) + (((a * (b >> 16)) & 0xFFFF) << 16)) & 0xFFFFFFFF

    word = times(word ^ (word >> 16), 0x7FEB352D)
    word = times(word ^ (word >> 15), 0x846CA68B)
    return word ^ (word >> 16)


def ngram_rows(ids: Any, segments: Any, order: int, buckets: int, seed: int) -> Any:
    """Position by position, from the definition."""
    rows = torch.empty_like(ids)
    for b in range(ids.shape[0]):
        for t in range(ids.shape[1]):
            h = mixed(torch.tensor((seed + order * 0x9E3779B9) % 2**32))
            for place in range(t - order + 1, t + 1):
                inside = place >= 0 and segments[b, place] == segments[b, t]
                h = mixed(h ^ (ids[b, place] if inside else 0xFFFFFFFF))
            rows[b, t] = h % buckets
    return rows


def distilled(x: Any, weight: Any, v: Named, temperature: float, alpha_kl: float, alpha_nll: float) -> Any:
    """Row by row: only the columns that are there, and torch's own KL divergence and cross-entropy."""
    rows = []
    for n, (ids, probabilities, target) in enumerate(
        zip(v["teacher_ids"], v["teacher_probs"], v["targets"], strict=True)
    ):
        there = ids != IGNORE
        if not there.any():
            rows.append(x.sum() * 0.0)
            continue
        logits = (weight[ids[there]] @ x[n]) / temperature
        p = probabilities[there].clamp(min=0.0)
        p = p / p.sum() if p.sum() > 0 else torch.full_like(p, 1.0 / len(p))
        loss = alpha_kl * F.kl_div(logits.log_softmax(0), p, reduction="sum")
        if target != IGNORE:
            column = int(there[:target].sum())
            loss = loss + alpha_nll * F.cross_entropy(logits[None], torch.tensor([column]))
        rows.append(loss)
    return torch.stack(rows)


def hinge(a: Any, p: Any, n: Any, mask: Any, columns: Any, margin: float) -> Any:
    """By torch's triplet loss, whose distance is made the mean of squares."""

    def distance(u: Any, v: Any) -> Any:
        return F.mse_loss(u, v, reduction="none").mean(-1)

    if columns is not None:
        a, p, n = (x.gather(1, columns) for x in (a, p, n))
    loss = F.triplet_margin_with_distance_loss(a, p, n, distance_function=distance, margin=margin, reduction="none")
    return torch.where(mask != 0, loss, 0.0)


IDS = np.array([[3, 0, 3, 5], [1, 3, 0, 0]], np.uint32)
POSITIONS = np.array([[0, 1, 2, 3], [0, 1, 0, 1]], np.uint32)
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2], [1, 2, 2, 2, 3, 0]], np.uint32)
ONE_SEGMENT = np.ones((2, 6), np.uint32)
TARGETS = np.array([2, IGNORE, 0, 6, 2], np.uint32)
NGRAM_IDS = np.array([[3, 0, 3, 0, 3, 0], [1, 3, 0, 1, 3, 0]], np.uint32)
ABSENT = [IGNORE] * 3
TEACHER_IDS = np.array([[2, 0, 6], [4, IGNORE, 1], ABSENT, [3, 3, 5], [6, 1, 2]], np.uint32)
TEACHER_PROBS = np.array([[0.5, 0.25, 0.125], [0.5, 9.0, 0.75], [0.5, 0.25, 0.25], [0.0, 0.0, 0.0], [0.5, 0.5, 0.25]])
TEACHER_TARGETS = np.array([0, 2, 1, IGNORE, 1], np.uint32)
MASK = np.array([1, 0, 1, 7], np.uint32)
COLUMNS = np.array([[5, 0, 2], [1, 1, 2], [4, 0, 4], [3, 2, 1]], np.uint32)


def _attention_case(name: str, heads: int, kv_heads: int, segments: Array, window: int | None) -> Case:
    q, kv = (2, 6, heads, 4), (2, 6, kv_heads, 4)
    return Case(
        name,
        lambda t, v: t.attention(v["q"], v["k"], v["v"], v["segment_ids"], scale=0.4, window=window),
        lambda v: attention(v["q"], v["k"], v["v"], v["segment_ids"], 0.4, window),
        floats={"q": q, "k": kv, "v": kv},
        ids={"segment_ids": segments},
    )


def _binary(op: str, compute: Callable[[Any, Any], Any], f32: bool = False) -> Case:
    return Case(
        f"{op}{'_f32' if f32 else ''}",
        lambda t, v: getattr(t, op)(v["a"], v["b"]),
        lambda v: compute(v["a"], v["b"]),
        floats={"a": (2, 3), "b": (2, 3)},
        f32=frozenset({"a", "b"}) if f32 else frozenset(),
    )


def _unary(
    op: str, compute: Callable[[Any], Any], *arguments: Any, shape: tuple[int, ...] = (2, 3), f32: bool = False
) -> Case:
    return Case(
        op,
        lambda t, v: getattr(t, op)(v["x"], *arguments),
        lambda v: compute(v["x"]),
        floats={"x": shape},
        f32=frozenset({"x"}) if f32 else frozenset(),
    )


def _ngram_case(name: str, order: int, seed: int, segments: Array) -> Case:
    return Case(
        name,
        lambda t, v: t.hashed_ngram_embedding(v["ids"], v["segment_ids"], Table(v["table"]), order=order, seed=seed),
        lambda v: v["table"][ngram_rows(v["ids"], v["segment_ids"], order, 5, seed)],
        parameters={"table": (5, 3)},
        ids={"ids": NGRAM_IDS, "segment_ids": segments},
    )


def _distillation_case(name: str, temperature: float, alpha_kl: float, alpha_nll: float) -> Case:
    settings = {"temperature": temperature, "alpha_kl": alpha_kl, "alpha_nll": alpha_nll}
    teacher = ("teacher_ids", "teacher_probs", "targets")
    return Case(
        name,
        lambda t, v: t.topk_kl(v["x"], Linear(v["weight"]), *(v[n] for n in teacher), **settings)[0],
        lambda v: distilled(v["x"], v["weight"], v, **settings),
        parameters={"weight": (7, 4)},
        floats={"x": (5, 4)},
        ids={"teacher_ids": TEACHER_IDS, "targets": TEACHER_TARGETS},
        fixed={"teacher_probs": TEACHER_PROBS},
    )


def _triplet_case(name: str, margin: float, columns: Array | None) -> Case:
    return Case(
        name,
        lambda t, v: t.triplet_hinge(v["a"], v["p"], v["n"], v["mask"], v.get("columns"), margin=margin),
        lambda v: hinge(v["a"], v["p"], v["n"], v["mask"], v.get("columns"), margin),
        floats={"a": (4, 6), "p": (4, 6), "n": (4, 6)},
        ids={"mask": MASK} | ({} if columns is None else {"columns": columns}),
    )


CASES = [
    Case(
        "embedding",
        lambda t, v: t.embedding(v["ids"], Table(v["table"])),
        lambda v: v["table"][v["ids"]],
        parameters={"table": (6, 3)},
        ids={"ids": IDS},
    ),
    Case(
        "embedding_of_positions",
        lambda t, v: t.embedding(v["positions"], Table(v["table"])),
        lambda v: v["table"][v["positions"]],
        parameters={"table": (4, 3)},
        ids={"positions": POSITIONS},
    ),
    Case(
        "linear",
        lambda t, v: t.linear(v["x"], Linear(v["weight"])),
        lambda v: v["x"] @ v["weight"].T,
        parameters={"weight": (5, 3)},
        floats={"x": (2, 2, 3)},
    ),
    Case(
        "linear_with_bias",
        lambda t, v: t.linear(v["x"], Linear(v["weight"], v["bias"])),
        lambda v: v["x"] @ v["weight"].T + v["bias"],
        parameters={"weight": (5, 3), "bias": (5,)},
        floats={"x": (2, 2, 3)},
    ),
    Case(
        "rms_norm",
        lambda t, v: t.rms_norm(v["x"], Norm(v["weight"]), 1e-3),
        lambda v: F.rms_norm(v["x"], (5,), v["weight"], 1e-3),
        parameters={"weight": (5,)},
        floats={"x": (2, 3, 5)},
    ),
    Case(
        "layer_norm",
        lambda t, v: t.layer_norm(v["x"], Norm(v["weight"]), 1e-3),
        lambda v: F.layer_norm(v["x"], (5,), v["weight"], None, 1e-3),
        parameters={"weight": (5,)},
        floats={"x": (2, 3, 5)},
    ),
    Case(
        "layer_norm_with_bias",
        lambda t, v: t.layer_norm(v["x"], Norm(v["weight"], v["bias"]), 1e-3),
        lambda v: F.layer_norm(v["x"], (5,), v["weight"], v["bias"], 1e-3),
        parameters={"weight": (5,), "bias": (5,)},
        floats={"x": (2, 3, 5)},
    ),
    Case(
        "rope",
        lambda t, v: t.rope(v["x"], v["positions"], base=100.0, length=8),
        lambda v: rotate(v["x"], v["positions"], 100.0),
        floats={"x": (2, 4, 3, 6)},
        ids={"positions": POSITIONS * 2},
    ),
    _attention_case("attention", 2, 2, ONE_SEGMENT, None),
    _attention_case("attention_grouped", 4, 2, ONE_SEGMENT, None),
    _attention_case("attention_one_key_head", 3, 1, SEGMENTS, None),
    _attention_case("attention_segments", 2, 2, SEGMENTS, None),
    _attention_case("attention_window", 2, 2, ONE_SEGMENT, 3),
    _attention_case("attention_window_of_one", 2, 1, ONE_SEGMENT, 1),
    _attention_case("attention_everything", 4, 2, SEGMENTS, 2),
    _binary("add", lambda a, b: a + b),
    _binary("mul", lambda a, b: a * b),
    _binary("mul", lambda a, b: a * b, f32=True),
    _binary("swiglu", lambda a, b: F.silu(a) * b),
    _binary("mse", lambda a, b: F.mse_loss(a, b).reshape(1)),
    _binary("mse", lambda a, b: F.mse_loss(a, b).reshape(1), f32=True),
    _unary("scale", lambda x: x * -1.75, -1.75),
    _unary("gelu", lambda x: F.gelu(x, approximate="tanh")),
    _unary("silu", F.silu),
    _unary("relu2", lambda x: F.relu(x) ** 2),
    _unary("cast", lambda x: x, F32),
    _unary("reshape", lambda x: x.reshape(2, 3, 4), (0, -1, 4), shape=(2, 12)),
    _unary("split", lambda x: x.split([1, 2, 2], -1), (1, 2, 2), shape=(2, 5)),
    _unary("sum", lambda x: x.sum().reshape(1), shape=(7,), f32=True),
    _unary("mean", lambda x: x.mean().reshape(1), shape=(7,), f32=True),
    _unary("log_softmax", lambda x: x.log_softmax(-1), shape=(3, 5)),
    Case(
        "concat",
        lambda t, v: t.concat([v["a"], v["b"], v["a"]]),
        lambda v: torch.cat([v["a"], v["b"], v["a"]], -1),
        floats={"a": (2, 3), "b": (2, 1)},
    ),
    Case(
        "gather_rows",
        lambda t, v: t.gather_rows(v["x"], v["index"]),
        lambda v: v["x"].reshape(-1, 3)[v["index"]],
        floats={"x": (2, 2, 3)},
        ids={"index": np.array([3, 0, 3], np.uint32)},
    ),
    Case(
        "cross_entropy_head",
        lambda t, v: t.cross_entropy_head(v["x"], Linear(v["weight"]), v["targets"], v["z_loss"])[0],
        lambda v: losses(v["x"], v["weight"], v["targets"], 0.3),
        parameters={"weight": (7, 4)},
        floats={"x": (5, 4)},
        ids={"targets": TARGETS},
        fixed={"z_loss": np.array([0.3])},
    ),
    _ngram_case("ngram_of_two", 2, 0, ONE_SEGMENT),
    _ngram_case("ngram_of_three_in_segments", 3, 7, SEGMENTS),
    _ngram_case("ngram_longer_than_the_row", 9, 4_000_000_000, SEGMENTS),
    _distillation_case("topk_kl", 1.0, 1.0, 0.0),
    _distillation_case("topk_kl_warm_with_targets", 2.5, 0.7, 0.4),
    _triplet_case("triplet_hinge", 0.2, None),
    _triplet_case("triplet_hinge_always_active", 50.0, None),
    _triplet_case("triplet_hinge_on_columns", 0.2, COLUMNS),
    Case(
        "add_noise",
        lambda t, v: t.add_noise(v["x"], v["noise"], v["levels"]),
        lambda v: 0.8 * v["x"] - 0.6 * v["noise"],
        floats={"x": (2, 3, 4), "noise": (2, 3, 4)},
        f32=frozenset({"noise"}),
        fixed={"levels": np.array([0.8, -0.6])},
    ),
]


@dataclass
class Traced:
    """A case as a graph with its backward part; upstream gradients are the inputs `upstream_0`, `upstream_1`, .."""

    executor: Executor
    outputs: int
    wanted: dict[str, str]  # float input -> name of the output that is its gradient
    ids: dict[str, Array]


def traced(case: Case, precision: str) -> Traced:
    tracer = Tracer()
    values: Named = {name: tracer.parameter(name, shape) for name, shape in case.parameters.items()}
    for name, shape in case.floats.items():
        values[name] = tracer.input(name, shape, F32 if name in case.f32 else ACT)
    for name, array in case.ids.items():
        values[name] = tracer.input(name, array.shape, U32)
    for name, array in case.fixed.items():
        values[name] = tracer.input(name, array.shape, F32)
    result = case.trace(tracer, values)
    results: tuple[Value, ...] = result if isinstance(result, tuple) else (result,)
    seeds = {y: tracer.input(f"upstream_{i}", y.shape, y.dtype) for i, y in enumerate(results)}
    graph = tracer.graph
    gradients = backward(graph, seeds, wrt=[values[name] for name in case.floats])
    graph.outputs.update({f"y_{i}": y for i, y in enumerate(results)})
    wanted = {name: f"d_{name}" for name in case.floats}
    graph.outputs.update({wanted[name]: gradients[values[name]] for name in case.floats})
    return Traced(Executor(graph, precision), len(results), wanted, {**case.ids, **case.fixed, **_index(graph, case)})


def _index(graph: Graph, case: Case) -> dict[str, Array]:
    ids = {name: case.ids.get(name, np.zeros((1, 1), np.uint32)) for name in ("ids", "positions", "segment_ids")}
    return dict(row_indices(graph.inputs, Batch(**ids, targets=ids["ids"], sample_ids=np.zeros(1, np.uint32))))


def random_arrays(case: Case, seed: int) -> tuple[dict[str, Array], dict[str, Array]]:
    """(parameters, floats) in float64."""
    draw = np.random.default_rng(seed).standard_normal
    return ({n: draw(s) for n, s in case.parameters.items()}, {n: draw(s) for n, s in case.floats.items()})


def run(
    it: Traced, parameters: dict[str, Array], floats: dict[str, Array], upstream: list[Array]
) -> tuple[list[Array], dict[str, Array]]:
    """(outputs, gradients of parameters and floats by name) of one run."""
    wide = it.executor.precision.wide
    parameters = {name: array.astype(wide) for name, array in parameters.items()}
    gradients = {name: np.zeros_like(array) for name, array in parameters.items()}
    inputs = {**floats, **it.ids, **{f"upstream_{i}": w for i, w in enumerate(upstream)}}
    outputs = it.executor.run(inputs, parameters, gradients).outputs
    return [outputs[f"y_{i}"] for i in range(it.outputs)], gradients | {n: outputs[o] for n, o in it.wanted.items()}


def upstream_weights(case: Case, it: Traced, seed: int) -> list[Array]:
    """A random gradient for each output: a mistake that cancels under equal weights shows under these."""
    draw = np.random.default_rng(seed).standard_normal
    return [draw(it.executor.graph.outputs[f"y_{i}"].shape) for i in range(it.outputs)]
