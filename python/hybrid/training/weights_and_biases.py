"""Curves in Weights & Biases, if `telemetry.wandb` is on and the `wandb` extra is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybrid.config.loading import to_settings
from hybrid.config.tree import RunConfig
from hybrid.errors import MissingDependency
from hybrid.training.tensorboard import TAGS

STEP = "step"


class WeightsAndBiases:
    """Writes metrics entries and validation rows. A run that goes on keeps its curves: its id there is that of the run.

    The account, the project and whether anything is sent at all are those of the package's own environment variables
    (WANDB_PROJECT, WANDB_MODE, ...). Raises MissingDependency without the package.
    """

    def __init__(self, config: RunConfig, run_dir: Path, run_id: str) -> None:
        try:
            import wandb
        except ImportError:
            raise MissingDependency("wandb", "wandb") from None
        self._run = wandb.init(
            name=config.run.name, id=run_id, dir=str(run_dir), resume="allow", config=to_settings(config)
        )
        # Its own count of steps only grows, and a run may go back to a checkpoint.
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def entry(self, entry: dict[str, Any], wall_time: float) -> None:
        """The known numbers of one metrics entry."""
        self._log({tag: entry.get(key) for key, tag in TAGS.items()}, entry["step"])

    def validation(self, row: dict[str, Any], wall_time: float) -> None:
        self._log({"validation/loss": row["loss"]}, row["step"])

    def close(self) -> None:
        self._run.finish()

    def _log(self, values: dict[str, float | None], step: int) -> None:
        self._run.log({STEP: step, **{tag: value for tag, value in values.items() if value is not None}})
