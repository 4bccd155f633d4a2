"""`config.json`: the shape of the model, as `transformers` reads it and as we read it back.

A Llama-shaped model gets a genuine `LlamaConfig`, so that the folder opens there as it lies; any other shape declares
`model_type` "hybrid". Either way the member `hybrid` holds our own `ModelConfig`, which is what we read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from hybrid.errors import CheckpointCorrupt, ConfigError
from hybrid.models.config import ModelConfig

SPECIAL_TOKENS: Final = ("bos", "eos", "pad")
MAX_LAYERS: Final = 65536


def is_llama_shaped(cfg: ModelConfig) -> bool:
    """Whether `LlamaForCausalLM` computes the same function (dropout aside, which is off at inference)."""
    return (
        cfg.norm == "rms_norm"
        and cfg.positions == "rope"
        and cfg.activation == "swiglu"
        and cfg.window is None
        and cfg.schedule == tuple(range(cfg.layers))
    )


def config_document(cfg: ModelConfig, special_tokens: Mapping[str, int]) -> dict[str, Any]:
    """The members of config.json. `special_tokens`: ids by role (`bos`, `eos`, `pad`); absent roles are null."""
    document: dict[str, Any] = {
        **token_ids(special_tokens),
        "hybrid": cfg.to_dict(),
        "vocab_size": cfg.vocabulary_size,
        "tie_word_embeddings": cfg.tied_embeddings,
        "torch_dtype": "float32",
    }
    return document | (llama_document(cfg) if is_llama_shaped(cfg) else {"model_type": "hybrid"})


def llama_document(cfg: ModelConfig) -> dict[str, Any]:
    """The members of a LlamaConfig that are its own, of a model that is Llama-shaped."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": cfg.width,
        "intermediate_size": cfg.feed_forward_width,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_width,
        "max_position_embeddings": cfg.context_length,
        "hidden_act": "silu",
        "rms_norm_eps": cfg.norm_eps,
        # transformers 5 reads rope_parameters, earlier ones rope_theta.
        "rope_theta": cfg.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_base},
        "attention_bias": cfg.bias,
        "mlp_bias": cfg.bias,
        "attention_dropout": 0.0,
        "initializer_range": cfg.initializer_range,
        "use_cache": True,
    }


def generation_document(special_tokens: Mapping[str, int]) -> dict[str, Any]:
    """The members of generation_config.json."""
    return {"_from_model_config": True, **token_ids(special_tokens)}


def model_config(source: str, document: object) -> ModelConfig:
    """The model of a config.json that we wrote. Errors: CheckpointCorrupt naming `source`."""
    values = document.get("hybrid") if isinstance(document, dict) else None
    if not isinstance(values, dict):
        raise CheckpointCorrupt(f"{source}: the object 'hybrid' is missing: not the config.json of a checkpoint")
    layers = values.get("layers")
    if isinstance(layers, int) and layers > MAX_LAYERS:  # a schedule of a trillion layers would fill the memory
        raise CheckpointCorrupt(f"{source}: hybrid.layers is {layers}: expected at most {MAX_LAYERS}")
    # JSON does not tell 10000.0 from 10000.
    floats = {field.name for field in fields(ModelConfig) if isinstance(field.default, float)}
    values = {
        key: float(value) if key in floats and isinstance(value, int) and not isinstance(value, bool) else value
        for key, value in values.items()
    }
    try:
        cfg = ModelConfig.from_dict(values)
        cfg.validate()
    except (ConfigError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointCorrupt(f"{source}: the object 'hybrid' describes no model: {error}") from error
    return cfg


def token_ids(special_tokens: Mapping[str, int]) -> dict[str, int | None]:
    """Members of config.json and generation_config.json: the ids by role; ConfigError for an unknown role."""
    if unknown := sorted(set(special_tokens) - set(SPECIAL_TOKENS)):
        raise ConfigError(f"special token(s) {', '.join(unknown)}: expected {', '.join(SPECIAL_TOKENS)}")
    # Written out even when absent: the defaults of transformers would end a text at id 2.
    return {f"{role}_token_id": special_tokens.get(role) for role in SPECIAL_TOKENS}
