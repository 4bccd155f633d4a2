"""`stateHash`: one number for everything that continues a run, however it is laid out in files.

It covers the tensors of model and optimizer (name, stored dtype, shape, sha256 of the raw little-endian bytes), the
optimizer's step count, progress, loss scaler and data cursor; not when, where or by what the checkpoint was made. Two
runs are bitwise equal exactly when their state hashes are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from hybrid.checkpoint import canonical, safetensors
from hybrid.checkpoint.safetensors import LateTensor, TensorArray
from hybrid.contracts.stable_json import stable_hash

TensorDigests = dict[str, dict[str, Any]]


def state_hash(
    model: TensorDigests,
    optimizer: TensorDigests,
    *,
    optimizer_step: int,
    progress: Mapping[str, Any],
    scaler: Mapping[str, Any],
    cursor: Mapping[str, Any],
) -> str:
    """sha256 (64 hex digits) of the stable JSON of the state. `progress`, `scaler`, `cursor`: as the manifest has
    them.
    """
    document = {
        "model": model,
        "optimizer": optimizer,
        "optimizerStep": optimizer_step,
        "progress": dict(progress),
        "lossScaler": dict(scaler),
        "dataCursor": dict(cursor),
    }
    return stable_hash(canonical.plain(document, "state"))


def digests_of_arrays(tensors: Mapping[str, TensorArray | LateTensor]) -> TensorDigests:
    """What the state hash takes of each tensor that would be written."""
    return {
        name: tensor_digest(safetensors.stored_dtype(name, tensor), tensor.shape, _sha256(tensor))
        for name, tensor in tensors.items()
    }


def digests_of_file(file: safetensors.ScannedFile) -> TensorDigests:
    """What the state hash takes of each tensor, from a file that was read."""
    return {
        entry.name: tensor_digest(entry.dtype, entry.shape, file.sha256[entry.name]) for entry in file.header.entries
    }


def tensor_digest(dtype: str, shape: tuple[int, ...], sha256: str) -> dict[str, Any]:
    """One tensor's members in the hashed document."""
    return {"dtype": dtype, "shape": list(shape), "sha256": sha256}


def _sha256(tensor: TensorArray | LateTensor) -> str:
    digest = hashlib.sha256()
    for block in safetensors.blocks_of(tensor):
        digest.update(block)
    return digest.hexdigest()
