"""Settings that a page sends, as what a plan is compiled for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid.bridge.job import plan_settings
from hybrid.config.problems import parse_config
from hybrid.config.resolve import model_config, resolve
from hybrid.errors import ConfigError, LimitExceeded
from hybrid.models.parameters import count_parameters
from hybrid.plan.compiler import PlanSettings

MOST_PARAMETERS = 2**34
MOST_BLOCKS = 512


def plan_settings_of(config: Mapping[str, Any]) -> PlanSettings:
    """What the settings of a run, which need not be resolved, compile to. A length of the vocabulary is needed: there
    is no text here that it could follow from. Errors: ConfigError, LimitExceeded."""
    try:
        given = parse_config(config)
        if given.model.vocabulary_size is None:
            raise ConfigError("model.vocabularySize is null: a plan needs the number of ids that the tokenizer has")
        resolved = resolve(given, given.model.vocabulary_size, 1)
    except (ValueError, RecursionError, OverflowError) as error:
        raise ConfigError(f"the settings cannot be read: {error!r:.200}") from None
    model = model_config(resolved)
    parameters, blocks = count_parameters(model), len(model.schedule)
    if parameters > MOST_PARAMETERS or blocks > MOST_BLOCKS:
        raise LimitExceeded(
            f"a model of {parameters:,} parameters in {blocks} layers: plans are compiled here for at most "
            f"{MOST_PARAMETERS:,} in {MOST_BLOCKS}"
        )
    return plan_settings(resolved)
