"""`checkpoint.json`: what a checkpoint is, where it came from, and the digests of its files.

The manifest is written last: its presence makes the checkpoint exist. It has exactly one text (`canonical`), and
every member is checked before it is believed. docs/formats/checkpoint.md describes it with an example.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hybrid.checkpoint import canonical
from hybrid.checkpoint.digests import CHUNK_BYTES, FileDigest
from hybrid.contracts.stable_json import stable_hash
from hybrid.errors import CheckpointCorrupt, HybridError

FORMAT: Final = "hybrid.checkpoint"
VERSION: Final = 1
MANIFEST_NAME: Final = "checkpoint.json"
MODEL_FILE: Final = "model.safetensors"
OPTIMIZER_FILE: Final = "optimizer.safetensors"
CONFIG_FILE: Final = "config.json"
GENERATION_FILE: Final = "generation_config.json"
TOKENIZER_FILE: Final = "tokenizer.json"
REQUIRED_FILES: Final = (MODEL_FILE, OPTIMIZER_FILE, CONFIG_FILE, GENERATION_FILE)
MAX_MANIFEST_BYTES: Final = 64 * 1024 * 1024

_MAX_SAFE_INTEGER: Final = 2**53 - 1
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
_DEVICE_NAME = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\.|\Z)")  # no file on Windows can have these names

_PROGRESS_KEYS = {
    "step": "step", "epoch": "epoch", "batch": "batch", "samples": "samples", "tokens": "tokens",
    "targetTokens": "target_tokens",
}  # fmt: skip
_HASH_KEYS = {
    "configHash": "config_hash", "datasetHash": "dataset_hash", "tokenizerHash": "tokenizer_hash",
    "optimizerHash": "optimizer_hash", "runtimePresetId": "runtime_preset_id", "kernelPathId": "kernel_path_id",
}  # fmt: skip
_AUDIT_KEYS = ("field", "saved", "current", "reason", "timestamp", "source", "operator")
_KEYS = frozenset({
    "format", "version", "progress", "optimizerStep", "lossScaler", "seed", "dataCursor", "config", "hashes",
    "fingerprints", "environment", "provenance", "lineage", "resumeAudits", "session", "files", "timestamp",
    "stateHash", "checkpointHash",
})  # fmt: skip


@dataclass(frozen=True)
class Progress:
    """How far a run is. step: data steps done (they advance when the optimizer skips); epoch, batch: completed
    epochs, and batches within the current one; samples, tokens, target_tokens: totals seen.
    """

    step: int
    epoch: int = 0
    batch: int = 0
    samples: int = 0
    tokens: int = 0
    target_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        return {key: getattr(self, name) for key, name in _PROGRESS_KEYS.items()}


@dataclass(frozen=True)
class Hashes:
    """Identities of what the run was made of. The hashes are sha256 in 64 hex digits, the ids are names; None: not
    known.
    """

    config_hash: str | None = None
    dataset_hash: str | None = None
    tokenizer_hash: str | None = None
    optimizer_hash: str | None = None
    runtime_preset_id: str | None = None
    kernel_path_id: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {key: getattr(self, name) for key, name in _HASH_KEYS.items()}


@dataclass(frozen=True)
class Fingerprints:
    """What a resume is compared with, field by field: of the data, of the tokenizer, and of the training contract."""

    dataset: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] = field(default_factory=dict)
    contract: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "tokenizer": self.tokenizer, "contract": self.contract}


@dataclass(frozen=True)
class Lineage:
    """One link of the chain. sequence: 1 for the first checkpoint of a run, and one more than any other of the run
    folder when it was saved. previous_checkpoint_hash: of the checkpoint this one was trained from. runtime: where it
    was made.
    """

    run_id: str
    sequence: int
    previous_checkpoint_hash: str | None
    runtime: str

    def to_json(self) -> dict[str, Any]:
        return {
            "runId": self.run_id,
            "sequence": self.sequence,
            "previousCheckpointHash": self.previous_checkpoint_hash,
            "runtime": self.runtime,
        }


@dataclass(frozen=True)
class Manifest:
    """The content of `checkpoint.json`. timestamp_ms: Unix time in milliseconds; it is in no hash but its own seal."""

    progress: Progress
    optimizer_step: int
    scaler: dict[str, Any]
    seed: int
    cursor: dict[str, Any]
    config: dict[str, Any]
    hashes: Hashes
    fingerprints: Fingerprints
    environment: dict[str, Any]
    provenance: dict[str, Any] | None
    lineage: Lineage
    resume_audits: tuple[dict[str, Any], ...]
    session: dict[str, Any]
    files: dict[str, FileDigest]
    timestamp_ms: int
    state_hash: str

    @property
    def checkpoint_hash(self) -> str:
        """sha256 of the stable JSON of the manifest without this hash and the timestamp."""
        return stable_hash(self._hashed())

    def document(self) -> dict[str, Any]:
        """The members of `checkpoint.json` as plain JSON. Errors: HybridError for a value that JSON cannot carry."""
        document: dict[str, Any] = canonical.plain(self._hashed(), "manifest")
        checkpoint_hash = stable_hash(document)
        document["checkpointHash"] = checkpoint_hash
        document["timestamp"] = {"unixMs": self.timestamp_ms, "seal": _seal(checkpoint_hash, self.timestamp_ms)}
        return document

    def render(self) -> bytes:
        """The bytes of `checkpoint.json`. Errors: as `document`."""
        return canonical.render(self.document())

    def _hashed(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "progress": self.progress.to_json(),
            "optimizerStep": self.optimizer_step,
            "lossScaler": self.scaler,
            "seed": self.seed,
            "dataCursor": self.cursor,
            "config": self.config,
            "hashes": self.hashes.to_json(),
            "fingerprints": self.fingerprints.to_json(),
            "environment": self.environment,
            "provenance": self.provenance,
            "lineage": self.lineage.to_json(),
            "resumeAudits": list(self.resume_audits),
            "session": self.session,
            "files": {
                name: {"size": digest.size, "sha256": digest.sha256, "chunks": list(digest.chunks)}
                for name, digest in self.files.items()
            },
            "stateHash": self.state_hash,
        }


def parse(source: str, data: bytes) -> Manifest:
    """The manifest in `data`, with its own hashes verified. Errors: CheckpointCorrupt naming `source` and the field."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise CheckpointCorrupt(f"{source}: {len(data)} bytes; a manifest has at most {MAX_MANIFEST_BYTES}")
    try:
        document = canonical.parse(data)
    except (ValueError, HybridError, RecursionError) as error:
        raise CheckpointCorrupt(f"{source}: {error}") from error
    root = _Members(source, "", document)
    if root.get("format") != FORMAT:
        raise root.wrong("format", f"expected {FORMAT!r}")
    if root.get("version") != VERSION or isinstance(root.get("version"), bool):
        raise root.wrong("version", f"this program reads version {VERSION}; a newer one needs a newer program")
    root.exactly(_KEYS)
    manifest = Manifest(
        progress=_progress(root.members("progress")),
        optimizer_step=root.integer("optimizerStep"),
        scaler=root.object("lossScaler"),
        seed=root.integer("seed"),
        cursor=root.object("dataCursor"),
        config=root.object("config"),
        hashes=_hashes(root.members("hashes")),
        fingerprints=_fingerprints(root.members("fingerprints")),
        environment=root.object("environment"),
        provenance=None if root.get("provenance") is None else root.object("provenance"),
        lineage=_lineage(root.members("lineage")),
        resume_audits=tuple(_audit(source, i, audit) for i, audit in enumerate(root.list("resumeAudits"))),
        session=root.object("session"),
        files=_files(root.members("files")),
        timestamp_ms=root.members("timestamp").integer("unixMs"),
        state_hash=root.sha256("stateHash"),
    )
    stored = root.sha256("checkpointHash")
    if stored != manifest.checkpoint_hash:
        raise root.wrong("checkpointHash", f"the rest of the manifest has {manifest.checkpoint_hash}: it was changed")
    timestamp = root.members("timestamp").exactly({"unixMs", "seal"})
    if timestamp.sha256("seal") != _seal(stored, manifest.timestamp_ms):
        raise timestamp.wrong("seal", "the timestamp was changed")
    return manifest


def check_file_name(name: str) -> str | None:
    """What is wrong with a file name of a manifest, or None."""
    if problem := name_problem(name):
        return problem
    if name.lower() == MANIFEST_NAME:
        return "the manifest does not list itself"
    return None


def name_problem(name: str) -> str | None:
    """What is wrong with the name of a file, or None. Names are portable and stay inside the folder."""
    if not _FILE_NAME.match(name) or name.endswith(".") or _DEVICE_NAME.match(name.lower()):
        return "expected a plain file name of letters, digits, '.', '_' and '-'"
    return None


def _seal(checkpoint_hash: str, timestamp_ms: int) -> str:
    return stable_hash({"checkpointHash": checkpoint_hash, "unixMs": timestamp_ms})


def _progress(members: _Members) -> Progress:
    members.exactly(_PROGRESS_KEYS)
    return Progress(**{name: members.integer(key) for key, name in _PROGRESS_KEYS.items()})


def _hashes(members: _Members) -> Hashes:
    members.exactly(_HASH_KEYS)
    read = {
        name: None if members.get(key) is None else members.sha256(key) if key.endswith("Hash") else members.text(key)
        for key, name in _HASH_KEYS.items()
    }
    return Hashes(**read)


def _fingerprints(members: _Members) -> Fingerprints:
    members.exactly({"dataset", "tokenizer", "contract"})
    return Fingerprints(members.object("dataset"), members.object("tokenizer"), members.object("contract"))


def _lineage(members: _Members) -> Lineage:
    members.exactly({"runId", "sequence", "previousCheckpointHash", "runtime"})
    previous = members.get("previousCheckpointHash")
    return Lineage(
        run_id=members.text("runId"),
        sequence=members.integer("sequence", minimum=1),
        previous_checkpoint_hash=None if previous is None else members.sha256("previousCheckpointHash"),
        runtime=members.text("runtime"),
    )


def _audit(source: str, index: int, audit: object) -> dict[str, Any]:
    members = _Members(source, f"resumeAudits[{index}]", audit).exactly(_AUDIT_KEYS)
    for key in ("field", "reason", "source", "timestamp"):
        members.text(key)
    if members.get("operator") is not None:
        members.text("operator")
    return members.values


def _files(members: _Members) -> dict[str, FileDigest]:
    seen: dict[str, str] = {}
    files: dict[str, FileDigest] = {}
    for name in members.values:
        if problem := check_file_name(name):
            raise CheckpointCorrupt(f"{members.source}: files has the name {name!r:.200}: {problem}")
        other = seen.setdefault(name.lower(), name)
        if other != name:
            raise CheckpointCorrupt(f"{members.source}: files has {other!r} and {name!r}, one name on some systems")
        record = members.members(name).exactly({"size", "sha256", "chunks"})
        size, chunks = record.integer("size"), record.list("chunks")
        if len(chunks) != -(-size // CHUNK_BYTES):
            raise record.wrong("chunks", f"{size} bytes have {-(-size // CHUNK_BYTES)} chunks of {CHUNK_BYTES}")
        if not all(isinstance(chunk, str) and _SHA256.match(chunk) for chunk in chunks):
            raise record.wrong("chunks", "expected a list of sha256 in 64 hex digits")
        files[name] = FileDigest(size, record.sha256("sha256"), tuple(chunks))
    if missing := [name for name in REQUIRED_FILES if name not in files]:
        raise CheckpointCorrupt(f"{members.source}: files lacks {', '.join(missing)}")
    return files


class _Members:
    """The members of one object of a document, read with their types checked."""

    def __init__(self, source: str, path: str, value: object) -> None:
        if not isinstance(value, dict):
            raise CheckpointCorrupt(f"{source}: {path or 'the document'} is {value!r:.80}: expected an object")
        self.source = source
        self.values: dict[str, Any] = value
        self._path = path

    def exactly(self, keys: frozenset[str] | set[str] | Mapping[str, str] | tuple[str, ...]) -> _Members:
        """Refuse missing and unknown members."""
        where = self._path or "the document"
        if missing := sorted(set(keys) - set(self.values)):
            raise CheckpointCorrupt(f"{self.source}: {where} lacks {', '.join(missing)}")
        if extra := sorted(set(self.values) - set(keys)):
            raise CheckpointCorrupt(f"{self.source}: {where} has the unknown member {extra[0]!r:.200}")
        return self

    def wrong(self, key: str, expected: str) -> CheckpointCorrupt:
        path = f"{self._path}.{key}" if self._path else key
        return CheckpointCorrupt(f"{self.source}: {path} is {self.values.get(key)!r:.80}: {expected}")

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def integer(self, key: str, minimum: int = 0) -> int:
        value = self.get(key)
        if type(value) is not int or not minimum <= value <= _MAX_SAFE_INTEGER:
            raise self.wrong(key, f"expected an integer from {minimum} to 2^53 - 1")
        return value

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, "expected a text that is not empty")
        return value

    def sha256(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str) or not _SHA256.match(value):
            raise self.wrong(key, "expected a sha256 in 64 hex digits")
        return value

    def object(self, key: str) -> dict[str, Any]:
        return self.members(key).values

    def list(self, key: str) -> list[Any]:
        value = self.get(key)
        if not isinstance(value, list):
            raise self.wrong(key, "expected a list")
        return value

    def members(self, key: str) -> _Members:
        value = self.get(key)
        if not isinstance(value, dict):
            raise self.wrong(key, "expected an object")
        return _Members(self.source, f"{self._path}.{key}" if self._path else key, value)
