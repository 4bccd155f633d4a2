"""Which checkpoints there are. Absent, unfinished and unreadable are three different answers.

A run folder has `checkpoints/step-00000500/`. A step folder without a manifest is an unfinished save and does not
count. One with a manifest that cannot be believed counts as damaged, and is never treated as if it were not there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from hybrid.checkpoint import archive
from hybrid.checkpoint.loading import read_manifest
from hybrid.checkpoint.manifest import MANIFEST_NAME, Manifest
from hybrid.errors import CheckpointCorrupt, CheckpointNotFound

CHECKPOINTS_FOLDER: Final = "checkpoints"
TEMPORARY: Final = ".tmp-"  # a save in progress, or one that was interrupted
TRASH: Final = ".trash-"  # being deleted
REPLACED: Final = ".replaced-"  # an older save of a step, until its successor has the name
DAMAGED: Final = "damaged-"  # a checkpoint that could not be read when its step was saved again

Status = Literal["complete", "unfinished", "damaged", "set aside", "temporary"]

_STEP = re.compile(r"step-([0-9]{8,15})\Z")
_REPLACED_STEP = re.compile(r"\.replaced-(step-([0-9]{8,15}))-")
_DAMAGED_STEP = re.compile(r"damaged-(step-([0-9]{8,15}))-")


@dataclass(frozen=True)
class CheckpointRef:
    """A checkpoint whose manifest was read. sequence: its place in the run's history (the newest has the largest)."""

    path: Path
    step: int
    sequence: int
    checkpoint_hash: str
    state_hash: str
    timestamp_ms: int
    size: int  # bytes of the listed files

    @staticmethod
    def of(path: Path, manifest: Manifest) -> CheckpointRef:
        return CheckpointRef(
            path=path,
            step=manifest.progress.step,
            sequence=manifest.lineage.sequence,
            checkpoint_hash=manifest.checkpoint_hash,
            state_hash=manifest.state_hash,
            timestamp_ms=manifest.timestamp_ms,
            size=sum(digest.size for digest in manifest.files.values()),
        )


@dataclass(frozen=True)
class CheckpointStatus:
    """One folder under `checkpoints/`. ref: if it is complete. detail: why it is not."""

    path: Path
    step: int | None
    status: Status
    detail: str = ""
    ref: CheckpointRef | None = None


def step_folder_name(step: int) -> str:
    return f"step-{step:08d}"


def read_ref(folder: Path) -> CheckpointRef:
    """The checkpoint in `folder`. Errors: CheckpointNotFound (no manifest), CheckpointCorrupt."""
    manifest = read_manifest(folder)
    match = _STEP.match(folder.name)
    if match and int(match[1]) != manifest.progress.step:
        path = folder / MANIFEST_NAME
        raise CheckpointCorrupt(
            f"{path}: progress.step is {manifest.progress.step}, but the folder says {int(match[1])}"
        )
    return CheckpointRef.of(folder, manifest)


def scan(folder: Path) -> list[CheckpointStatus]:
    """Everything under a `checkpoints` folder: unfinished, damaged and temporary ones first, then the complete ones
    by sequence, newest last. Nothing there: an empty list. Errors: CheckpointCorrupt if the folder cannot be listed.
    """
    try:
        paths = sorted(path for path in folder.iterdir() if path.is_dir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointCorrupt(f"{folder}: cannot be listed: {error.strerror or error}") from error
    names = {path.name for path in paths}
    statuses = [status for path in paths if (status := _status(path, names)) is not None]
    return sorted(statuses, key=lambda s: (s.ref.sequence, s.ref.step) if s.ref else (0, s.step or 0))


def newest(folder: Path) -> CheckpointRef | None:
    """The newest complete checkpoint under a `checkpoints` folder, or None if there is none of any kind.

    Newest means latest in the history of the run (its sequence), not the largest step: after going back to step 300,
    a new step 350 is newer than the old step 500. Errors: CheckpointCorrupt when a damaged one may be newer still.
    """
    statuses = scan(folder)
    refs = [status.ref for status in statuses if status.ref is not None]
    best = max(refs, key=lambda ref: (ref.sequence, ref.step), default=None)
    for status in statuses:
        if status.status == "damaged" and (best is None or (status.step or 0) > best.step):
            instead = f"resume from {best.path} by name" if best else "start a new run"
            raise CheckpointCorrupt(
                f"{status.detail} (a checkpoint is there but cannot be used; "
                f"restore it, or move {status.path} away, or {instead})"
            )
    return best


def resolve(path: Path) -> CheckpointRef:
    """The checkpoint meant by a path: a checkpoint folder, a `checkpoints` folder or a run folder (its newest), or an
    archive, which is unpacked for as long as the process runs.

    Errors: CheckpointNotFound naming what was looked for; CheckpointCorrupt.
    """
    if archive.is_archive(path):
        return read_ref(archive.as_folder(path))
    try:
        if (path / MANIFEST_NAME).exists() or _STEP.match(path.name):
            return read_ref(path)
        if not path.exists():
            raise CheckpointNotFound(f"{path}: there is no such run or checkpoint")
        if not path.is_dir():
            raise CheckpointNotFound(f"{path}: a file; expected a run folder, a checkpoint folder or *.hybrid")
        inner = path / CHECKPOINTS_FOLDER
        folder = inner if inner.is_dir() else path
    except OSError as error:
        raise CheckpointCorrupt(f"{path}: cannot be read: {error.strerror or error}") from error
    ref = newest(folder)
    if ref is None:
        runs = sorted(run.parent for run in folder.glob(f"*/{CHECKPOINTS_FOLDER}"))
        hint = f"; name a run, such as {runs[0]}" if runs else ""
        raise CheckpointNotFound(f"{folder}: there is no finished checkpoint here{hint}")
    return ref


def replaced_step(path: Path) -> str | None:
    """The step folder's name that a `.replaced-` folder had, or None for other folders."""
    match = _REPLACED_STEP.match(path.name)
    return match[1] if match else None


def _status(path: Path, names: set[str]) -> CheckpointStatus | None:
    if path.name.startswith((TEMPORARY, TRASH)):
        return CheckpointStatus(path, None, "temporary", "a save or deletion in progress, or interrupted")
    if match := _DAMAGED_STEP.match(path.name):
        return CheckpointStatus(path, int(match[2]), "set aside", "could not be read when its step was saved again")
    if match := _REPLACED_STEP.match(path.name):
        # Counts only while the step's own name is free: the process was stopped between the two renames.
        if match[1] in names:
            return CheckpointStatus(path, int(match[2]), "temporary", "replaced by a newer save of the same step")
        step = int(match[2])
    elif match := _STEP.match(path.name):
        step = int(match[1])
    else:
        return None
    try:
        ref = read_ref(path)
    except CheckpointNotFound:
        return CheckpointStatus(path, step, "unfinished", f"no {MANIFEST_NAME}: its save never finished")
    except CheckpointCorrupt as error:
        return CheckpointStatus(path, step, "damaged", str(error))
    return CheckpointStatus(path, step, "complete", ref=ref)
