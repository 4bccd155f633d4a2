"""Records what a model does with `ops` as a graph, checking every shape and element type on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite, prod
from typing import Any, NoReturn

from hybrid.graph.ir import ACT, F32, U32, Graph, Node, Type, Value
from hybrid.ops import MIN_TEMPERATURE, TOP_K_LIMIT, Linear, Norm, OpError, Ops, Result, Table, rope_table


@dataclass(frozen=True)
class Region:
    """The nodes `first <= index < last` of one outermost `ops.block` call."""

    label: str
    first: int
    last: int


class Tracer(Ops):
    """`ops` that append to a graph.

    training: dropout is recorded (otherwise it is the identity). cache_length: given for a decoding trace, in which
    `attention` writes keys and values to caches of that many rows, one pair for each call, and attends to them.

    The graph's inputs appear as they are asked for (`input`); those that only some models need (`sample_ids`,
    `data_step`, `dropout_keys`, `start`, `previous_ids`) when an op first needs them. Values that flow here are
    `graph.ir.Value`s.
    """

    def __init__(self, *, training: bool = True, cache_length: int | None = None) -> None:
        self.graph = Graph()
        self.training = training
        self.cache_length = cache_length
        self.regions: list[Region] = []
        self._scopes: list[str] = []
        self._attention_calls: Counter[str] = Counter()

    # --- leaves of the graph -----------------------------------------------------------------------------------------

    def input(self, name: str, shape: tuple[int, ...], dtype: str) -> Value:
        """The program input of this name, made at its first use."""
        if name not in self.graph.inputs:
            self.graph.inputs[name] = self.graph.new_value(shape, dtype, "input", name)
        value = self.graph.inputs[name]
        if value.type != Type(tuple(shape), dtype):
            self._fail("input", f"{name!r} is {_show(value)} and was asked for again as {dtype}{list(shape)}")
        return value

    def parameter(self, name: str, shape: tuple[int, ...]) -> Value:
        """The master weight of this name: at least f32 in every precision."""
        if name not in self.graph.parameters:
            self.graph.parameters[name] = self.graph.new_value(shape, F32, "parameter", name)
        return self.graph.parameters[name]

    # --- structure ---------------------------------------------------------------------------------------------------

    def block(self, label: str, function: Callable[..., Result], parameters: Any, *arguments: Any) -> Result:
        with self.scope(label):
            return function(self, parameters, *arguments)

    @contextmanager
    def scope(self, label: str) -> Iterator[None]:
        first = len(self.graph.nodes)
        self._scopes.append(label)
        try:
            yield
        finally:
            self._scopes.pop()
        if not self._scopes:
            self.regions.append(Region(label, first, len(self.graph.nodes)))

    def _record(
        self, op: str, inputs: Sequence[Value], outputs: Sequence[tuple[tuple[int, ...], str]], **attrs: Any
    ) -> tuple[Value, ...]:
        values = tuple(self.graph.new_value(shape, dtype) for shape, dtype in outputs)
        self.graph.nodes.append(Node(op, tuple(inputs), values, attrs, ".".join(self._scopes)))
        return values

    # --- checks ------------------------------------------------------------------------------------------------------

    def _fail(self, op: str, problem: str) -> NoReturn:
        where = f" in block {'.'.join(self._scopes)!r}" if self._scopes else ""
        raise OpError(f"{op}{where}: {problem}")

    def _check(self, op: str, holds: bool, problem: str, *values: Any) -> None:
        if not holds:
            got = ", ".join(_show(value) for value in values)
            self._fail(op, f"{problem}; got {got}")

    def _is(self, op: str, name: str, value: Value, dtypes: tuple[str, ...], rank: int | None = None) -> None:
        """`value` is a tensor of one of these element types and, if given, this rank."""
        self._check(op, isinstance(value, Value), f"{name} must be a traced value", value)
        self._check(op, value.dtype in dtypes, f"{name} must be {' or '.join(dtypes)}", value)
        self._check(
            op,
            len(value.shape) == rank if rank else len(value.shape) >= 1,
            f"{name} must have rank {rank or '>= 1'}",
            value,
        )

    def _is_parameter(self, op: str, name: str, value: Value, shape: tuple[int | None, ...]) -> None:
        self._check(op, isinstance(value, Value) and value.kind == "parameter", f"{name} must be a parameter", value)
        fits = len(value.shape) == len(shape) and all(
            want in (None, have) for want, have in zip(shape, value.shape, strict=True)
        )
        self._check(op, fits, f"{name} must have shape {list(shape)}".replace("None", "*"), value)

    def _same(self, op: str, a: Value, b: Value, dtypes: tuple[str, ...] = (ACT, F32)) -> None:
        self._is(op, "the first argument", a, dtypes)
        self._check(
            op, isinstance(b, Value) and a.type == b.type, "both arguments must have one shape and element type", a, b
        )

    # --- parameters against activations ------------------------------------------------------------------------------

    def embedding(self, ids: Value, table: Table) -> Value:
        self._is("embedding", "ids", ids, (U32,), 2)
        self._is_parameter("embedding", "table", table.weight, (None, None))
        return self._record("embedding", (ids, table.weight), [((*ids.shape, table.weight.shape[1]), ACT)])[0]

    def hashed_ngram_embedding(
        self, ids: Value, segment_ids: Value | None, table: Table, *, order: int, seed: int = 0
    ) -> Value:
        op = "hashed_ngram_embedding"
        self._is(op, "ids", ids, (U32,), 2)
        self._is_parameter(op, "table", table.weight, (None, None))
        self._check(op, order >= 2, f"order {order} must be at least 2", ids)
        self._check(op, 0 <= seed < 2**32, f"seed {seed} must be a u32", ids)
        if self.cache_length is None:
            self._check(op, segment_ids is not None, "segment_ids are needed outside decoding", ids)
            assert segment_ids is not None
            self._is(op, "segment_ids", segment_ids, (U32,), 2)
            self._check(op, segment_ids.shape == ids.shape, "segment_ids must be [B, T]", ids, segment_ids)
            context = segment_ids
        else:
            self._check(op, segment_ids is None, "decoding reads one sequence and takes no segment_ids", ids)
            self._check(op, ids.shape[0] == 1, "decoding takes batch 1", ids)
            context = self._previous_ids(order - 1)
        inputs, shape = (ids, context, table.weight), (*ids.shape, table.weight.shape[1])
        attrs = {"order": int(order), "seed": int(seed), "decoding": self.cache_length is not None}
        return self._record(op, inputs, [(shape, ACT)], **attrs)[0]

    def _previous_ids(self, count: int) -> Value:
        """The tokens before those of a decoding call: as many as the largest order met so far looks back at."""
        if "previous_ids" not in self.graph.inputs:
            self.graph.inputs["previous_ids"] = self.graph.new_value((1, count), U32, "input", "previous_ids")
        value = self.graph.inputs["previous_ids"]
        value.type = Type((1, max(count, value.shape[1])), U32)
        return value

    def linear(self, x: Value, leaf: Linear) -> Value:
        self._is("linear", "x", x, (ACT,))
        self._is_parameter("linear", "weight", leaf.weight, (None, x.shape[-1]))
        width = leaf.weight.shape[0]
        if leaf.bias is not None:
            self._is_parameter("linear", "bias", leaf.bias, (width,))
        inputs = (x, leaf.weight) if leaf.bias is None else (x, leaf.weight, leaf.bias)
        return self._record("linear", inputs, [((*x.shape[:-1], width), ACT)])[0]

    def rms_norm(self, x: Value, leaf: Norm, eps: float) -> Value:
        self._is("rms_norm", "x", x, (ACT,))
        self._is_parameter("rms_norm", "weight", leaf.weight, x.shape[-1:])
        self._check("rms_norm", leaf.bias is None, "an RMS norm has no bias", x)
        self._check("rms_norm", isfinite(eps) and eps > 0, f"eps must be finite and above 0, not {eps}", x)
        rows = (prod(x.shape[:-1]),)
        return self._record("rms_norm", (x, leaf.weight), [(x.shape, ACT), (rows, F32)], eps=float(eps))[0]

    def layer_norm(self, x: Value, leaf: Norm, eps: float) -> Value:
        self._is("layer_norm", "x", x, (ACT,))
        self._is_parameter("layer_norm", "weight", leaf.weight, x.shape[-1:])
        if leaf.bias is not None:
            self._is_parameter("layer_norm", "bias", leaf.bias, x.shape[-1:])
        self._check("layer_norm", isfinite(eps) and eps > 0, f"eps must be finite and above 0, not {eps}", x)
        rows = (prod(x.shape[:-1]),)
        inputs = (x, leaf.weight) if leaf.bias is None else (x, leaf.weight, leaf.bias)
        return self._record("layer_norm", inputs, [(x.shape, ACT), (rows, F32), (rows, F32)], eps=float(eps))[0]

    # --- attention ---------------------------------------------------------------------------------------------------

    def rope(self, x: Value, positions: Value, *, base: float, length: int) -> Value:
        self._is("rope", "x", x, (ACT,), 4)
        self._is("rope", "positions", positions, (U32,), 2)
        self._check("rope", positions.shape == x.shape[:2], "positions must be [B, T] of x [B, T, H, D]", x, positions)
        width = x.shape[3]
        self._check("rope", width % 2 == 0, "the head width must be even", x)
        self._check(
            "rope", isfinite(base) and base > 0 and length >= 1, f"base {base} and length {length} must be positive", x
        )
        name = f"rope.{base:g}.{length}x{width}"
        if name not in self.graph.constants:
            self.graph.constants[name] = self.graph.new_value((length, width), F32, "constant", name)
            self.graph.constant_data[name] = rope_table(length, width, base)
        table = self.graph.constants[name]
        return self._record("rope", (x, positions, table), [(x.shape, ACT)], inverse=False)[0]

    def attention(
        self, q: Value, k: Value, v: Value, segment_ids: Value | None, *, scale: float, window: int | None = None
    ) -> Value:
        for name, value in (("q", q), ("k", k), ("v", v)):
            self._is("attention", name, value, (ACT,), 4)
        batch, time, heads, width = q.shape
        self._check("attention", k.shape == v.shape, "k and v must have one shape", q, k, v)
        self._check(
            "attention", (*k.shape[:2], k.shape[3]) == (batch, time, width), "q and k must agree in B, T and D", q, k, v
        )
        self._check(
            "attention", heads % k.shape[2] == 0, "the query heads must be a multiple of the key heads", q, k, v
        )
        self._check("attention", window is None or window >= 1, f"window {window} must be at least 1", q)
        self._check("attention", isfinite(scale), f"scale {scale} must be finite", q)
        if self.cache_length is not None:
            return self._cached_attention(q, k, v, segment_ids, self.cache_length, scale=float(scale), window=window)
        self._check("attention", segment_ids is not None, "segment_ids are needed outside decoding", q)
        assert segment_ids is not None
        self._is("attention", "segment_ids", segment_ids, (U32,), 2)
        self._check("attention", segment_ids.shape == (batch, time), "segment_ids must be [B, T]", q, segment_ids)
        outputs = [(q.shape, ACT), ((batch, heads, time), F32)]
        return self._record("attention", (q, k, v, segment_ids), outputs, scale=float(scale), window=window)[0]

    def _cached_attention(
        self, q: Value, k: Value, v: Value, segment_ids: Value | None, length: int, *, scale: float, window: int | None
    ) -> Value:
        self._check("attention", segment_ids is None, "decoding reads one sequence and takes no segment_ids", q)
        self._check("attention", q.shape[0] == 1, "decoding takes batch 1", q)
        self._check(
            "attention", q.shape[1] <= length, f"the cache has {length} rows, fewer than the tokens of one call", q
        )
        start = self.input("start", (1,), U32)
        scope = ".".join(self._scopes)
        call = self._attention_calls[scope]
        self._attention_calls[scope] += 1
        prefix = f"{scope}.{call}" if call else scope
        caches = []
        for name, value in (("key", k), ("value", v)):
            cache = self.graph.new_value((length, *value.shape[2:]), ACT, "cache", f"{prefix}.{name}")
            self.graph.caches[cache.name] = cache
            self._record("cache_write", (value, cache, start), [])
            caches.append(cache)
        return self._record("attention_cached", (q, *caches, start), [(q.shape, ACT)], scale=scale, window=window)[0]

    # --- element by element ------------------------------------------------------------------------------------------

    def add(self, a: Value, b: Value) -> Value:
        self._same("add", a, b)
        return self._record("add", (a, b), [(a.shape, a.dtype)])[0]

    def mul(self, a: Value, b: Value) -> Value:
        self._same("mul", a, b)
        return self._record("mul", (a, b), [(a.shape, a.dtype)])[0]

    def scale(self, x: Value, factor: float) -> Value:
        self._is("scale", "x", x, (ACT, F32))
        self._check("scale", isfinite(factor), f"factor {factor} must be finite", x)
        return self._record("scale", (x,), [(x.shape, x.dtype)], factor=float(factor))[0]

    def _activation(self, op: str, x: Value) -> Value:
        self._is(op, "x", x, (ACT,))
        return self._record(op, (x,), [(x.shape, ACT)])[0]

    def gelu(self, x: Value) -> Value:
        return self._activation("gelu", x)

    def silu(self, x: Value) -> Value:
        return self._activation("silu", x)

    def relu2(self, x: Value) -> Value:
        return self._activation("relu2", x)

    def swiglu(self, gate: Value, up: Value) -> Value:
        self._same("swiglu", gate, up, (ACT,))
        return self._record("swiglu", (gate, up), [(gate.shape, ACT)])[0]

    def dropout(self, x: Value, site: str, rate: float) -> Value:
        self._is("dropout", "x", x, (ACT,), 3)
        self._check("dropout", 0.0 <= rate < 1.0, f"rate {rate} must be at least 0 and below 1", x)
        if not self.training or rate == 0.0:
            return x
        sites = self.graph.dropout_sites
        if site in sites:
            self._fail("dropout", f"site {site!r} is used twice: its masks would be equal; name each use")
        sites.append(site)
        samples = self.input("sample_ids", x.shape[:1], U32)
        step = self.input("data_step", (1,), U32)
        if "dropout_keys" not in self.graph.inputs:
            self.graph.inputs["dropout_keys"] = self.graph.new_value((1, 2), U32, "input", "dropout_keys")
        keys = self.graph.inputs["dropout_keys"]
        keys.type = Type((len(sites), 2), U32)  # one row for each site met so far
        outputs = [(x.shape, ACT)]
        return self._record("dropout", (x, samples, step, keys), outputs, site=len(sites) - 1, rate=float(rate))[0]

    def add_noise(self, x: Value, noise: Value, levels: Value) -> Value:
        op = "add_noise"
        self._is(op, "x", x, (ACT,))
        self._is(op, "noise", noise, (F32,))
        self._is(op, "levels", levels, (F32,), 1)
        self._check(op, noise.shape == x.shape, "x and noise must have one shape", x, noise)
        self._check(op, levels.shape == (2,), "levels must have 2 entries", levels)
        return self._record(op, (x, noise, levels), [(x.shape, ACT)])[0]

    def cast(self, x: Value, dtype: str) -> Value:
        self._is("cast", "x", x, (ACT, F32))
        self._check("cast", dtype in (ACT, F32), f"dtype {dtype!r} must be {ACT} or {F32}", x)
        if dtype == x.dtype:
            return x
        return self._record("cast", (x,), [(x.shape, dtype)], dtype=dtype)[0]

    # --- shape -------------------------------------------------------------------------------------------------------

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        self._is("reshape", "x", x, (ACT, F32, U32))
        wanted = list(shape)
        self._check(
            "reshape",
            all(n or i < len(x.shape) for i, n in enumerate(wanted)),
            f"{wanted} keeps a dimension that x lacks",
            x,
        )
        resolved = [n or x.shape[i] for i, n in enumerate(wanted)]
        if resolved.count(-1) == 1:
            rest = prod(n for n in resolved if n != -1)
            resolved[resolved.index(-1)] = x.type.elements // rest if rest > 0 else -1
        fits = min(resolved, default=0) > 0 and prod(resolved) == x.type.elements
        self._check("reshape", fits, f"{wanted} does not hold the {x.type.elements} elements of x", x)
        if tuple(resolved) == x.shape:
            return x
        return self._record("reshape", (x,), [(tuple(resolved), x.dtype)], shape=tuple(resolved))[0]

    def split(self, x: Value, sizes: Sequence[int]) -> tuple[Value, ...]:
        self._is("split", "x", x, (ACT, F32))
        fits = min(sizes, default=0) > 0 and sum(sizes) == x.shape[-1]
        self._check("split", fits, f"sizes {list(sizes)} must be positive and add up to the last axis", x)
        return self._record("split", (x,), [((*x.shape[:-1], n), x.dtype) for n in sizes], sizes=tuple(sizes))

    def concat(self, xs: Sequence[Value]) -> Value:
        self._check("concat", len(xs) > 0, "there must be something to join")
        for x in xs:
            self._is("concat", "every argument", x, (ACT, F32))
            fits = x.shape[:-1] == xs[0].shape[:-1] and x.dtype == xs[0].dtype
            self._check("concat", fits, "arguments must agree in all but the last axis, and in element type", *xs)
        shape = (*xs[0].shape[:-1], sum(x.shape[-1] for x in xs))
        return self._record("concat", tuple(xs), [(shape, xs[0].dtype)])[0]

    def gather_rows(self, x: Value, index: Value) -> Value:
        self._is("gather_rows", "x", x, (ACT,))
        self._is("gather_rows", "index", index, (U32,), 1)
        rows = self.reshape(x, (-1, x.shape[-1]))
        return self._record("gather_rows", (rows, index), [((*index.shape, x.shape[-1]), ACT)])[0]

    # --- reductions and losses ---------------------------------------------------------------------------------------

    def sum(self, x: Value) -> Value:
        self._is("sum", "x", x, (F32,), 1)
        return self._record("sum", (x,), [((1,), F32)])[0]

    def mean(self, x: Value) -> Value:
        self._is("mean", "x", x, (F32,), 1)
        return self._record("mean", (x,), [((1,), F32)])[0]

    def mse(self, a: Value, b: Value) -> Value:
        self._same("mse", a, b)
        return self._record("mse", (a, b), [((1,), F32)])[0]

    def log_softmax(self, x: Value) -> Value:
        self._is("log_softmax", "x", x, (ACT, F32), 2)
        return self._record("log_softmax", (x,), [(x.shape, F32)])[0]

    def cross_entropy_head(self, x: Value, output: Linear, targets: Value, z_loss: Value) -> tuple[Value, Value]:
        op = "cross_entropy_head"
        self._is(op, "x", x, (ACT,))
        self._is_parameter(op, "weight", output.weight, (None, x.shape[-1]))
        self._check(op, output.bias is None, "an output projection with a bias is not defined", x)
        self._is(op, "targets", targets, (U32,))
        self._is(op, "z_loss", z_loss, (F32,), 1)
        rows = prod(x.shape[:-1])
        self._check(
            op,
            targets.type.elements == rows and z_loss.shape == (1,),
            f"targets must have {rows} entries, z_loss 1",
            x,
            targets,
            z_loss,
        )
        inputs = (self.reshape(x, (rows, x.shape[-1])), output.weight, self.reshape(targets, (rows,)), z_loss)
        loss, nll, _ = self._record(op, inputs, [((rows,), F32)] * 3)
        return loss, nll

    def topk_kl(
        self,
        x: Value,
        output: Linear,
        teacher_ids: Value,
        teacher_probs: Value,
        teacher_targets: Value,
        *,
        temperature: float = 1.0,
        alpha_kl: float = 1.0,
        alpha_nll: float = 0.0,
    ) -> tuple[Value, Value, Value]:
        op = "topk_kl"
        self._is(op, "x", x, (ACT,))
        self._is_parameter(op, "weight", output.weight, (None, x.shape[-1]))
        self._check(op, output.bias is None, "an output projection with a bias is not defined", x)
        self._is(op, "teacher_ids", teacher_ids, (U32,), 2)
        self._is(op, "teacher_probs", teacher_probs, (F32,), 2)
        self._is(op, "teacher_targets", teacher_targets, (U32,))
        rows, columns = prod(x.shape[:-1]), teacher_ids.shape[1]
        fits = teacher_ids.shape == teacher_probs.shape == (rows, columns) and teacher_targets.type.elements == rows
        problem = f"teacher_ids and teacher_probs must be [{rows}, K], teacher_targets have {rows} entries"
        self._check(op, fits, problem, x, teacher_ids, teacher_probs, teacher_targets)
        self._check(op, columns <= TOP_K_LIMIT, f"K must be at most {TOP_K_LIMIT}", teacher_ids)
        fits = isfinite(temperature) and temperature >= MIN_TEMPERATURE
        self._check(op, fits, f"temperature {temperature} must be finite and at least {MIN_TEMPERATURE}", x)
        fits = isfinite(alpha_kl) and isfinite(alpha_nll)
        self._check(op, fits, f"alpha_kl {alpha_kl} and alpha_nll {alpha_nll} must be finite", x)
        inputs = (
            self.reshape(x, (rows, x.shape[-1])),
            output.weight,
            teacher_ids,
            teacher_probs,
            self.reshape(teacher_targets, (rows,)),
        )
        attrs = {"temperature": float(temperature), "alpha_kl": float(alpha_kl), "alpha_nll": float(alpha_nll)}
        loss, kl, nll = self._record(op, inputs, [((rows,), F32)] * 3, **attrs)
        return loss, kl, nll

    def triplet_hinge(
        self,
        anchor: Value,
        positive: Value,
        negative: Value,
        mask: Value,
        columns: Value | None = None,
        *,
        margin: float,
    ) -> Value:
        op = "triplet_hinge"
        for name, value in (("anchor", anchor), ("positive", positive), ("negative", negative)):
            self._is(op, name, value, (ACT,), 2)
            self._check(op, value.shape == anchor.shape, "all three must have one shape", anchor, positive, negative)
        rows = anchor.shape[0]
        self._is(op, "mask", mask, (U32,), 1)
        self._check(op, mask.shape == (rows,), f"mask must have {rows} entries", mask)
        if columns is not None:
            self._is(op, "columns", columns, (U32,), 2)
            self._check(op, columns.shape[0] == rows, f"columns must be [{rows}, K]", columns)
        self._check(op, isfinite(margin) and margin >= 0, f"margin {margin} must be finite and at least 0", anchor)
        inputs = (anchor, positive, negative, mask, *(() if columns is None else (columns,)))
        return self._record(op, inputs, [((rows,), F32)], margin=float(margin))[0]


def _show(value: Any) -> str:
    """A value in an error message: its name if it has one, element type and shape."""
    if not isinstance(value, Value):
        return repr(value)
    name = f"{value.name} " if value.name else ""
    return f"{name}{value.dtype}{list(value.shape)}"
