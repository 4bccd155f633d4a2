"""From a checkpoint into a session: to go on with a run, or to sample and evaluate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hybrid.backends.protocol import SessionState, SpreadSession, TrainingSession
from hybrid.checkpoint import finding, loading
from hybrid.checkpoint.finding import CheckpointRef
from hybrid.checkpoint.loading import LoadedCheckpoint
from hybrid.checkpoint.manifest import Manifest
from hybrid.checkpoint.store import CheckpointStore
from hybrid.config.loading import load_config, to_settings
from hybrid.config.resolve import check
from hybrid.config.tree import RunConfig
from hybrid.data.tokenizers import Tokenizer, load_tokenizer
from hybrid.errors import CheckpointCorrupt, ConfigError
from hybrid.training.saved_run import check_all_but_state, check_checkpoint, checking
from hybrid.training.sessions import Note, Progress, make_session


def restore(session: TrainingSession, store: CheckpointStore, ref: CheckpointRef) -> Manifest:
    """Put a checkpoint into a session, verified, and let the next one descend from it.

    Where the session lies on several processes, it is read once, tensor by tensor: nobody holds the whole. Errors:
    CheckpointNotFound, CheckpointCorrupt; then the session is of no use any more.
    """
    if isinstance(session, SpreadSession):
        return _pour(session, store, ref)
    loaded = store.load(ref)
    check_checkpoint(loaded)
    session.import_state(_state(loaded))
    store.continue_from(loaded)
    return loaded.manifest


def _pour(session: SpreadSession, store: CheckpointStore, ref: CheckpointRef) -> Manifest:
    stream = store.stream(ref)
    about, manifest = stream.about, stream.about.manifest
    config = check_all_but_state(about)
    check = checking(about, config, stream.names)
    with session.filling(stream.names, manifest.optimizer_step, manifest.scaler) as fill:

        def take(group: str, name: str, array: NDArray[np.float32]) -> None:
            check(group, name, array)
            fill(group, name, array)

        stream.pour(take)
    store.continue_from(about)
    return manifest


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint, verified, with the settings it was made with (and those that were changed since)."""

    checkpoint: LoadedCheckpoint
    config: RunConfig

    @classmethod
    def open(cls, path: Path, assignments: tuple[str, ...] = (), flags: dict[str, object] | None = None) -> SavedModel:
        """path: a run folder (its newest checkpoint) or a checkpoint. Errors: CheckpointNotFound, CheckpointCorrupt,
        ConfigError."""
        loaded = loading.load(finding.resolve(path).path)
        saved = check_checkpoint(loaded)
        config = load_config(assignments=assignments, flags=flags, base=loaded.manifest.config)
        _keep_the_model(saved, config)
        check(config)
        return cls(loaded, config)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that lies beside the model. CheckpointCorrupt if there is none."""
        if self.checkpoint.tokenizer_json is None:
            raise CheckpointCorrupt(f"{self.checkpoint.path}: no tokenizer.json beside the model, so text has no ids")
        return load_tokenizer(self.checkpoint.tokenizer_json)

    def session(self, note: Note, progress: Progress | None = None) -> TrainingSession:
        """A session with the saved state. Arguments and errors: as those of `make_session`."""
        session = make_session(self.config, note, progress, training=False)
        try:
            session.import_state(_state(self.checkpoint))
        except BaseException:
            session.close()
            raise
        return session


def _state(loaded: LoadedCheckpoint) -> SessionState:
    manifest = loaded.manifest
    return SessionState(loaded.model, loaded.optimizer, manifest.optimizer_step, manifest.scaler)


def _keep_the_model(saved: RunConfig, config: RunConfig) -> None:
    """ConfigError for a setting of the model that is not the saved one: its weights are what they are."""
    before, after = to_settings(saved)["model"], to_settings(config)["model"]
    for name, value in after.items():
        if value != before[name]:
            raise ConfigError(
                f"model.{name} = {value!r}: the saved model has {before[name]!r}, and its weights fit no other"
            )
