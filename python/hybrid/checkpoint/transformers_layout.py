"""How `transformers` stores the models that we can compute: as which family, and which of its tensors hold ours.

Llama is our own naming. GPT-2 keeps query, key and value in one matrix, stores matrices as [in, out], and has a bias
wherever there can be one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from hybrid.checkpoint.huggingface import MAX_LAYERS, is_llama_shaped, llama_document
from hybrid.errors import ConfigError
from hybrid.models.config import ModelConfig
from hybrid.models.parameters import OUTPUT, POSITIONS, TOKENS, parameter_specs

# Our activations, and the names that transformers has for the same functions.
GPT2_ACTIVATIONS: Final = {
    "gelu": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    "relu2": ("relu2",),
    "silu": ("silu", "swish"),
}


@dataclass(frozen=True)
class Stored:
    """A tensor of the folder. parts: those of ours that it holds, rows below rows; transposed: as [in, out]."""

    name: str
    parts: tuple[str, ...]
    transposed: bool = False


def family(cfg: ModelConfig) -> str:
    """ "llama" or "gpt2", the family that computes the same function. ConfigError says what is in the way of each."""
    if is_llama_shaped(cfg):
        return "llama"
    wanted: dict[str, dict[str, Any]] = {
        "Llama": {"norm": "rms_norm", "positions": "rope", "activation": "swiglu"},
        "GPT-2": {
            "norm": "layer_norm",
            "positions": "learned",
            "activation": cfg.activation if cfg.activation in GPT2_ACTIVATIONS else "gelu",
            "kv_heads": cfg.heads,
            "head_width": cfg.width / cfg.heads,
        },
    }
    plain: dict[str, Any] = {"window": None, "schedule": tuple(range(cfg.layers))}
    problems = []
    for name, values in wanted.items():
        differences = [
            f"{key} = {getattr(cfg, key)!r} (not {value!r})"
            for key, value in {**values, **plain}.items()
            if getattr(cfg, key) != value
        ]
        if not differences and name == "GPT-2":
            return "gpt2"
        problems.append(f"{name} lacks {', '.join(differences)}")
    raise ConfigError(f"no model that transformers has computes this one: {'; '.join(problems)}")


def layout(cfg: ModelConfig) -> tuple[Stored, ...]:
    """The tensors of the folder of a model. ConfigError: as `family`."""
    if family(cfg) == "llama":
        return tuple(Stored(spec.name, (spec.name,)) for spec in parameter_specs(cfg))
    tensors = [Stored("transformer.wte.weight", (TOKENS,)), Stored("transformer.wpe.weight", (POSITIONS,))]

    def with_bias(name: str, *ours: str, transposed: bool = False) -> None:
        tensors.append(Stored(f"{name}.weight", tuple(f"{own}.weight" for own in ours), transposed))
        tensors.append(Stored(f"{name}.bias", tuple(f"{own}.bias" for own in ours)))

    for i in range(cfg.layers):
        theirs, ours = f"transformer.h.{i}", f"model.layers.{i}"
        attention = [f"{ours}.self_attn.{part}_proj" for part in ("q", "k", "v")]
        with_bias(f"{theirs}.ln_1", f"{ours}.input_layernorm")
        with_bias(f"{theirs}.attn.c_attn", *attention, transposed=True)
        with_bias(f"{theirs}.attn.c_proj", f"{ours}.self_attn.o_proj", transposed=True)
        with_bias(f"{theirs}.ln_2", f"{ours}.post_attention_layernorm")
        with_bias(f"{theirs}.mlp.c_fc", f"{ours}.mlp.up_proj", transposed=True)
        with_bias(f"{theirs}.mlp.c_proj", f"{ours}.mlp.down_proj", transposed=True)
    with_bias("transformer.ln_f", "model.norm")
    if not cfg.tied_embeddings:
        tensors.append(Stored(OUTPUT, (OUTPUT,)))
    return tuple(tensors)


def part_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of all parts that `layout` names: the model's parameters, and the biases that it lacks."""
    return {spec.name: spec.shape for spec in parameter_specs(replace(cfg, bias=family(cfg) == "gpt2" or cfg.bias))}


def config_document(cfg: ModelConfig, special_tokens: Mapping[str, int | None]) -> dict[str, Any]:
    """The members of config.json. special_tokens: those of `huggingface.token_ids`. ConfigError: as `family`."""
    if family(cfg) == "llama":
        own = llama_document(cfg)
    else:
        own = {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_positions": cfg.context_length,
            "n_embd": cfg.width,
            "n_layer": cfg.layers,
            "n_head": cfg.heads,
            "n_inner": cfg.feed_forward_width,
            "activation_function": GPT2_ACTIVATIONS[cfg.activation][0],
            "layer_norm_epsilon": cfg.norm_eps,
            "embd_pdrop": cfg.dropout,
            "resid_pdrop": cfg.dropout,
            "attn_pdrop": 0.0,
            "initializer_range": cfg.initializer_range,
            "use_cache": True,
        }
    return {
        **own,
        **special_tokens,
        "vocab_size": cfg.vocabulary_size,
        "tie_word_embeddings": cfg.tied_embeddings,
        "torch_dtype": "float32",
    }


# --- reading config.json ---------------------------------------------------------------------------------------------


def model_config(source: str, document: object) -> ModelConfig:
    """The model of a config.json that transformers wrote.

    ConfigError naming `source` and the member: for another family than Llama and GPT-2, a variant of them that we
    cannot compute, a member that is missing or of the wrong kind.
    """
    if not isinstance(document, dict):
        raise ConfigError(f"{source}: expected an object, got {type(document).__name__}")
    read = {"llama": _llama, "gpt2": _gpt2}.get(str(document.get("model_type")))
    if read is None:
        raise ConfigError(f"{source}: model_type is {document.get('model_type')!r:.80}: expected 'llama' or 'gpt2'")
    cfg = read(_Members(source, document))
    try:
        cfg.validate()
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return cfg


class _Members:
    """The members of a config.json, each read as one kind. An absent one, or null, is its default."""

    def __init__(self, source: str, document: Mapping[str, Any]) -> None:
        self._source = source
        self._document = document

    def whole(self, name: str, default: int | None = None, most: int = 2**31 - 1) -> int:
        value = self._get(name, default)
        if type(value) is not int or not 1 <= value <= most:
            raise self._wrong(name, value, f"a whole number from 1 to {most}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._get(name, default)
        if type(value) not in (int, float):
            raise self._wrong(name, value, "a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if type(value) is not bool:
            raise self._wrong(name, value, "true or false")
        return value

    def one_of(self, name: str, default: str, expected: tuple[str, ...]) -> str:
        value = self._get(name, default)
        if value not in expected:
            raise self._wrong(name, value, " or ".join(map(repr, expected)))
        return str(value)

    def must_be(self, name: str, expected: object) -> None:
        """Where the member is there, it is this."""
        value = self._get(name, expected)
        if value != expected:
            raise self._wrong(name, value, f"{expected!r}, nothing else is computed here")

    def group(self, name: str) -> _Members:
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object")
        return _Members(f"{self._source}: {name}", value)

    def _get(self, name: str, default: object) -> Any:
        value = self._document.get(name)
        if value is None and default is None:
            raise ConfigError(f"{self._source}: {name} is missing")
        return default if value is None else value

    def _wrong(self, name: str, value: object, expected: str) -> ConfigError:
        return ConfigError(f"{self._source}: {name} is {value!r:.80}: expected {expected}")


def _llama(members: _Members) -> ModelConfig:
    heads, width = members.whole("num_attention_heads"), members.whole("hidden_size")
    members.must_be("hidden_act", "silu")
    members.must_be("rope_scaling", {})
    rope = members.group("rope_parameters")  # of transformers 5; earlier ones have rope_theta
    for name in ("rope_type", "type"):
        rope.must_be(name, "default")
    rope.must_be("partial_rotary_factor", 1.0)
    bias = members.flag("attention_bias", False)
    members.must_be("mlp_bias", bias)
    return ModelConfig(
        vocabulary_size=members.whole("vocab_size"),
        context_length=members.whole("max_position_embeddings", 2048),
        layers=members.whole("num_hidden_layers", most=MAX_LAYERS),
        width=width,
        heads=heads,
        kv_heads=members.whole("num_key_value_heads", heads),
        head_width=members.whole("head_dim", width // heads or 1),
        feed_forward_width=members.whole("intermediate_size"),
        norm_eps=members.number("rms_norm_eps", 1e-6),
        rope_base=rope.number("rope_theta", members.number("rope_theta", 10000.0)),
        bias=bias,
        tied_embeddings=members.flag("tie_word_embeddings", False),
        initializer_range=members.number("initializer_range", 0.02),
    )


def _gpt2(members: _Members) -> ModelConfig:
    names = tuple(name for theirs in GPT2_ACTIVATIONS.values() for name in theirs)
    activation = members.one_of("activation_function", "gelu_new", names)
    members.must_be("scale_attn_weights", True)
    members.must_be("scale_attn_by_inverse_layer_idx", False)
    members.must_be("add_cross_attention", False)
    heads, width = members.whole("n_head"), members.whole("n_embd")
    members.must_be("n_embd", width // heads * heads)
    return ModelConfig(
        vocabulary_size=members.whole("vocab_size"),
        context_length=members.whole("n_positions"),
        layers=members.whole("n_layer", most=MAX_LAYERS),
        width=width,
        heads=heads,
        feed_forward_width=members.whole("n_inner", 4 * width),
        norm="layer_norm",
        norm_eps=members.number("layer_norm_epsilon", 1e-5),
        positions="learned",
        activation=next(own for own, theirs in GPT2_ACTIVATIONS.items() if activation in theirs),
        bias=True,
        tied_embeddings=members.flag("tie_word_embeddings", True),
        initializer_range=members.number("initializer_range", 0.02),
    )
