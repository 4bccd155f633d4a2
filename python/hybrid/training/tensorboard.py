"""Scalars for TensorBoard, if `telemetry.tensorboard` is on and the `tensorboard` extra is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybrid.errors import MissingDependency

TAGS = {
    "total_loss": "train/loss",
    "effective_lr": "train/lr",
    "gradient_norm_unclipped": "train/grad_norm",
    "step_time_ms": "train/step_time_ms",
    "loss_scale": "train/loss_scale",
    "tokens_per_second": "speed/tokens_per_second",
    "mfu": "speed/mfu",
    "data_wait_share": "speed/data_wait_share",
    "peak_device_bytes": "memory/peak_device_bytes",
}


class TensorBoard:
    """Writes metrics entries and validation rows as scalars. Raises MissingDependency without the package."""

    def __init__(self, run_dir: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise MissingDependency("tensorboard", "tensorboard") from None
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(run_dir / "tensorboard"))

    def entry(self, entry: dict[str, Any], wall_time: float) -> None:
        """The known numbers of one metrics entry."""
        self._scalars({tag: entry.get(key) for key, tag in TAGS.items()}, entry["step"], wall_time)

    def validation(self, row: dict[str, Any], wall_time: float) -> None:
        self._scalars({"validation/loss": row["loss"]}, row["step"], wall_time)

    def close(self) -> None:
        self._writer.close()

    def _scalars(self, values: dict[str, float | None], step: int, wall_time: float) -> None:
        summary = self._summary(
            value=[
                self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items() if value is not None
            ]
        )
        self._writer.add_event(self._event(wall_time=wall_time, step=step, summary=summary))
