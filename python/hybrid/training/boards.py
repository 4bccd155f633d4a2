"""Where metrics go beside the run folder's files: TensorBoard, Weights & Biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from hybrid.config.tree import RunConfig


class Board(Protocol):
    """Takes metrics entries and validation rows as they are written. wall_time: Unix time in seconds."""

    def entry(self, entry: dict[str, Any], wall_time: float) -> None: ...

    def validation(self, row: dict[str, Any], wall_time: float) -> None: ...

    def close(self) -> None: ...


def open_boards(config: RunConfig, run_dir: Path, run_id: str) -> list[Board]:
    """Those that the configuration asks for. Raises MissingDependency without their packages."""
    boards: list[Board] = []
    if config.telemetry.tensorboard:
        from hybrid.training.tensorboard import TensorBoard

        boards.append(TensorBoard(run_dir))
    if config.telemetry.wandb:
        from hybrid.training.weights_and_biases import WeightsAndBiases

        boards.append(WeightsAndBiases(config, run_dir, run_id))
    return boards
