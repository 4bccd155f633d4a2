"""The parameters of a decoder: names, shapes, initial values, their number, and the tree that the model reads.

Names are those of the Llama models in the Hugging Face format, so that a Llama-shaped checkpoint opens there as it
lies; biases and learned positions add names of the same pattern.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

from hybrid.models.config import ModelConfig
from hybrid.ops import Linear, Norm, Table, Tensor

TOKENS = "model.embed_tokens.weight"
POSITIONS = "model.embed_positions.weight"
OUTPUT = "lm_head.weight"


@dataclass(frozen=True)
class ParameterSpec:
    """One tensor: its name, shape, and initial values ("normal" with standard deviation `std`, "ones" or "zeros")."""

    name: str
    shape: tuple[int, ...]
    init: str
    std: float = 0.0


@dataclass(frozen=True)
class EmbedParameters:
    """tokens [V, C]; positions [context_length, C] if they are learned."""

    tokens: Table
    positions: Table | None


@dataclass(frozen=True)
class LayerParameters:
    """One layer. query [H*D, C], key and value [K*D, C], out [C, H*D]; gate (if gated) and up [F, C], down [C, F];
    norms [C]."""

    norm1: Norm
    query: Linear
    key: Linear
    value: Linear
    out: Linear
    norm2: Norm
    gate: Linear | None
    up: Linear
    down: Linear


@dataclass(frozen=True)
class HeadParameters:
    """Final norm [C] and output projection [V, C]; the latter is the token table itself when embeddings are tied."""

    norm: Norm
    output: Linear


@dataclass(frozen=True)
class DecoderParameters:
    """The tree that `decoder` takes."""

    embed: EmbedParameters
    layers: tuple[LayerParameters, ...]
    head: HeadParameters


def _attention_linears(cfg: ModelConfig) -> dict[str, tuple[int, int]]:
    """[out, in] of the linear maps of attention, by name."""
    queries, keys = cfg.heads * cfg.head_width, cfg.kv_heads * cfg.head_width
    return {
        "self_attn.q_proj": (queries, cfg.width),
        "self_attn.k_proj": (keys, cfg.width),
        "self_attn.v_proj": (keys, cfg.width),
        "self_attn.o_proj": (cfg.width, queries),
    }


def _mlp_linears(cfg: ModelConfig) -> dict[str, tuple[int, int]]:
    """[out, in] of the linear maps of the feed-forward part, by name."""
    inner = (cfg.feed_forward_width, cfg.width)
    gate = {"mlp.gate_proj": inner} if cfg.gated else {}
    return gate | {"mlp.up_proj": inner, "mlp.down_proj": (cfg.width, cfg.feed_forward_width)}


def parameter_specs(cfg: ModelConfig) -> tuple[ParameterSpec, ...]:
    """Every tensor once, in the order the forward pass meets them.

    Weights are normal with `initializer_range`; projections that write to the residual stream are scaled down by
    sqrt(2 * executed layers), so that its variance does not grow with depth (Radford et al. 2019, "Language Models
    are Unsupervised Multitask Learners"). Gains are ones, biases zeros.
    """
    c, std = cfg.width, cfg.initializer_range
    residual_std = std / sqrt(2 * len(cfg.schedule))
    specs = [ParameterSpec(TOKENS, (cfg.vocabulary_size, c), "normal", std)]
    if cfg.positions == "learned":
        specs.append(ParameterSpec(POSITIONS, (cfg.context_length, c), "normal", std))

    def norm(name: str) -> None:
        specs.append(ParameterSpec(f"{name}.weight", (c,), "ones"))
        if cfg.norm_bias:
            specs.append(ParameterSpec(f"{name}.bias", (c,), "zeros"))

    def linears(layer: str, maps: dict[str, tuple[int, int]]) -> None:
        for path, shape in maps.items():
            to_residual = path.endswith(("o_proj", "down_proj"))
            specs.append(ParameterSpec(f"{layer}.{path}.weight", shape, "normal", residual_std if to_residual else std))
            if cfg.bias:
                specs.append(ParameterSpec(f"{layer}.{path}.bias", shape[:1], "zeros"))

    for i in range(cfg.layers):
        layer = f"model.layers.{i}"
        norm(f"{layer}.input_layernorm")
        linears(layer, _attention_linears(cfg))
        norm(f"{layer}.post_attention_layernorm")
        linears(layer, _mlp_linears(cfg))
    norm("model.norm")
    if not cfg.tied_embeddings:
        specs.append(ParameterSpec(OUTPUT, (cfg.vocabulary_size, c), "normal", std))
    return tuple(specs)


def count_parameters(cfg: ModelConfig) -> int:
    """How many numbers a model has: a closed formula, independent of `parameter_specs`. A tied table counts once, a
    shared layer once."""
    c, f, d = cfg.width, cfg.feed_forward_width, cfg.head_width
    projected = d * (cfg.heads + 2 * cfg.kv_heads)
    attention = c * projected + c * cfg.heads * d
    mlp = (3 if cfg.gated else 2) * c * f
    biases = projected + c + (2 if cfg.gated else 1) * f + c if cfg.bias else 0
    norm = 2 * c if cfg.norm_bias else c
    tables = cfg.vocabulary_size * c * (1 if cfg.tied_embeddings else 2)
    if cfg.positions == "learned":
        tables += cfg.context_length * c
    return tables + cfg.layers * (attention + mlp + biases + 2 * norm) + norm


def parameter_tree(cfg: ModelConfig, get: Callable[[str], Tensor]) -> DecoderParameters:
    """The tree of a model, with `get(name)` giving the tensor of each name in `parameter_specs`."""

    def linear(name: str, bias: bool = cfg.bias) -> Linear:
        return Linear(get(f"{name}.weight"), get(f"{name}.bias") if bias else None)

    def norm(name: str) -> Norm:
        return Norm(get(f"{name}.weight"), get(f"{name}.bias") if cfg.norm_bias else None)

    def layer(name: str) -> LayerParameters:
        return LayerParameters(
            norm1=norm(f"{name}.input_layernorm"),
            query=linear(f"{name}.self_attn.q_proj"),
            key=linear(f"{name}.self_attn.k_proj"),
            value=linear(f"{name}.self_attn.v_proj"),
            out=linear(f"{name}.self_attn.o_proj"),
            norm2=norm(f"{name}.post_attention_layernorm"),
            gate=linear(f"{name}.mlp.gate_proj") if cfg.gated else None,
            up=linear(f"{name}.mlp.up_proj"),
            down=linear(f"{name}.mlp.down_proj"),
        )

    tokens = Table(get(TOKENS))
    positions = Table(get(POSITIONS)) if cfg.positions == "learned" else None
    layers = tuple(layer(f"model.layers.{i}") for i in range(cfg.layers))
    output = Linear(tokens.weight) if cfg.tied_embeddings else Linear(get(OUTPUT))
    return DecoderParameters(EmbedParameters(tokens, positions), layers, HeadParameters(norm("model.norm"), output))
