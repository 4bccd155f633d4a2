"""Parameters: their names, shapes and initial values, and that their number is the closed formula."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod, sqrt

import numpy as np
import pytest

from hybrid.models.config import ModelConfig
from hybrid.models.initial_numpy import initial_values
from hybrid.models.parameters import count_parameters, parameter_specs, parameter_tree
from models.small import GPT2, LLAMA, LOOPED, MODELS


def test_count_is_the_closed_formula_for_every_combination() -> None:
    for norm, positions, activation, bias, tied, kv_heads, head_width in product(
        ("rms_norm", "layer_norm"),
        ("rope", "learned"),
        ("swiglu", "gelu", "relu2", "silu"),
        (False, True),
        (False, True),
        (0, 1, 2),
        (0, 6),
    ):
        cfg = ModelConfig(
            *(11, 7, 3, 16, 4, 20),
            kv_heads=kv_heads,
            head_width=head_width,
            norm=norm,
            positions=positions,
            activation=activation,
            bias=bias,
            tied_embeddings=tied,
        )
        specs = parameter_specs(cfg)
        assert count_parameters(cfg) == sum(prod(spec.shape) for spec in specs), cfg
        assert len({spec.name for spec in specs}) == len(specs)


def test_known_models_have_their_published_sizes() -> None:
    gpt2 = ModelConfig(
        *(50257, 1024, 12, 768, 12, 3072),
        norm="layer_norm",
        positions="learned",
        activation="gelu",
        bias=True,
        tied_embeddings=True,
    )
    assert count_parameters(gpt2) == 124_439_808
    assert count_parameters(ModelConfig(32000, 4096, 32, 4096, 32, 11008)) == 6_738_415_616
    assert count_parameters(ModelConfig(32000, 2048, 22, 2048, 32, 5632, kv_heads=4)) == 1_100_048_384


def test_llama_names_are_those_of_hugging_face() -> None:
    names = [spec.name for spec in parameter_specs(replace(LLAMA, layers=1, schedule=()))]
    layer = "model.layers.0"
    assert names == [
        "model.embed_tokens.weight",
        f"{layer}.input_layernorm.weight",
        *(f"{layer}.self_attn.{part}_proj.weight" for part in "qkvo"),
        f"{layer}.post_attention_layernorm.weight",
        *(f"{layer}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
        "model.norm.weight",
        "lm_head.weight",
    ]


def test_gpt2_style_adds_biases_and_positions_and_has_no_second_table() -> None:
    names = {spec.name for spec in parameter_specs(GPT2)}
    assert "model.embed_positions.weight" in names
    assert "lm_head.weight" not in names
    linear = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm")
    assert {f"model.layers.1.{name}.bias" for name in linear} <= names
    assert not any("gate_proj" in name for name in names)


@pytest.mark.parametrize("cfg", MODELS.values(), ids=MODELS)
def test_the_tree_holds_every_tensor_once_and_tied_tables_twice(cfg: ModelConfig) -> None:
    asked: list[str] = []
    tree = parameter_tree(cfg, lambda name: asked.append(name) or name)  # type: ignore[func-returns-value]
    assert sorted(asked) == sorted(spec.name for spec in parameter_specs(cfg))
    assert (tree.head.output.weight == tree.embed.tokens.weight) == cfg.tied_embeddings


def test_initial_values_have_the_stated_spread() -> None:
    cfg = replace(LOOPED, width=64, feed_forward_width=96, initializer_range=0.05)
    values = initial_values(cfg, seed=1)
    assert {name: v.shape for name, v in values.items()} == {s.name: s.shape for s in parameter_specs(cfg)}
    assert all(v.dtype == np.float32 for v in values.values())
    for name, array in values.items():
        if array.ndim == 1:
            assert (array == 1.0).all()
            continue
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        expected = 0.05 / sqrt(2 * len(cfg.schedule)) if residual else 0.05
        assert abs(float(array.std()) / expected - 1) < 0.05, name
        assert abs(float(array.mean())) < 0.05 * expected + 3 * expected / sqrt(array.size), name


def test_biases_start_at_zero_and_seeds_differ() -> None:
    values = initial_values(GPT2, seed=1)
    assert all((v == 0.0).all() for name, v in values.items() if name.endswith(".bias"))
    other = initial_values(GPT2, seed=2)
    name = "model.embed_tokens.weight"
    assert (values[name] != other[name]).any()
    np.testing.assert_array_equal(values[name], initial_values(GPT2, seed=1)[name])
