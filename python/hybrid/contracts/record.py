"""The mirrored runner's checkpoint record: one JSON document with tensors as base64. Both generations of it are read.

A record has members trainingState {progress, optimizerStepCount, params, optimizerSlots} and metadata. Its tensors
are the bytes of pooled buffers, longer than the tensor: what lies beyond the shape is not data.
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from struct import unpack
from typing import Any

from hybrid.contracts.javascript import is_integer
from hybrid.contracts.stable_json import stable_hash
from hybrid.errors import CheckpointCorrupt, ContractMismatch

# Order of the mismatch message. Records carry runtimePresetId (0.1) or runtimeProfileId (0.5).
COMPARED = (
    "configHash",
    "datasetHash",
    "tokenizerHash",
    "optimizerHash",
    "runtimePresetId",
    "runtimeProfileId",
    "kernelPathId",
)

_FORMATS = {"f32": ("f", 4), "f16": ("e", 2)}


@dataclass(frozen=True)
class RecordTensor:
    """One tensor of a record.

    key: "<group>[<index>]". role: "param", "m" or "v". dtype: "f32" or "f16". data: little-endian, without the padding.
    """

    key: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def values(self) -> list[float]:
        """The elements in row-major order."""
        code, size = _FORMATS[self.dtype]
        return list(unpack(f"<{len(self.data) // size}{code}", self.data))


def checkpoint_hash(record: Mapping[str, Any]) -> str:
    """The hash a record should carry in metadata.checkpointHash. The timestamp and resume audits are not part of it."""
    metadata = _member(record, "metadata")
    lineage = metadata.get("lineage") or {}
    profile = "runtimeProfileId" if "runtimeProfileId" in metadata else "runtimePresetId"
    covered = ["configHash", "datasetHash", "tokenizerHash", "optimizerHash", profile, "kernelPathId"]
    covered += ["environmentMetadata", "buildProvenance"]
    links = ("checkpointKey", "sequence", "previousCheckpointHash")
    return stable_hash(
        {
            "payload": {name: value for name, value in record.items() if name != "metadata"},
            "metadata": {
                **{name: metadata.get(name) for name in covered},
                "lineage": {name: lineage.get(name) for name in links},
            },
        }
    )


def verify(record: Mapping[str, Any]) -> None:
    """CheckpointCorrupt when the record's own hash is not the hash of its content."""
    stored, computed = _member(record, "metadata").get("checkpointHash"), checkpoint_hash(record)
    if stored != computed:
        raise CheckpointCorrupt(
            f"checkpoint record: checkpointHash is {stored!r}, but its content has {computed}: it was changed"
        )


def require_expected(record: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """ContractMismatch naming each expected field that the record's metadata disagrees with. None expects nothing."""
    metadata = _member(record, "metadata")
    found = tuple(
        (name, metadata.get(name), expected[name])
        for name in COMPARED
        if expected.get(name) is not None and metadata.get(name) != expected[name]
    )
    if found:
        raise ContractMismatch(f"Checkpoint mismatch on fields: {', '.join(name for name, _, _ in found)}", found)


def tensors(record: Mapping[str, Any]) -> Iterator[RecordTensor]:
    """All parameters in the record's order, then the moments m and v of each that has them.

    CheckpointCorrupt naming the tensor for unknown dtypes, impossible shapes, broken base64, and buffers that are too
    short.
    """
    state = _member(record, "trainingState")
    for key, document in _member(state, "params").items():
        yield _decode(key, "param", document)
    for key, moments in (_member(state, "optimizerSlots") if state.get("optimizerSlots") else {}).items():
        for role in ("m", "v"):
            yield _decode(key, role, moments.get(role) if isinstance(moments, Mapping) else moments)


def _decode(key: str, role: str, document: Any) -> RecordTensor:
    where = f"checkpoint record: tensor {key!r} ({role})"
    if not isinstance(document, Mapping):
        raise CheckpointCorrupt(f"{where} is {type(document).__name__}, expected an object")
    dtype, shape, text = document.get("dtype"), document.get("shape"), document.get("dataBase64")
    if dtype not in _FORMATS:
        raise CheckpointCorrupt(f"{where} has dtype {dtype!r}, expected one of {', '.join(_FORMATS)}")
    if not isinstance(shape, list) or not all(is_integer(size) and size >= 0 for size in shape):
        raise CheckpointCorrupt(f"{where} has shape {shape!r}, expected a list of sizes")
    try:
        data = b64decode(text if isinstance(text, str) else "?", validate=True)
    except (binascii.Error, ValueError):
        raise CheckpointCorrupt(f"{where} has dataBase64 that is not base64") from None
    sizes = tuple(int(size) for size in shape)
    needed = prod(sizes) * _FORMATS[dtype][1]
    if len(data) < needed:
        raise CheckpointCorrupt(f"{where} has {len(data)} bytes, but {dtype} of shape {list(sizes)} needs {needed}")
    return RecordTensor(key, role, dtype, sizes, data[:needed])


def _member(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    member = document.get(name)
    if not isinstance(member, Mapping):
        raise CheckpointCorrupt(f"checkpoint record: {name} is {type(member).__name__}, expected an object")
    return member
