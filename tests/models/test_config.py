"""A model that cannot exist is refused, naming the setting, its value and what was expected."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybrid.errors import ConfigError
from hybrid.models.config import ModelConfig
from hybrid.models.decoder import layer_labels
from models.small import LLAMA, LOOPED, MODELS


def test_what_follows_from_the_rest_is_filled_in() -> None:
    cfg = ModelConfig(10, 8, 3, 32, 4, 64)
    assert (cfg.kv_heads, cfg.head_width, cfg.schedule) == (4, 8, (0, 1, 2))
    assert cfg == ModelConfig(10, 8, 3, 32, 4, 64, kv_heads=4, head_width=8, schedule=(0, 1, 2))


@pytest.mark.parametrize("cfg", MODELS.values(), ids=MODELS)
def test_the_small_models_are_valid_and_survive_json(cfg: ModelConfig) -> None:
    cfg.validate()
    assert ModelConfig.from_dict(cfg.to_dict()) == cfg


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0, "schedule": (0,)}, "model.layers is 0"),
        ({"width": -1}, "model.width is -1"),
        ({"heads": True}, "model.heads is True"),
        ({"kv_heads": 3}, "model.kv_heads is 3: it must divide model.heads, which is 4"),
        ({"head_width": 7}, "model.head_width is 7: .* even"),
        ({"norm": "batch_norm"}, "model.norm is 'batch_norm': expected one of rms_norm, layer_norm"),
        ({"positions": "alibi"}, "model.positions is 'alibi'"),
        ({"activation": "tanh"}, "model.activation is 'tanh'"),
        ({"window": 0}, "model.window is 0"),
        ({"dropout": 1.0}, "model.dropout is 1.0"),
        ({"dropout": float("nan")}, "model.dropout is nan"),
        ({"norm_eps": 0.0}, "model.norm_eps is 0.0"),
        ({"rope_base": float("inf")}, "model.rope_base is inf"),
        ({"vocabulary_size": 2**32 - 1}, "model.vocabulary_size is 4294967295"),
        ({"schedule": (0, 2)}, "model.schedule is .*0..1"),
        ({"schedule": (1, 1)}, r"model.schedule never runs layer\(s\) \[0\]"),
    ],
)
def test_impossible_settings_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(LLAMA, **change).validate()


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown key\(s\) widht"):
        ModelConfig.from_dict({**LLAMA.to_dict(), "widht": 3})


def test_each_pass_of_a_looped_model_has_its_own_label() -> None:
    assert layer_labels(LLAMA) == ["layers.0", "layers.1"]
    assert layer_labels(LOOPED) == ["layers.0", "layers.1", "layers.0.pass1", "layers.1.pass1", "layers.1.pass2"]
