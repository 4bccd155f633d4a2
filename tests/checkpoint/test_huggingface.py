"""A Llama-shaped checkpoint opens in transformers as it lies and computes the same numbers; other shapes say what
they are.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint import examples
from hybrid.checkpoint import huggingface
from hybrid.checkpoint.store import CheckpointStore
from hybrid.errors import CheckpointCorrupt, ConfigError
from hybrid.models.config import ModelConfig
from hybrid.models.parameters import count_parameters

LLAMA = ModelConfig(
    vocabulary_size=29,
    context_length=16,
    layers=2,
    width=8,
    heads=4,
    kv_heads=2,
    head_width=4,
    feed_forward_width=12,
    norm_eps=1e-6,
    rope_base=500.0,
)
GPT2 = replace(LLAMA, norm="layer_norm", positions="learned", activation="gelu", bias=True, kv_heads=4)
SHAPES = {
    "untied": LLAMA,
    "tied": replace(LLAMA, tied_embeddings=True),
    "biased": replace(LLAMA, bias=True),
    "dropout": replace(LLAMA, dropout=0.1),
}
OTHERS = {
    "gpt2": GPT2,
    "windowed": replace(LLAMA, window=4),
    "looped": replace(LLAMA, schedule=(0, 1, 0, 1)),
    "relu2": replace(LLAMA, activation="relu2"),
}


def save(folder: Path, cfg: ModelConfig, **changes: Any) -> Path:
    snapshot = examples.snapshot(1, cfg=cfg, tokenizer_json=None, **changes)
    return CheckpointStore(folder, filesystem=examples.Unsynced()).save(snapshot)


@pytest.mark.parametrize("cfg", [*SHAPES.values(), *OTHERS.values()], ids=[*SHAPES, *OTHERS])
def test_the_model_is_read_back_from_config_json(tmp_path: Path, cfg: ModelConfig) -> None:
    path = save(tmp_path, cfg)
    document = json.loads((path / "config.json").read_text())
    read = huggingface.model_config("config.json", document)
    assert read == cfg
    assert all(type(getattr(read, name)) is float for name in ("norm_eps", "rope_base", "dropout", "initializer_range"))
    assert document["model_type"] == ("llama" if cfg in SHAPES.values() else "hybrid")


@pytest.mark.torch
@pytest.mark.parametrize("cfg", SHAPES.values(), ids=SHAPES)
def test_a_llama_shaped_checkpoint_opens_in_transformers(tmp_path: Path, cfg: ModelConfig) -> None:
    """Every weight is found, tying is kept, and the logits are those of our own formula."""
    import torch
    from transformers import AutoConfig, LlamaForCausalLM

    path = save(tmp_path, cfg, special_tokens={"eos": 3})
    model, info = LlamaForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert sum(p.numel() for p in model.parameters()) == count_parameters(cfg)
    tied = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert tied == cfg.tied_embeddings
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert (model.config.eos_token_id, model.config.bos_token_id) == (3, None)
    assert type(AutoConfig.from_pretrained(path)).__name__ == "LlamaConfig"

    ids = np.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    with torch.no_grad():
        logits = model.eval()(torch.tensor(ids)).logits[0].numpy()
    weights = {name: array.astype(np.float64) for name, array in examples.tensors(cfg, 1)[0].items()}
    expected = llama_logits(cfg, weights, ids[0])
    assert np.linalg.norm(logits - expected) <= 1e-5 * np.linalg.norm(expected)


def llama_logits(cfg: ModelConfig, weights: dict[str, Any], ids: Any) -> Any:
    """Logits [T, V] of one sequence in float64, written down from the formulas alone."""
    count, width = len(ids), cfg.head_width

    def linear(x: Any, name: str) -> Any:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    def norm(x: Any, name: str) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + cfg.norm_eps) * weights[f"{name}.weight"]

    def rotate(x: Any) -> Any:
        """x [T, H, D]: pairs (i, i + D/2) turned by position * base^(-2i/D)."""
        angle = np.arange(count)[:, None] * cfg.rope_base ** (-np.arange(0, width, 2) / width)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        first, second = x[..., : width // 2], x[..., width // 2 :]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    x = weights["model.embed_tokens.weight"][ids]
    causal = np.tril(np.ones((count, count), bool))
    for i in range(cfg.layers):
        layer = f"model.layers.{i}"
        h = norm(x, f"{layer}.input_layernorm")
        q, k, v = (linear(h, f"{layer}.self_attn.{n}_proj").reshape(count, -1, width) for n in "qkv")
        q, k = rotate(q), rotate(k)
        k, v = (np.repeat(t, cfg.heads // cfg.kv_heads, axis=1) for t in (k, v))
        scores = np.where(causal, np.einsum("ihd,jhd->hij", q, k) / np.sqrt(width), -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        attended = np.einsum("hij,jhd->ihd", scores / scores.sum(-1, keepdims=True), v).reshape(count, -1)
        x = x + linear(attended, f"{layer}.self_attn.o_proj")
        h = norm(x, f"{layer}.post_attention_layernorm")
        gate = linear(h, f"{layer}.mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj")
    head = "model.embed_tokens.weight" if cfg.tied_embeddings else "lm_head.weight"
    return norm(x, "model.norm") @ weights[head].T


def test_a_token_role_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"special token\(s\) mask: expected bos, eos, pad"):
        huggingface.config_document(LLAMA, {"mask": 1})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"heads": 3}, "model.kv_heads"),
        ({"schedule": 5}, "describes no model"),
        ({"width": "8"}, "model.width"),
        ({"norm": ["rms_norm"]}, "model.norm"),
        ({"dropout": "0"}, "describes no model"),
        ({"layers": 10**12}, "hybrid.layers is 1000000000000: expected at most 65536"),
    ],
)
def test_a_configuration_of_an_impossible_model_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointCorrupt) as caught:
        huggingface.model_config("config.json", {"hybrid": {**LLAMA.to_dict(), **values}})
    assert message in str(caught.value)
