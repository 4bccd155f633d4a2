"""`ops` as torch functions under autograd.

Activations have one element type, f32, bf16 or f16, and parameters are f32 masters: a matrix or table is rounded to
the activations' type where it is used, gains and biases stay f32. Whatever the type, an op computes in f32 and rounds
its result once (products of matrices sum in f32). Ids, positions and indices are int64 tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, prod
from typing import Any, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.backends.torch import attention, philox
from hybrid.backends.torch.attention import Block
from hybrid.backends.torch.head import CrossEntropyHead
from hybrid.backends.torch.objective_ops import ObjectiveOps
from hybrid.graph.ir import Graph
from hybrid.ops import Linear, Norm, OpError, Result, Table, rope_table
from hybrid.random.streams import stream_key

F32 = torch.float32


@dataclass
class Microbatch:
    """What ops need of a microbatch beside their arguments.

    masks: of attention, by window (see `attention.blocks`); a window that is not among them is worked out when it is
    met. sample_ids int64 [B] and data_step int64 [1]: for dropout, None outside training.
    """

    masks: dict[int | None, tuple[Block, ...] | None] = field(default_factory=dict)
    sample_ids: Tensor | None = None
    data_step: Tensor | None = None


class TorchOps(ObjectiveOps):
    """act: the element type of activations. `sites`: the model's dropout sites and the blocks they are in (see
    `dropout_sites`); the keys of their streams are made once, on the device.

    Set `microbatch` before each run, and `training` for dropout to act.
    """

    training: bool = False

    def __init__(
        self,
        act: torch.dtype = F32,
        device: torch.device | None = None,
        *,
        seed: int = 0,
        sites: Mapping[str, str] | None = None,
    ) -> None:
        self.act = act
        self.device = device or torch.device("cpu")
        self.where = ""
        self.microbatch = Microbatch()
        self._keys = {site: _key(seed, site, self.device) for site in sites or {}}
        self._rope: dict[tuple[int, int, float], Tensor] = {}
        self._inside: dict[str, _Inside] = {}
        for label in dict.fromkeys((sites or {}).values()):
            own = {site: self._keys[site] for site, block in (sites or {}).items() if block == label}
            self._inside[label] = _Inside(self, label, own | {s.removeprefix(label): key for s, key in own.items()})

    def key(self, site: str) -> Tensor:
        if site not in self._keys:
            self._fail("dropout", f"site {site!r} was not in the trace of the model")
        return self._keys[site]

    # --- structure ---------------------------------------------------------------------------------------------------

    def block(self, label: str, function: Callable[..., Result], parameters: Any, *arguments: Any) -> Result:
        """Calls the unit. A block whose own label is among its arguments gets "" instead, and its sites are relative to
        it: so the blocks of equal layers are equal code, and one compilation serves them all."""
        if label not in self._inside:
            self._inside[label] = _Inside(self, label, {})
        anonymous = tuple("" if isinstance(a, str) and a == label else a for a in arguments)
        return parameters(function, self._inside[label], anonymous)  # type: ignore[no-any-return]

    # --- checks ------------------------------------------------------------------------------------------------------

    def _fail(self, op: str, problem: str, *values: Any) -> NoReturn:
        where = f" in block {self.where!r}" if self.where else ""
        got = f"; got {', '.join(_show(value) for value in values)}" if values else ""
        raise OpError(f"{op}{where}: {problem}{got}")

    def _check(self, op: str, holds: bool, problem: str, *values: Any) -> None:
        """Shapes are static: this costs nothing in compiled code. In eager code it does, so what every layer calls puts
        no text together before something is wrong with it."""
        if not holds:
            self._fail(op, problem, *values)

    def _same(self, op: str, a: Tensor, b: Tensor) -> None:
        self._check(
            op, a.shape == b.shape and a.dtype == b.dtype, "both arguments must have one shape and element type", a, b
        )

    def _working(self, weight: Tensor) -> Tensor:
        return weight if weight.dtype == self.act else weight.to(self.act)

    # --- parameters against activations ------------------------------------------------------------------------------

    def embedding(self, ids: Tensor, table: Table) -> Tensor:
        self._check("embedding", ids.dim() == 2 and table.weight.dim() == 2, "ids must be [B, T]", ids, table.weight)
        return F.embedding(ids, table.weight).to(self.act)

    def linear(self, x: Tensor, leaf: Linear) -> Tensor:
        weight, bias = leaf.weight, leaf.bias
        fits = weight.dim() == 2 and weight.shape[1] == x.shape[-1]
        self._check("linear", fits, "the weight must be [out, last axis of x]", x, weight)
        if bias is None:
            return F.linear(x, self._working(weight))
        self._check("linear", bias.shape == weight.shape[:1], "the bias must be [out]", weight, bias)
        if self.act == F32:
            return F.linear(x, weight, bias)
        y: Tensor = F.linear(x, self._working(weight)).float() + bias
        return y.to(self.act)

    def rms_norm(self, x: Tensor, leaf: Norm, eps: float) -> Tensor:
        self._check("rms_norm", leaf.bias is None, "an RMS norm has no bias", x)
        self._check_norm("rms_norm", x, leaf, eps)
        y: Tensor = F.rms_norm(x.float(), x.shape[-1:], leaf.weight, eps)
        return y.to(self.act)

    def layer_norm(self, x: Tensor, leaf: Norm, eps: float) -> Tensor:
        self._check_norm("layer_norm", x, leaf, eps)
        return F.layer_norm(x.float(), x.shape[-1:], leaf.weight, leaf.bias, eps).to(self.act)

    def _check_norm(self, op: str, x: Tensor, leaf: Norm, eps: float) -> None:
        self._check(op, leaf.weight.shape == x.shape[-1:], "the weight must be as long as the last axis of x", x)
        if not 0 < eps < inf:
            self._fail(op, f"eps must be finite and above 0, not {eps}", x)

    # --- attention ---------------------------------------------------------------------------------------------------

    def rope(self, x: Tensor, positions: Tensor, *, base: float, length: int) -> Tensor:
        width = x.shape[-1]
        fits = x.dim() == 4 and width % 2 == 0 and positions.shape == x.shape[:2]
        self._check("rope", fits, "x must be [B, T, H, D] with an even D, and positions [B, T]", x, positions)
        turn = self.rope_rows(length, width, base)[positions][:, :, None]
        cosine, sine = turn[..., : width // 2], turn[..., width // 2 :]
        first, second = x[..., : width // 2], x[..., width // 2 :]
        turned = (first * cosine - second * sine, second * cosine + first * sine)  # f32: the table is
        return torch.cat(turned, dim=-1).to(self.act)

    def rope_rows(self, length: int, width: int, base: float) -> Tensor:
        """`ops.rope_table` on the device, f32 [length, width]."""
        if (length, width, base) not in self._rope:
            table = np.frombuffer(rope_table(length, width, base), "<f4").astype(np.float32)
            self._rope[length, width, base] = torch.from_numpy(table).to(self.device).reshape(length, width)
        return self._rope[length, width, base]

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, segment_ids: Tensor | None, *, scale: float, window: int | None = None
    ) -> Tensor:
        self._check_attention(q, k, v, scale, window)
        self._check("attention", segment_ids is not None, "segment_ids are needed outside decoding", q)
        assert segment_ids is not None
        self._check("attention", segment_ids.shape == q.shape[:2], "segment_ids must be [B, T]", q, segment_ids)
        masks = self.microbatch.masks
        seen = masks[window] if window in masks else attention.blocks(segment_ids, window)
        return attention.attend(q, k, v, seen, scale)

    def _check_attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> None:
        fits = q.dim() == k.dim() == 4 and k.shape == v.shape and q.shape[:2] == k.shape[:2]
        fits = fits and q.shape[3] == k.shape[3] and q.shape[2] % k.shape[2] == 0
        self._check("attention", fits, "q must be [B, T, H, D], k and v [B, T, K, D], and K divide H", q, k, v)
        if window is not None and window < 1:
            self._fail("attention", f"window {window} must be at least 1", q)
        if not isfinite(scale):
            self._fail("attention", f"scale {scale} must be finite", q)

    # --- element by element ------------------------------------------------------------------------------------------

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        self._same("add", a, b)
        return a + b

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        self._same("mul", a, b)
        return a * b

    def scale(self, x: Tensor, factor: float) -> Tensor:
        if not isfinite(factor):
            self._fail("scale", f"factor {factor} must be finite", x)
        return x * factor

    def gelu(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    def silu(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def relu2(self, x: Tensor) -> Tensor:
        return F.relu(x.float()).square().to(x.dtype)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        self._same("swiglu", gate, up)
        return (F.silu(gate.float()) * up.float()).to(gate.dtype)

    def dropout(self, x: Tensor, site: str, rate: float) -> Tensor:
        if x.dim() != 3 or not 0.0 <= rate < 1.0:
            self._fail("dropout", f"x must be [B, T, C], rate {rate} below 1", x)
        if rate == 0.0 or not self.training:
            return x
        sample_ids, data_step = self.microbatch.sample_ids, self.microbatch.data_step
        self._check("dropout", sample_ids is not None and data_step is not None, "the microbatch has no sample ids", x)
        assert sample_ids is not None and data_step is not None
        kept = philox.keep_mask(self.key(site), sample_ids, data_step, (x.shape[0], x.shape[1], x.shape[2]), rate)
        grown = float(np.float32(1.0 / (1.0 - rate)))
        return torch.where(kept, x.float() * grown, 0.0).to(x.dtype)

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        self._check("cast", dtype in ("act", "f32"), f"dtype {dtype!r} must be act or f32", x)
        return x.to(self.act if dtype == "act" else F32)

    # --- shape -------------------------------------------------------------------------------------------------------

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        sizes = x.shape
        if 0 in shape[len(sizes) :]:
            self._fail("reshape", f"{list(shape)} keeps a dimension that x lacks", x)
        wanted = [size or sizes[i] for i, size in enumerate(shape)]
        known, elements = prod(wanted), x.numel()
        if known != elements and (wanted.count(-1) != 1 or elements % known):
            self._fail("reshape", f"{list(shape)} does not hold the {elements} elements of x", x)
        return x.reshape(wanted)

    def split(self, x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        fits = min(sizes, default=0) > 0 and sum(sizes) == x.shape[-1]
        self._check("split", fits, f"sizes {list(sizes)} must be positive and add up to the last axis", x)
        return torch.split(x, list(sizes), dim=-1)

    def concat(self, xs: Sequence[Tensor]) -> Tensor:
        self._check("concat", len(xs) > 0, "there must be something to join")
        for x in xs:
            fits = x.shape[:-1] == xs[0].shape[:-1] and x.dtype == xs[0].dtype
            self._check("concat", fits, "arguments must agree in all but the last axis, and in element type", *xs)
        return torch.cat(list(xs), dim=-1)

    def gather_rows(self, x: Tensor, index: Tensor) -> Tensor:
        self._check("gather_rows", index.dim() == 1, "index must be [M]", index)
        return x.reshape(-1, x.shape[-1])[index]

    # --- reductions and losses ---------------------------------------------------------------------------------------

    def sum(self, x: Tensor) -> Tensor:
        self._check("sum", x.dim() == 1, "x must be [N]", x)
        return x.sum().reshape(1)

    def mean(self, x: Tensor) -> Tensor:
        self._check("mean", x.dim() == 1, "x must be [N]", x)
        return x.mean().reshape(1)

    def mse(self, a: Tensor, b: Tensor) -> Tensor:
        self._same("mse", a, b)
        return F.mse_loss(a.float(), b.float()).reshape(1)

    def log_softmax(self, x: Tensor) -> Tensor:
        self._check("log_softmax", x.dim() == 2, "x must be [N, V]", x)
        return F.log_softmax(x.float(), dim=-1)

    def cross_entropy_head(self, x: Tensor, output: Linear, targets: Tensor, z_loss: Tensor) -> tuple[Tensor, Tensor]:
        op, rows = "cross_entropy_head", prod(x.shape[:-1])
        self._check(op, output.bias is None, "an output projection with a bias is not defined", x)
        self._check(op, output.weight.shape[1] == x.shape[-1], "the weight must be [V, C]", x, output.weight)
        fits = targets.numel() == rows and z_loss.shape == (1,)
        self._check(op, fits, f"targets must have {rows} entries, z_loss 1", x, targets, z_loss)
        loss, nll = CrossEntropyHead.apply(x.reshape(rows, -1), output.weight, targets.reshape(-1), z_loss)  # type: ignore[no-untyped-call]
        return loss, nll


class _Inside(TorchOps):
    """The ops of one block: those of `outer`, with the block's own dropout sites."""

    def __init__(self, outer: TorchOps, label: str, keys: Mapping[str, Tensor]) -> None:
        self.outer = outer
        self.act = outer.act
        self.device = outer.device
        self.where = label
        self._keys = dict(keys)
        self._rope = outer._rope
        self._inside = {}

    @property
    def training(self) -> bool:  # type: ignore[override]
        return self.outer.training

    @property
    def microbatch(self) -> Microbatch:  # type: ignore[override]
        return self.outer.microbatch


def _key(seed: int, site: str, device: torch.device) -> Tensor:
    return torch.tensor(stream_key(seed, f"dropout/{site}"), dtype=torch.int64, device=device)


def dropout_sites(graph: Graph) -> dict[str, str]:
    """The dropout sites of a traced model, and the block that each is in."""
    return {graph.dropout_sites[n.attrs["site"]]: n.scope for n in reversed(graph.nodes) if n.op == "dropout"}


def _show(value: Any) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)
