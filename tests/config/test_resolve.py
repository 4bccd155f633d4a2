"""Derived values, checks between sections, and the contract."""

from __future__ import annotations

import pytest

from hybrid.config.contract import contract
from hybrid.config.loading import load_config
from hybrid.config.resolve import check, model_config, optimizer_settings, resolve, run_length
from hybrid.config.tree import RunConfig
from hybrid.errors import ConfigError
from hybrid.models.parameters import count_parameters
from hybrid.optim.schedules import learning_rate


def resolved(*assignments: str, preset: str = "stdlib-tiny") -> RunConfig:
    return resolve(load_config(preset=preset, assignments=assignments), vocabulary_size=256, train_samples=1000)


def test_a_resolved_model_has_every_number() -> None:
    model = resolved("model.feedForwardWidth=null").model
    assert (model.vocabulary_size, model.context_length, model.kv_heads, model.head_width) == (256, 64, 4, 32)
    assert model.feed_forward_width == 352, "8/3 * 128 rounded up to a multiple of 32"
    assert model.schedule == (0, 1, 2, 3)
    assert model_config(resolved()).vocabulary_size == 256


def test_gpt2_small_is_gpt2s_smallest_model() -> None:
    config = resolve(load_config(preset="gpt2-small"), vocabulary_size=50257, train_samples=1000)
    v, c, f, t, layers = 50257, 768, 3072, 1024, 12
    per_layer = 4 * (c * c + c) + (f * c + f) + (c * f + c) + 2 * 2 * c
    assert v * c + t * c + layers * per_layer + 2 * c == 124_439_808
    assert count_parameters(model_config(config)) == 124_439_808


def test_a_run_measured_in_epochs_ends_after_exactly_their_samples() -> None:
    epochs = resolved("run.steps=null", "run.epochs=3", "data.batchSize=7")
    assert run_length(epochs, 1000) == (429, 3000), "3 * 1000 samples in batches of 7, the last one partly empty"
    assert epochs.schedule.total_steps == 429 - 20
    assert run_length(resolved("run.steps=9"), 1000) == (9, None)
    assert contract(epochs)["run"] == {"seed": 1337, "epochs": 3}


def test_the_schedule_fills_the_run_after_the_warm_up() -> None:
    assert resolved("run.steps=100", "schedule.warmupSteps=10").schedule.total_steps == 90
    assert resolved(preset="shakespeare-char").schedule.total_steps == 1900


def test_a_schedule_that_follows_the_run_is_fixed_when_the_run_begins() -> None:
    begun = resolved("run.steps=100", "schedule.warmupSteps=10")
    longer = load_config(assignments=["run.steps=500", "schedule.warmupSteps=10"])
    continued = resolve(longer, vocabulary_size=256, train_samples=1000, begun=begun)
    assert continued.run.steps == 500 and continued.schedule.total_steps == 90
    assert contract(continued) == contract(begun)


def test_the_optimizer_gets_its_schedule() -> None:
    settings = optimizer_settings(resolved(preset="shakespeare-char"))
    rates = [learning_rate(settings.to_dict(), t)[0] for t in (1, 100, 101, 2001, 3000)]
    assert rates == [1e-4, 1e-3, 1e-3, 1e-4, 1e-4], "never below minLr, whole half wave after the warm-up"


def test_loss_scaling_is_on_in_mixed_precision_unless_said_otherwise() -> None:
    assert resolved().loss_scaling.enabled is False
    assert resolved("precision.type=mixed-f16").loss_scaling.enabled is True
    assert resolved("precision.type=mixed-f16", "lossScaling.enabled=false").loss_scaling.enabled is False


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["data.microbatchSize=3"], "expected a divisor of data.batchSize = 8"),
        (["model.contextLength=32"], "expected at least data.sequenceLength = 64"),
        (["schedule.minLr=1.0"], "expected at most optimizer.lr"),
        (["lossScaling.initialScale=0.5"], "expected between lossScaling.minScale"),
        (["data.tokenizer.path=t.json"], "expected data.tokenizer.type = 'bpe'"),
        (["data.samples.stride=65"], "expected at most data.sequenceLength"),
        (["data.samples.stride=1", "data.samples.mode=packed"], "only with data.samples.mode = 'windows'"),
        (["model.heads=8", "model.kvHeads=3"], "model.kvHeads is 3: it must divide model.heads"),
        (["model.headWidth=3"], "model.headWidth is 3: rotary positions turn pairs"),
        (["model.schedule=[0, 1]"], "model.schedule never runs"),
        (["telemetry.alerts.failOnAlert=true"], "expected telemetry.alerts.enabled = true"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(assignments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(load_config(assignments=assignments))


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["model.vocabularySize=100"], "the tokenizer has 256 ids"),
        (["model.width=130"], "expected a multiple of model.heads"),
        (["model.kvHeads=3"], "model.kvHeads"),
        (["model.schedule=[0, 9]"], "model.schedule"),
    ],
)
def test_a_model_that_cannot_exist_is_refused_in_the_words_of_the_file(assignments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(*assignments)


@pytest.mark.parametrize(
    "assignment",
    [
        "telemetry.windowSize=3",
        "telemetry.alerts.enabled=true",
        "run.logEvery=3",
        "run.name=other",
        "run.maxHours=2",
        "checkpoint.every=7",
        "evaluation.every=7",
        "sampling.every=7",
        "backend.name=reference",
        "backend.recompute=true",
        "data.prefetch=0",
        "data.microbatchSize=2",
        "schedule.gamma=0.5",
        "lossScaling.growthInterval=5",
    ],
)
def test_what_cannot_change_the_trajectory_is_outside_the_contract(assignment: str) -> None:
    assert contract(resolved(assignment)) == contract(resolved())


@pytest.mark.parametrize(
    "assignment",
    [
        "model.width=64",
        "model.dropout=0.1",
        "data.batchSize=16",
        "data.sequenceLength=32",
        "data.split.validationShare=0.2",
        "data.samples.mode=packed",
        "objective.zLoss=1e-4",
        "optimizer.lr=0.01",
        "optimizer.maxNorm=2.0",
        "schedule.warmupSteps=1",
        "schedule.totalSteps=77",
        "schedule.type=wsd",
        "precision.type=mixed-f16",
        "lossScaling.enabled=true",
        "run.seed=1",
    ],
)
def test_what_can_change_the_trajectory_is_in_the_contract(assignment: str) -> None:
    assert contract(resolved(assignment)) != contract(resolved())


def test_the_length_of_the_run_is_in_the_contract_only_through_the_schedule() -> None:
    fixed = "schedule.totalSteps=100"
    assert contract(resolved(fixed, "run.steps=10")) == contract(resolved(fixed, "run.steps=20"))
    constant = "schedule.type=constant"
    assert contract(resolved(constant, "run.steps=10")) == contract(resolved(constant, "run.steps=20"))
