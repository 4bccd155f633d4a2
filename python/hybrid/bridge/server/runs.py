"""The run folders of this machine, as they lie below one folder. Any of them may be half written or damaged."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hybrid.bridge.server.plain import is_inside
from hybrid.bridge.server.refusals import not_found
from hybrid.bridge.server.rows import last_row
from hybrid.checkpoint.finding import CHECKPOINTS_FOLDER, CheckpointStatus, scan
from hybrid.errors import ConfigError, HybridError
from hybrid.training.metrics_log import METRICS, VALIDATION
from hybrid.training.run_files import RUN_FILE, as_it_stands, read_run_file

NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$"
SHOWN = {
    "status": str, "message": str, "step": int, "steps": int, "runId": str, "createdAt": str, "updatedAt": str,
    "parameters": int,
}  # fmt: skip
MOST_DEPTH = 64  # of what run.json says

Facts = dict[str, Any]

_NAME = re.compile(NAME.removesuffix("$") + r"\Z")
_MARKS = (RUN_FILE, METRICS, CHECKPOINTS_FOLDER)


class RunFolders:
    """What lies in a folder of runs. The folder need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[str]:
        """Of all runs, in order."""
        return sorted(name for name, _ in self._all())

    def find(self, name: str) -> Path:
        """The folder of a run. Errors: Refusal 404 for a name that is no run's, or leads elsewhere."""
        path = self.folder / name
        if _NAME.match(name) is None or not self._is_run(path):
            raise not_found(f"run {name!r:.140}")
        return path

    def summaries(self) -> list[Facts]:
        """`summary` of each."""
        return [summary(path) for _, path in sorted(self._all())]

    def _all(self) -> Iterator[tuple[str, Path]]:
        try:
            paths = list(self.folder.iterdir())
        except OSError:
            return
        for path in paths:
            if _NAME.match(path.name) and self._is_run(path):
                yield path.name, path

    def _is_run(self, path: Path) -> bool:
        try:
            marked = any((path / mark).exists() for mark in _MARKS)
            return marked and path.is_dir() and is_inside(path, self.folder)
        except OSError:
            return False


def summary(run_dir: Path) -> Facts:
    """How a run stands, in one line of a list: `described`, and its newest rows."""
    facts = described(run_dir)
    row, held_out = last_row(run_dir / METRICS), last_row(run_dir / VALIDATION)
    if row is not None and (facts["step"] is None or row["step"] > facts["step"]):
        facts["step"] = row["step"]  # run.json is written when something is saved
    return {**facts, "loss": _number(row, "total_loss"), "validationLoss": _number(held_out, "loss")}


def described(run_dir: Path) -> Facts:
    """What run.json says of a run, and whether it still holds. `problem` says what is wrong with the file, if anything
    is."""
    facts, problem = run_facts(run_dir)
    facts = as_it_stands(run_dir, facts, lambda: run_facts(run_dir)[0])
    backend = facts.get("backend")
    return {
        "name": run_dir.name,
        **{name: value if type(value := facts.get(name)) is kind else None for name, kind in SHOWN.items()},
        "backend": backend["backend"] if isinstance(backend, dict) and _is_text(backend.get("backend")) else None,
        "problem": problem,
    }


def run_facts(run_dir: Path) -> tuple[Facts, str | None]:
    """What run.json says, and what is wrong with it, if anything is."""
    path = run_dir / RUN_FILE
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            return {}, f"{RUN_FILE} is no plain file"
        facts = read_run_file(run_dir)
    except HybridError as error:
        return {}, str(error)
    except OSError as error:
        return {}, f"{path}: cannot be read: {error.strerror or error}"
    if facts is None:
        return {}, f"{RUN_FILE} is missing"
    return ({}, f"{RUN_FILE} is nested too deeply") if _is_deep(facts) else (facts, None)


def checkpoints(run_dir: Path) -> list[Facts]:
    """The checkpoints of a run, the newest complete one last. Errors: CheckpointCorrupt."""
    return [_checkpoint(status) for status in scan(run_dir / CHECKPOINTS_FOLDER) if status.status != "temporary"]


def _checkpoint(status: CheckpointStatus) -> Facts:
    ref = status.ref
    return {
        "name": status.path.name,
        "status": status.status,
        "detail": status.detail,
        "step": status.step,
        "sequence": ref.sequence if ref else None,
        "checkpointHash": ref.checkpoint_hash if ref else None,
        "stateHash": ref.state_hash if ref else None,
        "timestampMs": ref.timestamp_ms if ref else None,
        "bytes": ref.size if ref else None,
    }


def saved_config(run_dir: Path) -> Facts:
    """The settings of a run. ConfigError if they cannot be read."""
    facts, problem = run_facts(run_dir)
    config = facts.get("config")
    if not isinstance(config, dict):
        raise ConfigError(problem or f"{run_dir / RUN_FILE}: has no settings")
    return config


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [inner for one in level if isinstance(one, dict | list) for inner in _members(one)]
    return bool(level)


def _members(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _number(row: Facts | None, name: str) -> float | None:
    value = row.get(name) if row is not None else None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
