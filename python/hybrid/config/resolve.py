"""Derived values: everything a configuration leaves to be worked out, worked out, and the checks between sections.

A resolved configuration is what run.json and checkpoints hold. (run.steps stays null in a run measured in epochs: it
follows from the data.)
"""

from __future__ import annotations

from typing import Any

from pydantic.alias_generators import to_camel

from hybrid.config.loading import to_settings
from hybrid.config.tree import ModelSection, RunConfig
from hybrid.errors import ConfigError
from hybrid.models.config import ModelConfig
from hybrid.optim.settings import OptimizerSettings


def check(config: RunConfig) -> None:
    """ConfigError for settings that contradict each other; needs no data."""
    data, model, scaling = config.data, config.model, config.loss_scaling
    if data.microbatch_size is not None and data.batch_size % data.microbatch_size:
        raise ConfigError(
            f"data.microbatchSize = {data.microbatch_size}: expected a divisor of data.batchSize = {data.batch_size}"
        )
    if model.context_length is not None and model.context_length < data.sequence_length:
        raise ConfigError(
            f"model.contextLength = {model.context_length}: expected at least data.sequenceLength = "
            f"{data.sequence_length}; --set data.sequenceLength={model.context_length} makes samples that fit"
        )
    if config.schedule.min_lr > config.optimizer.lr:
        raise ConfigError(
            f"schedule.minLr = {config.schedule.min_lr}: expected at most optimizer.lr = {config.optimizer.lr}"
        )
    if not scaling.min_scale <= scaling.initial_scale <= scaling.max_scale:
        raise ConfigError(
            f"lossScaling.initialScale = {scaling.initial_scale}: expected between "
            f"lossScaling.minScale = {scaling.min_scale} and lossScaling.maxScale = {scaling.max_scale}"
        )
    if data.tokenizer.path is not None and data.tokenizer.type != "bpe":
        raise ConfigError(
            f"data.tokenizer.path is set: expected data.tokenizer.type = 'bpe', got {data.tokenizer.type!r}"
        )
    stride = data.samples.stride
    if stride is not None and (data.samples.mode == "packed" or stride > data.sequence_length):
        raise ConfigError(
            f"data.samples.stride = {stride}: expected at most data.sequenceLength = {data.sequence_length}, and only "
            "with data.samples.mode = 'windows'"
        )
    alerts = config.telemetry.alerts
    if alerts.fail_on_alert and not alerts.enabled:
        raise ConfigError("telemetry.alerts.failOnAlert = true: expected telemetry.alerts.enabled = true as well")
    _check_model(_update(config, model=resolved_model(config, vocabulary_size=1)))


def resolve(config: RunConfig, vocabulary_size: int, train_samples: int, begun: RunConfig | None = None) -> RunConfig:
    """`config` with every derived value filled in.

    vocabulary_size: what the tokenizer needs. train_samples: samples of one epoch. begun: the resolved configuration
    of the run that is continued; what follows from the length of the run (schedule.totalSteps) stays as it was when
    that run began. Raises ConfigError.
    """
    check(config)
    steps, _ = run_length(config, train_samples)
    total = config.schedule.total_steps
    if total is None and begun is not None:
        total = begun.schedule.total_steps
    if total is None:
        total = scheduled_steps(config, steps)
    scaling = config.loss_scaling.enabled
    resolved = config.model_copy(
        update={
            "model": resolved_model(config, vocabulary_size),
            "data": _update(config.data, microbatch_size=config.data.microbatch_size or config.data.batch_size),
            "schedule": _update(config.schedule, total_steps=total),
            "loss_scaling": _update(
                config.loss_scaling, enabled=config.precision.type == "mixed-f16" if scaling is None else scaling
            ),
        }
    )
    _check_model(resolved)
    return resolved


def run_length(config: RunConfig, train_samples: int) -> tuple[int, int | None]:
    """(optimizer steps of the run, samples after which it ends or None). A run measured in epochs ends after exactly
    that many samples, with a last step that may be partly empty."""
    if config.run.steps is not None:
        return config.run.steps, None
    limit = config.run.epochs * train_samples
    return -(-limit // config.data.batch_size), limit


def scheduled_steps(config: RunConfig, steps: int) -> int:
    """schedule.totalSteps of a run of this length: what the warm-up leaves of it, and at least one."""
    return max(1, steps - config.schedule.warmup_steps)


def model_config(config: RunConfig) -> ModelConfig:
    """The decoder's configuration from a resolved `config`."""
    fields = config.model.model_dump()
    return ModelConfig(**fields)


def optimizer_settings(config: RunConfig) -> OptimizerSettings:
    """The update rule and its schedule from a resolved `config`."""
    settings = to_settings(config)
    optimizer = {key: value for key, value in settings["optimizer"].items() if key != "maxNorm"}
    return OptimizerSettings.from_dict({**optimizer, "scheduler": {"enabled": True, **settings["schedule"]}})


def _check_model(config: RunConfig) -> None:
    try:
        model_config(config).validate()
    except ConfigError as error:
        raise ConfigError(_file_keys(str(error))) from None


def _file_keys(message: str) -> str:
    """The model checks itself in its own field names; say those that a configuration file has."""
    for name in ModelSection.model_fields:
        message = message.replace(f"model.{name} ", f"model.{to_camel(name)} ")
    return message


def resolved_model(config: RunConfig, vocabulary_size: int) -> Any:
    """The model section with every derived value filled in. vocabulary_size: what the tokenizer needs. ConfigError."""
    model = config.model
    if model.vocabulary_size is not None and model.vocabulary_size < vocabulary_size:
        raise ConfigError(
            f"model.vocabularySize = {model.vocabulary_size}: the tokenizer has {vocabulary_size} ids; "
            "expected at least as many, or null"
        )
    if model.head_width is None and model.width % model.heads:
        raise ConfigError(
            f"model.width = {model.width}: expected a multiple of model.heads = {model.heads}, or model.headWidth set"
        )
    if model.activation == "swiglu":
        hidden = -(-8 * model.width // 3 // 32) * 32
    else:
        hidden = 4 * model.width
    return _update(
        model,
        vocabulary_size=model.vocabulary_size or vocabulary_size,
        context_length=model.context_length or config.data.sequence_length,
        kv_heads=model.kv_heads or model.heads,
        head_width=model.head_width or model.width // model.heads,
        feed_forward_width=model.feed_forward_width or hidden,
        schedule=model.schedule or tuple(range(model.layers)),
    )


def _update(section: Any, **values: Any) -> Any:
    return section.model_copy(update=values)
