"""What a checkpoint says about its run, checked against itself.

Hashes prove that nothing changed since the checkpoint was made; they hold for any content. So whoever goes on from one
also asks whether a run can have come to this state: a cursor that points elsewhere in the data, or a config.json that
describes another model than the settings do, would train or sample something else in silence. `check_manifest` asks
what the manifest alone can answer, `check_checkpoint` everything; every command that uses a checkpoint calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid.backends.protocol import SessionState
from hybrid.backends.state_check import StateCheck, check_state
from hybrid.checkpoint.loading import LoadedCheckpoint, VerifiedCheckpoint
from hybrid.checkpoint.manifest import CONFIG_FILE, MANIFEST_NAME, TOKENIZER_FILE, Manifest
from hybrid.config.contract import contract
from hybrid.config.loading import to_settings
from hybrid.config.problems import parse_config
from hybrid.config.resolve import check, model_config
from hybrid.config.tree import RunConfig
from hybrid.contracts.javascript import is_finite_number
from hybrid.contracts.loss_scaler import DynamicLossScaler
from hybrid.contracts.telemetry import Telemetry, TelemetrySettings
from hybrid.data.loader import BatchPlan
from hybrid.data.tokenizers import load_tokenizer
from hybrid.errors import CheckpointCorrupt, ConfigError, DataContractError
from hybrid.models.parameters import parameter_specs

# What `config.resolve.resolve` fills in.
_RESOLVED = {
    "model": ("vocabularySize", "contextLength", "kvHeads", "headWidth", "feedForwardWidth", "schedule"),
    "data": ("microbatchSize",),
    "schedule": ("totalSteps",),
    "lossScaling": ("enabled",),
}


def check_checkpoint(loaded: LoadedCheckpoint) -> RunConfig:
    """The resolved settings of the run that made a checkpoint, all of which agrees with itself. CheckpointCorrupt."""
    config = check_all_but_state(loaded)
    manifest = loaded.manifest
    state = SessionState(loaded.model, loaded.optimizer, manifest.optimizer_step, manifest.scaler)
    shapes = {spec.name: spec.shape for spec in parameter_specs(loaded.model_config)}
    with _named(loaded.path):
        check_state(state, shapes)
        if manifest.scaler:
            DynamicLossScaler(to_settings(config)["lossScaling"]).restore(manifest.scaler)
    return config


def check_all_but_state(whole: VerifiedCheckpoint) -> RunConfig:
    """The same for a checkpoint whose tensors are not in memory: all but their values."""
    config = check_manifest(whole.path, whole.manifest)
    check_model(whole, config)
    _check_tokenizer(whole)
    return config


def checking(
    whole: VerifiedCheckpoint, config: RunConfig, names: list[tuple[str, str]]
) -> Callable[[str, str, NDArray[np.float32]], None]:
    """What `check_checkpoint` asks beside `check_all_but_state`, of tensors that come one after the other: takes group,
    name and values of each. config: the checkpoint's. names: all that will come."""
    with _named(whole.path):
        check = StateCheck(names, {spec.name: spec.shape for spec in parameter_specs(whole.model_config)})
        if whole.manifest.scaler:
            DynamicLossScaler(to_settings(config)["lossScaling"]).restore(whole.manifest.scaler)

    def take(group: str, name: str, array: NDArray[np.float32]) -> None:
        with _named(whole.path):
            check.tensor(group, name, array)

    return take


def check_manifest(folder: Path, manifest: Manifest) -> RunConfig:
    """The same, as far as the manifest goes: settings, place in the data, and telemetry."""
    config = saved_config(folder, manifest)
    check_place(folder, manifest, config)
    session = manifest.session
    elapsed = session.get("elapsedMs", 0)
    if not is_finite_number(elapsed) or elapsed < 0:
        raise _wrong(folder, "session.elapsedMs", elapsed, "expected a number of at least 0")
    if "telemetry" in session:
        with _named(folder):
            Telemetry(TelemetrySettings.resolve(to_settings(config)["telemetry"])).restore(session["telemetry"])
    return config


def saved_config(folder: Path, manifest: Manifest) -> RunConfig:
    """The resolved settings of the run that made a checkpoint.

    CheckpointCorrupt when they are none that a run can have, or disagree with the contract of the same checkpoint.
    """
    try:
        config = parse_config(manifest.config)
        settings = to_settings(config)
        for section, keys in _RESOLVED.items():
            for key in keys:
                if settings[section][key] is None:
                    raise ConfigError(f"{section}.{key} is null: a run saves the value that it worked out")
        check(config)
        model_config(config).validate()
    except ConfigError as error:
        raise CheckpointCorrupt(f"{folder / MANIFEST_NAME}: config: {error}") from None
    own = dict(_leaves(contract(config)))
    for path, value in _leaves(manifest.fingerprints.contract):
        if path in own and own[path] != value:
            raise _wrong(folder, f"config.{path}", own[path], f"fingerprints.contract has {value!r:.80}")
    return config


def check_place(folder: Path, manifest: Manifest, config: RunConfig) -> None:
    """CheckpointCorrupt unless cursor, totals, seed and optimizer step are those of a run that did so many steps.

    config: the checkpoint's own. Accepted changes are part of it, so the place follows from it after those as well.
    """
    progress, length = manifest.progress, config.data.sequence_length
    samples = manifest.fingerprints.dataset.get("samples")
    if type(samples) is not int or samples < 1:
        raise _wrong(folder, "fingerprints.dataset.samples", samples, "expected a whole number of at least 1")
    limit = config.run.epochs * samples if config.run.steps is None else None
    cursor = BatchPlan(samples, config.data.batch_size, config.run.seed, limit).cursor(progress.step)
    if manifest.cursor != cursor:
        raise _wrong(folder, "dataCursor", manifest.cursor, f"after step {progress.step} the data stands at {cursor}")
    expected = {
        "epoch": cursor["epoch"],
        "batch": cursor["position"] // config.data.batch_size,
        "samples": cursor["samples"],
        "tokens": cursor["samples"] * length,
    }
    for name, value in expected.items():
        if getattr(progress, name) != value:
            raise _wrong(
                folder, f"progress.{name}", getattr(progress, name), f"after step {progress.step} it is {value}"
            )
    if progress.target_tokens > progress.tokens and not manifest.resume_audits:
        raise _wrong(folder, "progress.targetTokens", progress.target_tokens, f"there were {progress.tokens} tokens")
    if manifest.optimizer_step > progress.step:
        raise _wrong(folder, "optimizerStep", manifest.optimizer_step, f"expected at most the step, {progress.step}")
    if manifest.seed != config.run.seed:
        raise _wrong(folder, "seed", manifest.seed, f"config.run.seed is {config.run.seed}")
    counter = manifest.scaler.get("growthCounter", 0)
    if type(counter) is int and counter > progress.step:  # of another kind: the scaler refuses it
        raise _wrong(folder, "lossScaler.growthCounter", counter, f"expected at most the step, {progress.step}")
    if config.loss_scaling.enabled and not manifest.scaler:
        raise _wrong(folder, "lossScaler", manifest.scaler, "loss scaling is on, and its scale would start anew")


def check_model(loaded: VerifiedCheckpoint, config: RunConfig) -> None:
    """CheckpointCorrupt unless config.json, which other programs read, describes the model of the settings."""
    ours, theirs = model_config(config).to_dict(), loaded.model_config.to_dict()
    for name, value in theirs.items():
        if ours[name] != value:
            raise CheckpointCorrupt(
                f"{loaded.path / CONFIG_FILE}: hybrid.{name} is {value!r:.80}, but the settings of the run in "
                f"{MANIFEST_NAME} have {ours[name]!r:.80}"
            )


def _check_tokenizer(loaded: VerifiedCheckpoint) -> None:
    """CheckpointCorrupt unless tokenizer.json, where there is one, is that of the run, and the model knows its ids."""
    if loaded.tokenizer_json is None:
        return
    file = loaded.path / TOKENIZER_FILE
    try:
        tokenizer = load_tokenizer(loaded.tokenizer_json)
    except DataContractError as error:
        raise CheckpointCorrupt(f"{file}: {error}") from None
    rows = loaded.model_config.vocabulary_size
    if tokenizer.vocabulary_size > rows:
        raise CheckpointCorrupt(f"{file}: {tokenizer.vocabulary_size} ids, but the embedding table has {rows} rows")
    saved = loaded.manifest.fingerprints.tokenizer.get("hash")
    if saved is not None and saved != tokenizer.hash:
        raise CheckpointCorrupt(f"{file}: another tokenizer ({tokenizer.hash}) than the run had ({saved!r:.80})")


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Errors inside the block say which checkpoint they are about."""
    try:
        yield
    except CheckpointCorrupt as error:
        raise CheckpointCorrupt(f"{folder}: {error}") from None


def _wrong(folder: Path, name: str, value: object, expected: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"{folder / MANIFEST_NAME}: {name} is {value!r:.200}: {expected}")


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
