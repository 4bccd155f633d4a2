"""Changes to a checkpoint that make it malformed or a lie, and what the refusal says."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybrid.checkpoint import canonical, manifest, safetensors
from hybrid.checkpoint.digests import digest_bytes
from hybrid.contracts.stable_json import stable_hash

DELETE = object()


def put(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    """A change that sets the member at a path such as `progress/step`, or deletes it."""
    *parents, last = path.split("/")

    def change(document: dict[str, Any]) -> None:
        for key in parents:
            document = document[key]
        if value is DELETE:
            del document[last]
        else:
            document[last] = value

    return change


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and recompute its hashes: what a forger, or a faulty writer, would leave."""
    path = folder / "checkpoint.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    timestamp = document.pop("timestamp", None)
    document.pop("checkpointHash", None)
    document["checkpointHash"] = stable_hash(document)
    if isinstance(timestamp, dict) and "unixMs" in timestamp:
        seal = stable_hash({"checkpointHash": document["checkpointHash"], "unixMs": timestamp["unixMs"]})
        timestamp = {**timestamp, "seal": seal}
    document["timestamp"] = timestamp
    path.write_bytes(canonical.render(document))


def relist(folder: Path, name: str, data: bytes) -> None:
    """Write a file and list it truthfully in the manifest."""
    (folder / name).write_bytes(data)
    digest = digest_bytes(data)
    record = {"size": digest.size, "sha256": digest.sha256, "chunks": list(digest.chunks)}
    rewrite(folder, lambda document: document["files"].update({name: record}))


def tensor_bytes(tensors: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    safetensors.write(out.write, tensors, {"format": "pt"})
    return out.getvalue()


CONFIG = "files/config.json"
AUDIT = {
    "field": "contract.seed",
    "saved": 1,
    "current": 2,
    "reason": "another draw",
    "timestamp": "2026-01-01T00:00:00.000Z",
    "source": "command",
    "operator": None,
}
HOSTILE: list[tuple[str, object, str]] = [
    ("format", "hybrid.plan", "format is 'hybrid.plan'"),
    ("version", 2, "version is 2: this program reads version 1"),
    ("version", True, "version is True"),
    ("version", "1", "version is '1'"),
    ("version", DELETE, "version is None"),
    ("surprise", 1, "the document has the unknown member 'surprise'"),
    *[
        (key, DELETE, f"lacks {key}")
        for key in sorted(manifest._KEYS - {"format", "version", "checkpointHash", "timestamp"})
    ],
    ("progress", [], "progress is []: expected an object"),
    ("progress/step", -1, "progress.step is -1: expected an integer from 0"),
    ("progress/step", 1.5, "progress.step is 1.5"),
    ("progress/step", 2.0**60, "progress.step is"),
    ("progress/step", "5", "progress.step is '5'"),
    ("progress/step", True, "progress.step is True"),
    ("progress/tokens", DELETE, "progress lacks tokens"),
    ("progress/more", 1, "progress has the unknown member 'more'"),
    ("optimizerStep", None, "optimizerStep is None"),
    ("seed", -1, "seed is -1"),
    ("lossScaler", None, "lossScaler is None: expected an object"),
    ("hashes/configHash", "C" * 64, "hashes.configHash is"),
    ("hashes/configHash", "c" * 63, "hashes.configHash is"),
    ("hashes/configHash", "c" * 64 + "\n", "hashes.configHash is"),
    ("hashes/kernelPathId", 7, "hashes.kernelPathId is 7: expected a text"),
    ("fingerprints/dataset", "x", "fingerprints.dataset is 'x': expected an object"),
    ("lineage/sequence", 0, "lineage.sequence is 0: expected an integer from 1"),
    ("lineage/runId", "", "lineage.runId is ''"),
    ("lineage/previousCheckpointHash", "no", "lineage.previousCheckpointHash is 'no'"),
    ("lineage/runtime", None, "lineage.runtime is None"),
    ("resumeAudits", {}, "resumeAudits is {}: expected a list"),
    ("resumeAudits", ["x"], "resumeAudits[0] is 'x': expected an object"),
    ("resumeAudits", [{**AUDIT, "reason": ""}], "resumeAudits[0].reason is ''"),
    ("resumeAudits", [{**AUDIT, "more": 1}], "resumeAudits[0] has the unknown member 'more'"),
    ("resumeAudits", [{**AUDIT, "timestamp": 7}], "resumeAudits[0].timestamp is 7"),
    ("provenance", 3, "provenance is 3: expected an object"),
    ("files", {}, "files lacks model.safetensors, optimizer.safetensors, config.json, generation_config.json"),
    (f"{CONFIG}/size", -1, "files.config.json.size is -1"),
    (f"{CONFIG}/size", 10**15, "files.config.json.chunks is"),
    (f"{CONFIG}/size", 1, "config.json: "),
    (f"{CONFIG}/sha256", "0" * 64, "config.json: sha256"),
    (f"{CONFIG}/chunks", [], "files.config.json.chunks is []"),
    (f"{CONFIG}/chunks", ["0" * 64], "config.json: bytes 0 to"),
    (f"{CONFIG}/chunks", [7], "files.config.json.chunks is [7]"),
    (f"{CONFIG}/more", 1, "files.config.json has the unknown member 'more'"),
    ("stateHash", "0" * 64, "stateHash is 0000"),
    ("stateHash", None, "stateHash is None"),
    ("timestamp", None, "timestamp is None: expected an object"),
    ("timestamp/unixMs", -5, "timestamp.unixMs is -5"),
]
# What is no document at all.
TEXTS: list[tuple[bytes, str]] = [
    (b"", "not JSON"),
    (b"\xff\xfe", "not UTF-8"),
    (b"[]\n", "the document is []: expected an object"),
    (b"null\n", "the document is None"),
    (b'{"format": 1, "format": 1}', "the key 'format' appears twice"),
    (b'{"seed": ' + b"9" * 10_000 + b"}", "an integer of 10000 digits"),
    (b'{"seed": Infinity}', "Infinity is not a JSON number"),
    (b'{"a":' * 100_000, "nested too deeply"),
    (b'{\n  "__proto__": 1\n}\n', "__proto__"),
]
NAMES = (
    "../model.safetensors", "/etc/passwd", "a/b", "a\\b", "..", ".", "", ".hidden", "C:evil", "a\x00b", "nul",
    "Aux.json", "model.safetensors.", "é.json", "x" * 129, "checkpoint.json", "CHECKPOINT.JSON", " model", "a\n",
)  # fmt: skip
