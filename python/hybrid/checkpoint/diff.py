"""What `hybrid checkpoint show|verify|diff|list` report, as plain JSON values. Printing them is the command's
business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hybrid.checkpoint import archive, finding, loading, safetensors
from hybrid.checkpoint.finding import CheckpointRef
from hybrid.checkpoint.loading import LoadedCheckpoint
from hybrid.checkpoint.manifest import MODEL_FILE, OPTIMIZER_FILE, Manifest
from hybrid.errors import CheckpointCorrupt, CheckpointNotFound

# What makes two checkpoints of one run differ without meaning anything.
_ABSENT = "<absent>"


def list_checkpoints(run: Path) -> list[dict[str, Any]]:
    """One entry for each folder under the run's `checkpoints/`: path, step, status, detail, and if it is complete its
    sequence, timestamp_ms (Unix), size (bytes) and hashes. Errors: CheckpointNotFound if there is no such
    run.
    """
    folder = run / finding.CHECKPOINTS_FOLDER
    if not folder.is_dir():
        folder = run
    if not folder.is_dir():
        raise CheckpointNotFound(f"{run}: there is no such run folder")
    return [
        {
            "path": str(status.path),
            "step": status.step,
            "status": status.status,
            "detail": status.detail,
            **(_identity(status.ref) if status.ref else {}),
        }
        for status in finding.scan(folder)
    ]


def show(path: Path) -> dict[str, Any]:
    """The manifest's content, the tensors' dtypes and shapes, and names in the folder that the manifest does not
    list. `path`: a checkpoint, or a run for its newest. Hashes of files are not verified. Errors: CheckpointNotFound,
    CheckpointCorrupt.
    """
    ref = finding.resolve(path)
    manifest = loading.read_manifest(ref.path)
    headers = _headers(ref.path)
    model = headers[MODEL_FILE].entries
    return {
        "path": _shown(path, ref),
        "parameters": sum(int(np.prod(entry.shape, dtype=np.int64)) for entry in model),
        "manifest": manifest.document(),
        "tensors": {
            file: {entry.name: {"dtype": entry.dtype, "shape": list(entry.shape)} for entry in header.entries}
            for file, header in headers.items()
        },
        "unlisted": loading.unlisted(ref.path, manifest),
    }


def verify(path: Path, check: Callable[[LoadedCheckpoint], object] = lambda loaded: None) -> dict[str, Any]:
    """Read and check every byte of a checkpoint (or of a run's newest), and what `check` asks of it beside. Errors:
    CheckpointNotFound, and CheckpointCorrupt naming the file and what is wrong with it.
    """
    ref = finding.resolve(path)
    loaded = loading.load(ref.path)
    check(loaded)
    return {
        "path": _shown(path, ref),
        "ok": True,
        **_identity(ref),
        "files": {name: {"size": d.size, "sha256": d.sha256} for name, d in loaded.manifest.files.items()},
        "tensors": len(loaded.model) + len(loaded.optimizer),
        "unlisted": loading.unlisted(ref.path, loaded.manifest),
    }


def _shown(path: Path, ref: CheckpointRef) -> str:
    """An archive by its own name: it is read from a temporary folder."""
    return str(path if archive.is_archive(path) else ref.path)


def diff(a: Path, b: Path) -> dict[str, Any]:
    """How two checkpoints differ.

    same_state: whether their state hashes are equal. values: for progress, configuration, fingerprints and the rest
    of what a run is made of, `{dotted field: [a, b]}` where they differ. tensors: for each file, `{name:
    {"max_abs_diff": ..}}` of those that differ, or `{"only_in": "a"|"b"}`, or `{"shape": [a, b]}`. Errors:
    CheckpointNotFound, CheckpointCorrupt.
    """
    refs = finding.resolve(a), finding.resolve(b)
    first, second = (loading.read_manifest(ref.path) for ref in refs)
    sections = {"a": _sections(first), "b": _sections(second)}
    return {
        "a": {"path": _shown(a, refs[0]), **_identity(refs[0])},
        "b": {"path": _shown(b, refs[1]), **_identity(refs[1])},
        "same_state": refs[0].state_hash == refs[1].state_hash,
        "values": value_differences(sections["a"], sections["b"]),
        "tensors": {file: _tensor_differences(refs[0].path / file, refs[1].path / file) for file in _TENSOR_FILES},
    }


_TENSOR_FILES = (MODEL_FILE, OPTIMIZER_FILE)


def value_differences(a: object, b: object, path: str = "") -> dict[str, list[Any]]:
    """`{dotted path: [value in a, value in b]}` of all leaves that differ; a missing one is "<absent>"."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        found: dict[str, list[Any]] = {}
        for key in sorted({*a, *b}):
            inner = f"{path}.{key}" if path else str(key)
            found |= value_differences(a.get(key, _ABSENT), b.get(key, _ABSENT), inner)
        return found
    return {} if a == b and isinstance(a, bool) == isinstance(b, bool) else {path: [a, b]}


def _sections(manifest: Manifest) -> dict[str, Any]:
    document = manifest.document()
    kept = ("progress", "optimizerStep", "lossScaler", "seed", "dataCursor", "config", "hashes", "fingerprints")
    lineage = {key: document["lineage"][key] for key in ("runId", "runtime")}
    return {**{key: document[key] for key in kept}, "lineage": lineage}


def _tensor_differences(a: Path, b: Path) -> dict[str, dict[str, Any]]:
    """One tensor of each file is in memory at a time."""
    headers = _header(a), _header(b)
    first, second = ({entry.name: entry for entry in header.entries} for header in headers)
    found: dict[str, dict[str, Any]] = {}
    for name in sorted({*first, *second}):
        if name not in second or name not in first:
            found[name] = {"only_in": "a" if name in first else "b"}
        elif first[name].shape != second[name].shape:
            found[name] = {"shape": [list(first[name].shape), list(second[name].shape)]}
        else:
            x, y = safetensors.read_tensor(a, headers[0], name), safetensors.read_tensor(b, headers[1], name)
            if x.tobytes() != y.tobytes():
                with np.errstate(invalid="ignore"):
                    largest = float(np.max(np.abs(x.astype(np.float64) - y.astype(np.float64))))
                found[name] = {"max_abs_diff": largest if np.isfinite(largest) else None}
    return found


def _headers(folder: Path) -> dict[str, safetensors.Header]:
    return {name: _header(folder / name) for name in _TENSOR_FILES}


def _header(path: Path) -> safetensors.Header:
    try:
        return safetensors.read_header(path)
    except CheckpointNotFound as error:
        raise CheckpointCorrupt(f"{error}, but the manifest lists it") from error


def _identity(ref: CheckpointRef) -> dict[str, Any]:
    return {
        "step": ref.step,
        "sequence": ref.sequence,
        "timestamp_ms": ref.timestamp_ms,
        "size": ref.size,
        "checkpointHash": ref.checkpoint_hash,
        "stateHash": ref.state_hash,
    }
