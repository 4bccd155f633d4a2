"""One configurable decoder: GPT-2 style, Llama style, and looped variants of both.

Written once, against the `ops` vocabulary; see `ModelConfig` for what varies. Pre-norm residual blocks:
x += out(attention(norm(x))), x += down(activation(up(norm(x)))).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import TypeVar

from hybrid.models.config import ModelConfig
from hybrid.models.parameters import DecoderParameters, EmbedParameters, HeadParameters, LayerParameters
from hybrid.ops import Linear, Norm, Ops, Tensor

Result = TypeVar("Result")


@dataclass(frozen=True)
class Inputs:
    """What a batch brings. ids and positions u32 [B, T]; the rest where the trace or the head needs it.

    segment_ids u32 [B, T] (training and evaluation); targets u32 [B, T] and z_loss f32 [1] (cross-entropy); last u32
    [1], the row whose logits are wanted (decoding).
    """

    ids: Tensor
    positions: Tensor
    segment_ids: Tensor | None = None
    targets: Tensor | None = None
    z_loss: Tensor | None = None
    last: Tensor | None = None


# What an objective gives to `decoder`: (ops, output projection, final hidden states act [B, T, C], inputs) -> anything.
Head = Callable[[Ops, Linear, Tensor, Inputs], Result]


def normalise(ops: Ops, leaf: Norm, x: Tensor, cfg: ModelConfig) -> Tensor:
    if cfg.norm == "layer_norm":
        return ops.layer_norm(x, leaf, cfg.norm_eps)
    return ops.rms_norm(x, leaf, cfg.norm_eps)


def embed(ops: Ops, p: EmbedParameters, inputs: Inputs, cfg: ModelConfig) -> Tensor:
    x = ops.embedding(inputs.ids, p.tokens)
    if p.positions is not None:
        x = ops.add(x, ops.embedding(inputs.positions, p.positions))
    return ops.dropout(x, "embed", cfg.dropout)


def attend(ops: Ops, p: LayerParameters, h: Tensor, inputs: Inputs, cfg: ModelConfig) -> Tensor:
    q = ops.reshape(ops.linear(h, p.query), (0, 0, cfg.heads, cfg.head_width))
    k = ops.reshape(ops.linear(h, p.key), (0, 0, cfg.kv_heads, cfg.head_width))
    v = ops.reshape(ops.linear(h, p.value), (0, 0, cfg.kv_heads, cfg.head_width))
    if cfg.positions == "rope":
        q, k = (ops.rope(x, inputs.positions, base=cfg.rope_base, length=cfg.context_length) for x in (q, k))
    o = ops.attention(q, k, v, inputs.segment_ids, scale=1.0 / sqrt(cfg.head_width), window=cfg.window)
    return ops.linear(ops.reshape(o, (0, 0, cfg.heads * cfg.head_width)), p.out)


def feed_forward(ops: Ops, p: LayerParameters, h: Tensor, cfg: ModelConfig) -> Tensor:
    up = ops.linear(h, p.up)
    if p.gate is not None:
        return ops.linear(ops.swiglu(ops.linear(h, p.gate), up), p.down)
    activation = {"gelu": ops.gelu, "relu2": ops.relu2, "silu": ops.silu}[cfg.activation]
    return ops.linear(activation(up), p.down)


def layer(ops: Ops, p: LayerParameters, x: Tensor, inputs: Inputs, cfg: ModelConfig, label: str) -> Tensor:
    """One layer, x act [B, T, C] -> act [B, T, C]. `label` names its dropout sites."""
    attention = attend(ops, p, normalise(ops, p.norm1, x, cfg), inputs, cfg)
    x = ops.add(x, ops.dropout(attention, f"{label}.attention", cfg.dropout))
    mlp = feed_forward(ops, p, normalise(ops, p.norm2, x, cfg), cfg)
    return ops.add(x, ops.dropout(mlp, f"{label}.mlp", cfg.dropout))


def finish(ops: Ops, p: HeadParameters, x: Tensor, inputs: Inputs, cfg: ModelConfig, head: Head[Result]) -> Result:
    return head(ops, p.output, normalise(ops, p.norm, x, cfg), inputs)


def layer_labels(cfg: ModelConfig) -> list[str]:
    """One label for each entry of the schedule: "layers.0", and "layers.0.pass1" where a looped model runs that layer
    again."""
    passes: Counter[int] = Counter()
    labels = []
    for i in cfg.schedule:
        labels.append(f"layers.{i}.pass{passes[i]}" if passes[i] else f"layers.{i}")
        passes[i] += 1
    return labels


def decoder(ops: Ops, params: DecoderParameters, inputs: Inputs, cfg: ModelConfig, head: Head[Result]) -> Result:
    """Ids to whatever `head` makes of the final hidden states. Every parameter is read inside a block."""
    x = ops.block("embed", embed, params.embed, inputs, cfg)
    for i, label in zip(cfg.schedule, layer_labels(cfg), strict=True):
        x = ops.block(label, layer, params.layers[i], x, inputs, cfg, label)
    result: Result = ops.block("head", finish, params.head, x, inputs, cfg, head)
    return result


def last_token_logits(ops: Ops, output: Linear, x: Tensor, inputs: Inputs) -> Tensor:
    """The head of decoding: hidden states act [1, T, C] -> logits f32 [V] of row `inputs.last`."""
    row = ops.gather_rows(x, inputs.last)
    return ops.reshape(ops.cast(ops.linear(row, output), "f32"), (-1,))
