"""The oracle of whole-model tests: a decoder and its training step written by hand in torch, for clarity.

It imports nothing from hybrid, so that no mistake can hide in both: weights and configuration come as plain
dictionaries, the random words of dropout from a Philox of its own, gradients from torch's autograd. Everything is as
plain as possible (whole T x T score matrices, whole logits, one tensor at a time). Runs in float32 or float64.

Shape letters: B batch, T time, C width, H query heads, K key/value heads, D head width, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

torch.set_num_threads(1)  # at these sizes a second thread costs more than it brings

NO_TARGET = 0xFFFFFFFF
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


class Microbatch(Protocol):
    """Arrays uint32: the first four [B, T], sample_ids [B]."""

    ids: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray
    sample_ids: np.ndarray


# --- random words -------------------------------------------------------------------------------------------------


def philox(counters: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox 4x32-10 (Salmon et al. 2011): counters uint64 [M, 4], each below 2^32, to four words each."""
    c0, c1, c2, c3 = (counters[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = key
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        first, second = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (second >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            second & low,
            (first >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            first & low,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1)


def stream_key(seed: int, name: str) -> tuple[int, int]:
    """The key of a named stream: the name, padded, chained through Philox under the seed."""
    data = name.encode() + b"\x80"
    data += bytes(-len(data) % 8)
    words = np.zeros((1, 4), np.uint64)
    for at in range(0, len(data), 8):
        words[0, 0] ^= int.from_bytes(data[at : at + 4], "little")
        words[0, 1] ^= int.from_bytes(data[at + 4 : at + 8], "little")
        words = philox(words, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    return int(words[0, 0]), int(words[0, 1])


def dropout_mask(
    site: str, rate: float, seed: int, data_step: int, sample_ids: np.ndarray, t: int, c: int
) -> np.ndarray:
    """Multipliers float64 [B, T, C]: 0, or float32(1 / (1 - rate)). Element e = t*C + c of sample j takes word e % 4 of
    the block with counter (e // 4, j, data_step, 0), and is kept when that word is at least floor(rate * 2^32)."""
    blocks = -(-t * c // 4)
    counters = np.zeros((len(sample_ids), blocks, 4), np.uint64)
    counters[..., 0] = np.arange(blocks)
    counters[..., 1] = sample_ids[:, None]
    counters[..., 2] = data_step
    words = philox(counters.reshape(-1, 4), stream_key(seed, f"dropout/{site}"))
    words = words.reshape(len(sample_ids), blocks * 4)[:, : t * c].reshape(-1, t, c)
    return np.where(words >= int(rate * 2**32), float(np.float32(1 / (1 - rate))), 0.0)


# --- the model ----------------------------------------------------------------------------------------------------


class Decoder:
    """GPT-2 style, Llama style or looped, after the configuration's keys (`norm`, `positions`, `activation`, ...).

    `weights` maps names (Hugging Face Llama names, `.bias` twins, `model.embed_positions.weight`) to tensors [out, in].
    """

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        self.config = config
        self.weights = weights
        self.heads = config["heads"]
        self.kv_heads = config.get("kv_heads") or self.heads
        self.head_width = config.get("head_width") or config["width"] // self.heads
        self.schedule = list(config.get("schedule") or range(config["layers"]))

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias, eps = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"), self.config["norm_eps"]
        if self.config["norm"] == "rms_norm":
            return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
        centred = x - x.mean(-1, keepdim=True)
        y = centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + eps) * weight
        return y if bias is None else y + bias

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, T, heads, D]: pairs (i, i + D/2) turn by position * base^(-2i/D)."""
        half = self.head_width // 2
        frequencies = self.config["rope_base"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = positions.double()[..., None, None] * frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        x1, x2 = x[..., :half], x[..., half:]
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)

    def attention(self, name: str, x: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.linear(f"{name}.q_proj", x).view(b, t, self.heads, self.head_width)
        k = self.linear(f"{name}.k_proj", x).view(b, t, self.kv_heads, self.head_width)
        v = self.linear(f"{name}.v_proj", x).view(b, t, self.kv_heads, self.head_width)
        if self.config["positions"] == "rope":
            q, k = self.rotate(q, positions), self.rotate(k, positions)
        k, v = (z.repeat_interleave(self.heads // self.kv_heads, dim=2) for z in (k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / sqrt(self.head_width)
        i, j = torch.arange(t)[:, None], torch.arange(t)[None, :]
        visible = (j <= i) & (segments[:, :, None] == segments[:, None, :])
        if self.config.get("window"):
            visible &= i - j < self.config["window"]
        scores = scores.masked_fill(~visible[:, None], float("-inf"))
        out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
        return self.linear(f"{name}.o_proj", out.reshape(b, t, -1))

    def feed_forward(self, name: str, x: Tensor) -> Tensor:
        up = self.linear(f"{name}.up_proj", x)
        match self.config["activation"]:
            case "swiglu":
                hidden = F.silu(self.linear(f"{name}.gate_proj", x)) * up
            case "gelu":
                hidden = 0.5 * up * (1 + torch.tanh(sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
            case "relu2":
                hidden = up.relu() ** 2
            case "silu":
                hidden = F.silu(up)
            case other:
                raise ValueError(f"activation {other!r}")
        return self.linear(f"{name}.down_proj", hidden)

    def logits(self, batch: Microbatch, dropout: tuple[int, int] | None = None) -> Tensor:
        """[B, T, V]. `dropout` is (seed, data step) in training, None in evaluation."""
        ids, positions, segments = (
            torch.from_numpy(array.astype(np.int64)) for array in (batch.ids, batch.positions, batch.segment_ids)
        )

        def drop(site: str, x: Tensor) -> Tensor:
            rate = self.config.get("dropout", 0.0)
            if dropout is None or rate == 0.0:
                return x
            mask = dropout_mask(site, rate, *dropout, batch.sample_ids, *x.shape[1:])
            return x * torch.from_numpy(mask).to(x.dtype)

        x = self.weights["model.embed_tokens.weight"][ids]
        if self.config["positions"] == "learned":
            x = x + self.weights["model.embed_positions.weight"][positions]
        x = drop("embed", x)
        passes: Counter[int] = Counter()
        for layer in self.schedule:
            name = f"model.layers.{layer}"
            site = f"layers.{layer}" + (f".pass{passes[layer]}" if passes[layer] else "")
            passes[layer] += 1
            h = self.norm(f"{name}.input_layernorm", x)
            x = x + drop(f"{site}.attention", self.attention(f"{name}.self_attn", h, positions, segments))
            h = self.norm(f"{name}.post_attention_layernorm", x)
            x = x + drop(f"{site}.mlp", self.feed_forward(f"{name}.mlp", h))
        x = self.norm("model.norm", x)
        tied = self.config["tied_embeddings"]
        return F.linear(x, self.weights["model.embed_tokens.weight" if tied else "lm_head.weight"])

    def losses(
        self, batch: Microbatch, z_loss: float = 0.0, dropout: tuple[int, int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """(loss, nll) summed over the targets: loss = nll + z_loss * lse^2."""
        logits = self.logits(batch, dropout)
        targets = torch.from_numpy(batch.targets.astype(np.int64))
        counted = targets != NO_TARGET
        lse = logits.logsumexp(-1)
        chosen = logits.gather(-1, targets.where(counted, 0)[..., None])[..., 0]
        nll = (lse - chosen).where(counted, 0.0)
        loss = nll + (z_loss * lse**2).where(counted, 0.0)
        return loss.sum(), nll.sum()


# --- training -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """One training run. `lr` and `z_loss` give the value for optimizer step t and data step s (1-based), by index t - 1
    and s - 1; a plain number holds for all. `scaler` has the fields of the loss scaler under their camelCase names;
    None is off. At the data steps of `overflow_steps` the gradients count as overflowed."""

    lr: float | Sequence[float] = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0
    z_loss: float | Sequence[float] = 0.0
    seed: int = 1337
    scaler: Mapping[str, Any] | None = None
    overflow_steps: frozenset[int] = frozenset()
    dtype: torch.dtype = torch.float32


@dataclass
class Trace:
    """What a run did, one entry a data step, and where it ended. Arrays are float64; `gradients` are those of the last
    step, unscaled and not clipped."""

    losses: list[float] = field(default_factory=list)
    nlls: list[float] = field(default_factory=list)
    grad_norms: list[float | None] = field(default_factory=list)
    clip_factors: list[float] = field(default_factory=list)
    loss_scales: list[float] = field(default_factory=list)
    overflows: list[bool] = field(default_factory=list)
    optimizer_steps: list[int] = field(default_factory=list)
    scaler: dict[str, float] = field(default_factory=dict)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    updates: dict[str, np.ndarray] = field(default_factory=dict)
    moments: dict[str, np.ndarray] = field(default_factory=dict)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)


def at(value: float | Sequence[float], index: int) -> float:
    return float(value if isinstance(value, int | float) else value[index])


def is_decayed(weight: Tensor) -> bool:
    """Matrices and tables decay; norm weights and biases do not."""
    return weight.dim() >= 2


def train(
    config: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    steps: Sequence[Sequence[Microbatch]],
    settings: Settings,
) -> Trace:
    """Train from `weights` on `steps`, each a list of microbatches.

    The loss is the sum over the targets of a step divided by their number over all its microbatches. Order within a
    step: backward of loss * scale, unscale, overflow check (a skipped step changes neither weights nor moments nor the
    optimizer's step), clip, AdamW (Loshchilov and Hutter 2019).
    """
    start = {name: torch.from_numpy(np.array(w)).to(settings.dtype) for name, w in weights.items()}
    leaves = {name: w.clone().requires_grad_() for name, w in start.items()}
    first = {name: torch.zeros_like(w) for name, w in start.items()}
    second = {name: torch.zeros_like(w) for name, w in start.items()}
    model = Decoder(config, leaves)
    scaler = settings.scaler
    scale = float(scaler["initialScale"]) if scaler else 1.0
    growth = 0
    optimizer_step = 0
    trace = Trace()

    for data_step, microbatches in enumerate(steps, 1):
        z_loss = at(settings.z_loss, data_step - 1)
        target_tokens = sum(int((batch.targets != NO_TARGET).sum()) for batch in microbatches)
        if not target_tokens:
            raise ValueError(f"data step {data_step} has no target")
        for leaf in leaves.values():
            leaf.grad = None
        loss_sum = nll_sum = 0.0
        for batch in microbatches:
            loss, nll = model.losses(batch, z_loss, (settings.seed, data_step))
            (loss * (scale / target_tokens)).backward()
            loss_sum += loss.item()
            nll_sum += nll.item()

        used_scale = scale
        gradients = {
            name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad / used_scale
            for name, leaf in leaves.items()
        }
        norm = sqrt(sum(g.double().pow(2).sum().item() for g in gradients.values()))
        overflow = data_step in settings.overflow_steps or not np.isfinite(norm)
        factor = 1.0
        if scaler and overflow:
            scale, growth = max(scaler["minScale"], scale * scaler["backoffFactor"]), 0
        elif scaler:
            growth += 1
            if growth >= scaler["growthInterval"]:
                scale, growth = min(scaler["maxScale"], scale * scaler["scaleFactor"]), 0

        if not overflow:
            optimizer_step += 1
            if settings.max_norm > 0 and norm > settings.max_norm:
                factor = settings.max_norm / (norm + 1e-6)
            lr = at(settings.lr, optimizer_step - 1)
            correction1 = 1 - settings.beta1**optimizer_step
            correction2 = 1 - settings.beta2**optimizer_step
            with torch.no_grad():
                for name, leaf in leaves.items():
                    g, m, v = gradients[name] * factor, first[name], second[name]
                    m.mul_(settings.beta1).add_((1 - settings.beta1) * g)
                    v.mul_(settings.beta2).add_((1 - settings.beta2) * g * g)
                    step = (m / correction1) / ((v / correction2).sqrt() + settings.eps)
                    if is_decayed(leaf):
                        step += settings.weight_decay * leaf
                    leaf -= lr * step

        trace.losses.append(min(loss_sum / target_tokens, LARGEST_FLOAT32))
        trace.nlls.append(nll_sum / target_tokens)
        trace.grad_norms.append(norm if np.isfinite(norm) and data_step not in settings.overflow_steps else None)
        trace.clip_factors.append(factor)
        trace.loss_scales.append(used_scale)
        trace.overflows.append(overflow)
        trace.optimizer_steps.append(optimizer_step)

    trace.scaler = {"scale": scale, "growthCounter": growth}
    for name, leaf in leaves.items():
        trace.weights[name] = leaf.detach().double().numpy()
        trace.updates[name] = trace.weights[name] - start[name].double().numpy()
        trace.moments[f"moment1/{name}"] = first[name].double().numpy()
        trace.moments[f"moment2/{name}"] = second[name].double().numpy()
        trace.gradients[name] = gradients[name].double().numpy()
    return trace
