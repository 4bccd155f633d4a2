"""Several runs side by side: their rows aligned by step, and the settings in which they differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid.bridge.server.feed import Cursor, end_of
from hybrid.bridge.server.rows import every_nth_row, last_row
from hybrid.bridge.server.runs import run_facts
from hybrid.training.metrics_log import METRICS, VALIDATION

Table = dict[str, Any]


def compare(run_dirs: Sequence[Path], fields: Sequence[str], points: int) -> Table:
    """Rows of the same steps of all runs, about so many of each file, what differs in the settings, and the place in
    the events of these runs from which on they are told what comes later.

    fields: of the metrics rows; of validation rows it is the loss. A value that a run does not have is null.
    """
    at = Places([end_of(path) for path in run_dirs])  # first: a row that comes meanwhile is told twice, and not lost
    return {
        "at": at.id,
        "runs": [path.name for path in run_dirs],
        "metrics": _aligned([path / METRICS for path in run_dirs], fields, points),
        "validation": _aligned([path / VALIDATION for path in run_dirs], ("loss",), points),
        "config": _differences([run_facts(path)[0].get("config") or {} for path in run_dirs]),
    }


@dataclass(frozen=True)
class Places:
    """Where a watcher of several runs stands: a place in the events of each."""

    cursors: Sequence[Cursor]

    @property
    def id(self) -> str:
        return ",".join(cursor.id for cursor in self.cursors)

    def moved(self, index: int, cursor: Cursor) -> Places:
        """The same with another place in the events of one run."""
        return Places([*self.cursors[:index], cursor, *self.cursors[index + 1 :]])

    @staticmethod
    def parse(text: str, count: int) -> Places:
        """Those of an id; the beginnings for a text that is no id of so many runs."""
        cursors = [Cursor.parse(part) for part in text.split(",")]
        return Places(cursors if len(cursors) == count else [Cursor()] * count)


def _aligned(paths: Sequence[Path], fields: Sequence[str], points: int) -> Table:
    ends = [row["step"] if (row := last_row(path)) is not None else 0 for path in paths]
    stride = max(1, -(-max(ends, default=0) // points))
    found: list[dict[int, dict[str, Any]]] = []
    for path, end in zip(paths, ends, strict=True):
        rows = every_nth_row(path, stride, end)
        found.append({row["step"]: {name: row.get(name) for name in fields} for row in rows})
    steps = sorted({step for rows in found for step in rows})
    return {
        "steps": steps,
        "values": [{name: [rows.get(step, {}).get(name) for step in steps] for name in fields} for rows in found],
    }


def _differences(configs: Sequence[Mapping[str, Any]]) -> list[Table]:
    leaves = [dict(_leaves(config)) for config in configs]
    keys = sorted({key for one in leaves for key in one})
    rows = [{"key": key, "values": [one.get(key) for one in leaves]} for key in keys]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
