"""May this run go on, and from where? Which checkpoint it starts from, and whether that one promises the same
trajectory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hybrid.checkpoint import archive, finding
from hybrid.checkpoint.finding import CheckpointRef
from hybrid.checkpoint.loading import read_manifest
from hybrid.checkpoint.manifest import Fingerprints, Manifest
from hybrid.checkpoint.resume import check_resume
from hybrid.checkpoint.store import CheckpointStore
from hybrid.checkpoint.strict_json import has_lone_surrogate
from hybrid.config.tree import RunConfig
from hybrid.errors import ConfigError
from hybrid.training.run_files import read_run_file
from hybrid.training.saved_run import check_manifest


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run goes on from; without one it begins at step 0. config: as it was when the run began.
    branches: whether the checkpoint is of another run folder, or of an archive.
    """

    ref: CheckpointRef | None = None
    manifest: Manifest | None = None
    config: RunConfig | None = None
    branches: bool = False

    @property
    def step(self) -> int:
        return self.manifest.progress.step if self.manifest else 0

    @property
    def parent(self) -> dict[str, Any] | None:
        """The checkpoint for run.json."""
        if self.ref is None:
            return None
        path = str(archive.origin(self.ref.path))
        return {"path": path, "checkpointHash": self.ref.checkpoint_hash, "step": self.ref.step}


def find_start(resume: Literal["auto", "never"] | Path, run_dir: Path, store: CheckpointStore) -> Start:
    """Where the run in `run_dir` starts.

    Errors: CheckpointNotFound for a named checkpoint that is not there; CheckpointCorrupt for one that cannot be read
    (never taken as none); ConfigError when the folder holds another history than the one that is asked for.
    """
    if resume == "auto":
        ref = store.latest()
    elif resume == "never":
        ref = None
        if any(status.status != "temporary" for status in store.list()):
            raise ConfigError(f"{run_dir} already holds checkpoints: choose another --run-dir for a new run")
    else:
        ref = _named(finding.resolve(resume), run_dir, store)
    if ref is None:
        return Start()
    manifest = read_manifest(ref.path)
    config = check_manifest(ref.path, manifest)
    return Start(ref, manifest, config, branches=not _lies_in(ref, run_dir))


def _named(wanted: CheckpointRef, run_dir: Path, store: CheckpointStore) -> CheckpointRef:
    """A checkpoint of another run begins a branch here. Started again, the branch goes on from its own newest
    checkpoint."""
    own = store.latest()
    if own is None or _lies_in(wanted, run_dir):
        return wanted
    facts = read_run_file(run_dir) or {}
    if (facts.get("branchedFrom") or {}).get("checkpointHash") == wanted.checkpoint_hash:
        return own
    raise ConfigError(
        f"{run_dir} already holds checkpoints up to step {own.step} that do not come from {wanted.path}; "
        "choose another --run-dir to branch off"
    )


def _lies_in(ref: CheckpointRef, run_dir: Path) -> bool:
    return ref.path.resolve().is_relative_to(run_dir.resolve())


def agree(
    start: Start,
    current: Fingerprints,
    accepted: tuple[str, ...],
    reason: str | None,
    command: str,
    now: Callable[[], float],
) -> tuple[dict[str, Any], ...]:
    """The audit records of the checkpoint, and of the changes accepted now.

    accepted: dotted fields as the table of a refusal shows them; `contract.` may be left out. Errors: ContractMismatch
    with that table; ConfigError for an acceptance that names no difference, or has no reason.
    """
    if bool(accepted) != bool(reason and reason.strip()):
        raise ConfigError("--accept-change FIELD and --reason TEXT go together: the reason is recorded in the lineage")
    if has_lone_surrogate(reason or ""):
        raise ConfigError(f"--reason {reason!r}: expected a text of whole characters, in UTF-8")
    if start.manifest is None:
        if accepted:
            raise ConfigError("--accept-change: the run begins at step 0, there is no checkpoint to differ from")
        return ()
    reasons = {_full(field): reason or "" for field in accepted}
    found = check_resume(start.manifest.fingerprints, current, reasons, source=f"command:{command}", now=now)
    return (*start.manifest.resume_audits, *found)


def _full(field: str) -> str:
    return field if field.split(".")[0] in ("contract", "dataset", "tokenizer") else f"contract.{field}"
