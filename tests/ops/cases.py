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
from hybrid.backends.row_index import row_index
from hybrid.data.batch import IGNORE
from hybrid.graph.autodiff import backward
from hybrid.graph.ir import ACT, F32, U32, Value
from hybrid.graph.tracer import Tracer
from hybrid.ops import Linear, Norm, Table

Array = NDArray[Any]
Named = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """parameters and floats: shapes of what is differentiated; f32: floats of type f32 instead of act; ids: u32 inputs.

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


IDS = np.array([[3, 0, 3, 5], [1, 3, 0, 0]], np.uint32)
POSITIONS = np.array([[0, 1, 2, 3], [0, 1, 0, 1]], np.uint32)
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2], [1, 2, 2, 2, 3, 0]], np.uint32)
ONE_SEGMENT = np.ones((2, 6), np.uint32)
TARGETS = np.array([2, IGNORE, 0, 6, 2], np.uint32)


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
    if case.name == "cross_entropy_head":
        values["z_loss"] = tracer.input("z_loss", (1,), F32)
    result = case.trace(tracer, values)
    results: tuple[Value, ...] = result if isinstance(result, tuple) else (result,)
    seeds = {y: tracer.input(f"upstream_{i}", y.shape, y.dtype) for i, y in enumerate(results)}
    graph = tracer.graph
    gradients = backward(graph, seeds, wrt=[values[name] for name in case.floats])
    graph.outputs.update({f"y_{i}": y for i, y in enumerate(results)})
    wanted = {name: f"d_{name}" for name in case.floats}
    graph.outputs.update({wanted[name]: gradients[values[name]] for name in case.floats})
    index = {name: a for kind in ("ids", "positions") if kind in case.ids for name, a in _index(kind, case).items()}
    ids = {**case.ids, **index, "z_loss": np.array([0.3])}
    return Traced(Executor(graph, precision), len(results), wanted, ids)


def _index(kind: str, case: Case) -> dict[str, Array]:
    return dict(row_index(case.ids[kind], "" if kind == "ids" else "pos_"))


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
