"""A prepared run as the runner in JavaScript is given it: bridge/schemas/job.schema.json."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hybrid.checkpoint.finding import replaced_step, step_folder_name
from hybrid.checkpoint.store import CheckpointStore, small_files
from hybrid.config.resolve import model_config
from hybrid.config.tree import RunConfig
from hybrid.contracts.provenance import build_provenance
from hybrid.models.parameters import count_parameters
from hybrid.plan.compiler import PlanSettings
from hybrid.training.metrics_log import VALIDATION, read_rows
from hybrid.training.resume import Start
from hybrid.training.sessions import session_settings
from hybrid.training.start import Prepared, settings_of

FORMAT = "hybrid.job"
VERSION = 1
FOREIGN = "resumed"  # what the checkpoint that a branch begins from is called here, wherever it lies


def build_job(prepared: Prepared, run_dir: Path, run_id: str, start: Start, last_sequence: int) -> dict[str, Any]:
    """The job of a run that begins, or goes on from `start`, as plain JSON."""
    hashes = prepared.hashes
    return {
        "format": FORMAT,
        "version": VERSION,
        "config": settings_of(prepared),
        "steps": prepared.steps,
        "limit": prepared.plan.limit,
        "trainSamples": len(prepared.data.train),
        "fingerprints": prepared.fingerprints.to_json(),
        "hashes": {
            "configHash": hashes.config_hash,
            "datasetHash": hashes.dataset_hash,
            "tokenizerHash": hashes.tokenizer_hash,
            "optimizerHash": hashes.optimizer_hash,
        },
        "runId": run_id,
        "resumeAudits": list(prepared.audits),
        "provenance": build_provenance({}, os.environ),
        "checkpointFiles": {name: data.decode("utf-8") for name, data in checkpoint_files(prepared).items()},
        "resume": _resume(start, run_dir),
        "lastSequence": last_sequence,
        "parameters": count_parameters(prepared.model),
        "runDir": str(run_dir),
        "lastValidation": max(
            (row["step"] for row in read_rows(run_dir / VALIDATION) if row["step"] <= start.step), default=0
        ),
    }


def checkpoint_files(prepared: Prepared) -> dict[str, bytes]:
    """The small files that every checkpoint of the run has."""
    tokenizer = prepared.data.tokenizer
    special = {} if tokenizer.end_of_text is None else {"eos": tokenizer.end_of_text}
    return small_files(prepared.model, special, tokenizer.to_json())


def plan_settings(config: RunConfig) -> PlanSettings:
    """What the plan of a resolved configuration is compiled for."""
    return PlanSettings(model_config(config), **session_settings(config))


def last_sequence(store: CheckpointStore) -> int:
    """The largest sequence of the checkpoints in a run folder; 0 without any."""
    return max((status.ref.sequence for status in store.list() if status.ref is not None), default=0)


def name_of_start(start: Start, run_dir: Path) -> str:
    """What the checkpoint to go on from is called here: its step, if it is one of those that the run folder keeps."""
    assert start.ref is not None
    path, name = start.ref.path.resolve(), step_folder_name(start.ref.step)
    # One that was renamed for its successor gets its name back when the run begins.
    own = path.parent == CheckpointStore(run_dir).folder.resolve() and name in (path.name, replaced_step(path))
    return name if own else FOREIGN


def _resume(start: Start, run_dir: Path) -> dict[str, Any] | None:
    if start.ref is None:
        return None
    return {
        "step": start.ref.step,
        "checkpointHash": start.ref.checkpoint_hash,
        "sequence": start.ref.sequence,
        "name": name_of_start(start, run_dir),
    }
