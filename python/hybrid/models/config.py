"""The shape of a decoder, as data."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite
from typing import Any

from hybrid.errors import ConfigError

NORMS = ("rms_norm", "layer_norm")
POSITIONS = ("rope", "learned")
ACTIVATIONS = ("swiglu", "gelu", "relu2", "silu")
_SIZES = (
    *("vocabulary_size", "context_length", "layers", "width", "feed_forward_width"),
    *("heads", "kv_heads", "head_width"),
)


@dataclass(frozen=True)
class ModelConfig:
    """One decoder. Widths and counts are in elements; everything is static for the life of a run.

    vocabulary_size V; context_length: positions 0..context_length-1 exist; layers: distinct layers; width C; heads H;
    kv_heads K (0: as many as heads); head_width D (0: width / heads); feed_forward_width F.
    bias: biases on the layers' linear maps, and on layer norms (RMS norms and the output projection never have one).
    window: a query sees the last `window` positions including its own; None sees all.
    dropout: rate after the embedding and on each residual branch.
    schedule: layer indices in execution order; () runs each layer once. A looped model repeats indices.
    initializer_range: standard deviation of initial weights.
    """

    vocabulary_size: int
    context_length: int
    layers: int
    width: int
    heads: int
    feed_forward_width: int
    kv_heads: int = 0
    head_width: int = 0
    norm: str = "rms_norm"
    norm_eps: float = 1e-5
    positions: str = "rope"
    rope_base: float = 10000.0
    activation: str = "swiglu"
    bias: bool = False
    tied_embeddings: bool = False
    window: int | None = None
    dropout: float = 0.0
    schedule: tuple[int, ...] = ()
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        # Fill in what follows from the rest, so that two spellings of one model are equal.
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_width", self.head_width or self.width // max(self.heads, 1))
        object.__setattr__(self, "schedule", tuple(self.schedule) or tuple(range(self.layers)))

    @property
    def gated(self) -> bool:
        """Whether the feed-forward part has a gate projection beside the up projection."""
        return self.activation == "swiglu"

    @property
    def norm_bias(self) -> bool:
        return self.bias and self.norm == "layer_norm"

    def validate(self) -> None:
        """Raise ConfigError for a model that cannot exist."""
        for name in _SIZES:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"model.{name} is {value!r}: expected a whole number of at least 1")
        for name, allowed in (("norm", NORMS), ("positions", POSITIONS), ("activation", ACTIVATIONS)):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"model.{name} is {getattr(self, name)!r}: expected one of {', '.join(allowed)}")
        if self.vocabulary_size >= 2**32 - 1:
            raise ConfigError(
                f"model.vocabulary_size is {self.vocabulary_size}: token ids are 32 bits and the largest is reserved"
            )
        if self.heads % self.kv_heads:
            raise ConfigError(f"model.kv_heads is {self.kv_heads}: it must divide model.heads, which is {self.heads}")
        if self.positions == "rope" and self.head_width % 2:
            raise ConfigError(f"model.head_width is {self.head_width}: rotary positions turn pairs, so it must be even")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"model.window is {self.window}: expected at least 1, or none for full attention")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"model.dropout is {self.dropout}: expected a rate of at least 0 and below 1")
        for name in ("norm_eps", "rope_base", "initializer_range"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ConfigError(f"model.{name} is {getattr(self, name)}: expected a finite number above 0")
        used = set(self.schedule)
        if not used <= set(range(self.layers)):
            raise ConfigError(
                f"model.schedule is {self.schedule}: its entries must be layer indices 0..{self.layers - 1}"
            )
        if unused := sorted(set(range(self.layers)) - used):
            raise ConfigError(
                f"model.schedule never runs layer(s) {unused}: drop them from model.layers or schedule them"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, for the plan and the run's configuration."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "schedule": list(self.schedule)}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> ModelConfig:
        """The inverse of `to_dict`; an unknown key is a ConfigError."""
        known = {field.name for field in fields(ModelConfig)}
        if unknown := sorted(set(values) - known):
            raise ConfigError(f"model has unknown key(s) {', '.join(unknown)}: expected {', '.join(sorted(known))}")
        return ModelConfig(**{**values, "schedule": tuple(values.get("schedule", ()))})
