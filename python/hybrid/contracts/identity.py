"""Identity hashes of the mirrored runner's checkpoints: what they cover, and which of them a resume compares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid.contracts.javascript import is_integer, optional_text
from hybrid.contracts.stable_json import stable_hash

COMPARED = ("configHash", "datasetHash", "tokenizerHash", "optimizerHash", "runtimePresetId", "kernelPathId")


def checkpoint_identity(options: Mapping[str, Any], training: Mapping[str, Any]) -> dict[str, str | None]:
    """The six identity fields from run options and the `training` configuration; None for those that are not known.

    `optimizerHash` covers the optimizer's configuration and `optimizerStepCount`, as a resume expects it.
    """
    stage = options.get("trainingStage")
    stage = stage or (training.get("distill") or {}).get("stage") or (training.get("ul") or {}).get("stage")
    step_count = options.get("optimizerStepCount")
    dataset = {
        **{name: optional_text(options.get(name)) for name in ("modelId", "modelUrl", "distillDatasetId")},
        **{name: optional_text(options.get(name)) for name in ("distillDatasetPath", "distillLanguagePair")},
        "distillSourceLangs": _names(options.get("distillSourceLangs")),
        "distillTargetLangs": _names(options.get("distillTargetLangs")),
        "distillPairAllowlist": _names(options.get("distillPairAllowlist")),
        "strictPairContract": options.get("strictPairContract") is True,
        "distillShardIndex": _integer(options.get("distillShardIndex")),
        "distillShardCount": _integer(options.get("distillShardCount")),
        "trainingStage": optional_text(stage),
    }
    optimizer = {"optimizerConfig": training.get("optimizer") or None, "stepCount": _integer(step_count)}
    return {
        "configHash": stable_hash(training),
        "datasetHash": stable_hash(dataset),
        "tokenizerHash": optional_text(options.get("tokenizerHash")),
        "optimizerHash": stable_hash(optimizer),
        "runtimePresetId": optional_text(options.get("runtimePreset")),
        "kernelPathId": optional_text(options.get("kernelPathId")),
    }


def compared_fields(identity: Mapping[str, Any]) -> list[str]:
    """The fields that a resume compares: those whose value is known."""
    return [name for name in COMPARED if identity.get(name) is not None]


def force_resume_source(options: Mapping[str, Any]) -> str | None:
    """Who asked for a forced resume: the given source, else command and surface, else the runner itself."""
    command, surface = options.get("command"), options.get("surface")
    both = f"{command}:{surface}" if command and surface else None
    return optional_text(options.get("forceResumeSource") or both or command or "training_runner")


def _names(value: Any) -> list[str] | None:
    """Trimmed and sorted; None when nothing is left."""
    if not isinstance(value, (list, tuple)):
        return None
    names = [name for name in map(optional_text, value) if name]
    return sorted(names, key=_dictionary_order) or None


def _dictionary_order(name: str) -> tuple[list[tuple[int, str]], str]:
    """As dictionaries sort language tags: punctuation, digits, letters; small before capital only to break ties."""
    ranks = [(1 + character.isdigit() + 2 * character.isalpha(), character.lower()) for character in name]
    return ranks, name.swapcase()


def _integer(value: Any) -> int | None:
    return int(value) if is_integer(value) else None
