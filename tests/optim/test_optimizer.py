"""Decay touches only what it should, tables hold float64 truths, and AdamW is torch's AdamW."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from hybrid.errors import ConfigError
from hybrid.models.config import ModelConfig
from hybrid.models.parameters import parameter_specs
from hybrid.optim.adamw import ADAMW, step
from hybrid.optim.groups import parameter_groups
from hybrid.optim.schedules import learning_rate
from hybrid.optim.settings import OptimizerSettings, SchedulerSettings
from hybrid.optim.table import COLUMNS, rows


@dataclass
class Spec:
    name: str
    shape: tuple[int, ...]


def test_matrices_and_tables_decay_norms_and_biases_do_not():
    specs = [
        Spec("model.embed_tokens.weight", (8, 4)),
        Spec("model.layers.0.input_layernorm.weight", (4,)),
        Spec("model.layers.0.self_attn.q_proj.weight", (4, 4)),
        Spec("model.layers.0.self_attn.q_proj.bias", (4,)),
        Spec("model.norm.weight", (4,)),
        Spec("lm_head.weight", (8, 4)),
    ]
    decay, no_decay = parameter_groups(specs)
    assert (decay.name, decay.decay, decay.names) == ("decay", True, (specs[0].name, specs[2].name, specs[5].name))
    assert (no_decay.name, no_decay.decay) == ("no_decay", False)
    assert no_decay.names == (specs[1].name, specs[3].name, specs[4].name)


BLOCK = [f"self_attn.{part}_proj.weight" for part in "qkvo"]
GATED = [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
PLAIN = [f"mlp.{part}_proj.weight" for part in ("up", "down")]
NORMS = ["input_layernorm.weight", "post_attention_layernorm.weight"]


def in_layers(names):
    return {f"model.layers.{layer}.{name}" for layer in (0, 1) for name in names}


def test_every_parameter_of_a_llama_is_in_its_group():
    cfg = ModelConfig(vocabulary_size=16, context_length=8, layers=2, width=8, heads=2, feed_forward_width=16)
    decay, no_decay = parameter_groups(parameter_specs(cfg))
    assert set(decay.names) == {"model.embed_tokens.weight", "lm_head.weight"} | in_layers(BLOCK + GATED)
    assert set(no_decay.names) == {"model.norm.weight"} | in_layers(NORMS)


def test_every_parameter_of_a_gpt2_is_in_its_group():
    cfg = ModelConfig(
        vocabulary_size=16,
        context_length=8,
        layers=2,
        width=8,
        heads=2,
        feed_forward_width=16,
        norm="layer_norm",
        positions="learned",
        activation="gelu",
        bias=True,
        tied_embeddings=True,
    )
    decay, no_decay = parameter_groups(parameter_specs(cfg))
    tables = {"model.embed_tokens.weight", "model.embed_positions.weight"}
    biases = [name.replace("weight", "bias") for name in BLOCK + PLAIN + NORMS]
    assert set(decay.names) == tables | in_layers(BLOCK + PLAIN)
    assert set(no_decay.names) == {"model.norm.weight", "model.norm.bias"} | in_layers(NORMS + biases)


def test_there_are_two_groups_even_when_one_is_empty():
    assert [group.names for group in parameter_groups([Spec("norm.weight", (4,))])] == [(), ("norm.weight",)]


def test_a_row_holds_corrections_rates_and_decays():
    settings = OptimizerSettings(
        lr=0.01,
        weight_decay=0.1,
        scheduler=SchedulerSettings(enabled=True, type="cosine", warmup_steps=3, total_steps=9),
    )
    table = rows(settings, 1, 12)
    assert all(len(row) == len(COLUMNS) for row in table)
    for t, row in enumerate(table, start=1):
        rate = learning_rate(settings.to_dict(), t)[0]
        assert row[:2] == pytest.approx([1 - 0.9**t, 1 - 0.999**t], rel=1e-13)
        assert row[2:] == [rate, 0.1, rate, 0.0]
    assert table[0][0] == 1 - 0.9


def test_windows_of_the_table_are_slices_of_it():
    settings = OptimizerSettings(scheduler=SchedulerSettings(enabled=True, type="wsd", total_steps=20))
    whole = rows(settings, 1, 30)
    assert rows(settings, 11, 7) == whole[10:17]
    assert rows(settings, 5, 0) == []
    with pytest.raises(ConfigError, match="step 0"):
        rows(settings, 0, 1)


def test_settings_survive_the_round_trip_through_the_configuration():
    settings = OptimizerSettings(type="adamw", lr=1e-3, weight_decay=0.1, scheduler=SchedulerSettings(True, "wsd", 5))
    assert OptimizerSettings.from_dict(settings.to_dict()) == settings
    assert OptimizerSettings.from_dict({"lr": None, "scheduler": None}) == OptimizerSettings()
    assert settings.to_dict()["scheduler"]["warmupSteps"] == 5


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"type": "adamW"}, "'adamW': did you mean 'adam"),
        ({"weightdecay": 0.1}, "optimizer field 'weightdecay': did you mean 'weightDecay'"),
        ({"scheduler": {"warmup": 3}}, "optimizer.scheduler field 'warmup'"),
        ({"scheduler": {"type": "cosinus"}}, "'cosinus': did you mean 'cosine'"),
        ({"scheduler": {"decayShape": "line"}}, "'line': did you mean 'linear'"),
        ({"lr": -1}, "optimizer.lr is -1"),
        ({"lr": float("nan")}, "optimizer.lr is nan"),
        ({"beta1": 1}, "optimizer.beta1 is 1"),
        ({"eps": 0}, "optimizer.eps is 0"),
        ({"scheduler": {"gamma": 0}}, "scheduler.gamma is 0"),
        ({"lr": 0.1, "scheduler": {"enabled": True, "type": "wsd", "minLr": 0.2}}, "the rate would rise"),
    ],
)
def test_impossible_settings_are_refused_by_name(document, message):
    with pytest.raises(ConfigError, match=message):
        OptimizerSettings.from_dict(document)


def test_the_first_adam_step_moves_by_the_rate_against_the_sign():
    settings = OptimizerSettings(lr=0.5)
    parameter, moment1, moment2 = [1.0, -2.0, 3.0], [0.0] * 3, [0.0] * 3
    step(parameter, [0.1, -4.0, 0.0], moment1, moment2, settings, rows(settings, 1, 1)[0], group=0)
    assert parameter == pytest.approx([0.5, -1.5, 3.0], abs=1e-6)
    assert moment1 == pytest.approx([0.01, -0.4, 0.0])
    assert moment2 == pytest.approx([1e-5, 0.016, 0.0])


def test_decay_is_decoupled_and_only_for_group_0():
    settings = OptimizerSettings(lr=0.1, weight_decay=0.5)
    row = rows(settings, 1, 1)[0]
    for group, expected in ((0, 2.0 * (1 - 0.1 * 0.5)), (1, 2.0)):
        parameter = [2.0]
        step(parameter, [0.0], [0.0], [0.0], settings, row, group)
        assert parameter == [expected]


def test_the_multiplier_unscales_the_gradient_before_the_moments():
    settings = OptimizerSettings()
    row = rows(settings, 1, 1)[0]
    plain, scaled = ([1.0], [0.0], [0.0]), ([1.0], [0.0], [0.0])
    step(plain[0], [0.25], plain[1], plain[2], settings, row, 0)
    step(scaled[0], [256.0], scaled[1], scaled[2], settings, row, 0, multiplier=1 / 1024)
    assert scaled == plain


def test_the_rule_names_its_state():
    assert ADAMW.slots == ("moment1", "moment2")
    assert len(ADAMW.formula) == 4


@pytest.mark.torch
def test_twenty_steps_equal_those_of_torch():
    torch = pytest.importorskip("torch")
    settings = OptimizerSettings(lr=0.01, beta1=0.8, beta2=0.95, weight_decay=0.1)
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()
    optimizer = torch.optim.AdamW([weight], lr=0.01, betas=(0.8, 0.95), eps=1e-8, weight_decay=0.1)
    parameter, moment1, moment2 = weight.detach().tolist(), [0.0] * 6, [0.0] * 6
    for row in rows(settings, 1, 20):
        gradient = torch.randn(6, generator=generator, dtype=torch.float64)
        weight.grad = gradient
        optimizer.step()
        step(parameter, gradient.tolist(), moment1, moment2, settings, row, group=0)
    assert parameter == pytest.approx(weight.detach().tolist(), rel=1e-12)
