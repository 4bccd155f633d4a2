"""The run folder and its run.json: what runs here, how it stands, and with which fingerprints."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybrid.checkpoint.finding import resolve
from hybrid.checkpoint.loading import read_manifest
from hybrid.errors import ConfigError, HybridError
from hybrid.training.lock import is_abandoned

RUN_FILE = "run.json"
FORMAT = "hybrid.run"
VERSION = 1
RUNS = Path("runs")
INTERRUPTED = "interrupted"

Facts = dict[str, Any]


class RunFile:
    """run.json, replaced as a whole at each change, so that a reader never sees half of it."""

    def __init__(self, run_dir: Path, facts: Facts | None = None) -> None:
        self.path = run_dir / RUN_FILE
        self.facts: Facts = {"format": FORMAT, "version": VERSION, **(facts or {})}

    def update(self, **facts: Any) -> None:
        """Set top-level keys and write the file. HybridError where the disk does not take it; the old file stays."""
        self.facts.update(facts)
        text = json.dumps(self.facts, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        temporary = self.path.with_suffix(".json.tmp")
        try:
            # The escape of a lone surrogate (a byte of a file name that is not UTF-8, say) is one that JSON knows.
            with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise HybridError(f"{self.path}: could not be written: {error.strerror or error}") from error


def read_run_file(run_dir: Path) -> Facts | None:
    """The contents of run.json; None if there is none. ConfigError if there is one that cannot be read."""
    path = run_dir / RUN_FILE
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); restore it, or choose another --run-dir") from None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise ConfigError(f"{path}: expected an object with format {FORMAT!r}; is this a run folder of hybrid?")
    if facts.get("version") != VERSION:
        raise ConfigError(
            f"{path}: version {facts.get('version')!r} is not known; this program reads version {VERSION}"
        )
    for key in ("config", "resumedFrom", "branchedFrom"):
        if not isinstance(facts.get(key) or {}, dict):
            raise ConfigError(f"{path}: {key} is {facts[key]!r:.80}, expected an object; restore the file")
    return facts


def as_it_stands(run_dir: Path, facts: Facts, read: Callable[[], Facts]) -> Facts:
    """`facts` of run.json, but with status INTERRUPTED where it says `running` and no process does: whoever is killed
    writes nothing. read: gives them again, for the run may come to its end in the meantime."""
    if facts.get("status") == "running" and is_abandoned(run_dir):
        facts = read()
        if facts.get("status") == "running":
            return {**facts, "status": INTERRUPTED, "message": "the process that trained here has ended without a word"}
    return facts


def check_place(run_dir: Path) -> None:
    """ConfigError where something else than a folder has the name of a run folder."""
    if os.path.lexists(run_dir) and not run_dir.is_dir():
        raise ConfigError(f"{run_dir} is a file: expected a folder for the run, or a name for a new one (--run-dir)")


def new_run_dir(wanted: Path) -> Path:
    """`wanted`, or the first of wanted-2, wanted-3, ... that does not exist; the folder is made."""
    number = 1
    while True:
        candidate = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            candidate.mkdir(parents=True)
            return candidate
        except FileExistsError:
            number += 1


def saved_settings(run_dir: Path | None, resume: object) -> Facts | None:
    """The settings that a run was last given: from the folder's run.json, else from the checkpoint that it resumes
    from.

    None where nothing is saved. Errors: ConfigError, CheckpointNotFound, CheckpointCorrupt.
    """
    facts = (read_run_file(run_dir) if run_dir is not None else None) or {}
    settings = facts.get("config")
    if settings is None and isinstance(resume, Path):
        settings = read_manifest(resolve(resume).path).config
    return settings
