"""A session that holds a saved model, for sampling and evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hybrid.backends.protocol import SessionState, TrainingSession
from hybrid.checkpoint import finding, loading
from hybrid.checkpoint.loading import LoadedCheckpoint
from hybrid.config.loading import load_config, to_settings
from hybrid.config.resolve import check
from hybrid.config.tree import RunConfig
from hybrid.data.tokenizers import Tokenizer, load_tokenizer
from hybrid.errors import CheckpointCorrupt, ConfigError
from hybrid.training.saved_run import check_checkpoint
from hybrid.training.sessions import Note, Progress, make_session


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
        loaded = self.checkpoint
        try:
            session.import_state(
                SessionState(loaded.model, loaded.optimizer, loaded.manifest.optimizer_step, loaded.manifest.scaler)
            )
        except BaseException:
            session.close()
            raise
        return session


def _keep_the_model(saved: RunConfig, config: RunConfig) -> None:
    """ConfigError for a setting of the model that is not the saved one: its weights are what they are."""
    before, after = to_settings(saved)["model"], to_settings(config)["model"]
    for name, value in after.items():
        if value != before[name]:
            raise ConfigError(
                f"model.{name} = {value!r}: the saved model has {before[name]!r}, and its weights fit no other"
            )
