"""Checkpoints on their way in: pieces of files, and then the manifest, which makes one of them a checkpoint.

An upload lies in a temporary folder beside the run's checkpoints, where nobody takes it for one. Pieces are appended in
order; where a file stands is known at any time, so a sender can go on after a fault.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

from hybrid.bridge.server.refusals import Refusal
from hybrid.checkpoint.digests import CHUNK_BYTES
from hybrid.checkpoint.finding import CheckpointRef
from hybrid.checkpoint.loading import VerifiedCheckpoint
from hybrid.checkpoint.manifest import check_file_name
from hybrid.checkpoint.store import CheckpointStore
from hybrid.errors import CheckpointCorrupt, HybridError, LimitExceeded

PIECE_BYTES = CHUNK_BYTES
MOST_FILES = 16

_NAME = re.compile(r"step-([0-9]{8,15})\Z")


@dataclass
class _Upload:
    folder: Path
    sizes: dict[str, int] = field(default_factory=dict)


class Uploads:
    """Uploads into one run folder. Calls may come from several threads.

    most_bytes: of one checkpoint. check: asked before an upload becomes a checkpoint, with what was verified; its
    errors are refusals. adopted: told of each that has become one.
    """

    def __init__(
        self,
        store: CheckpointStore,
        most_bytes: int,
        check: Callable[[VerifiedCheckpoint], None],
        adopted: Callable[[CheckpointRef], None],
    ) -> None:
        self._store = store
        self._most = most_bytes
        self._check = check
        self._adopted = adopted
        self._open: dict[str, _Upload] = {}
        self._last: tuple[str, str, CheckpointRef] | None = None  # name, sha256 of the manifest, what became of it
        self._lock = threading.Lock()

    def append(self, name: str, file: str, offset: int, piece: bytes) -> int:
        """Put a piece at the end of a file, or begin the file anew with one at 0; its size afterwards.

        Errors: CheckpointCorrupt for a name; Refusal 409 with `size` when the file does not end at `offset`, 413 when
        there would be too much of it; HybridError when the disk refuses.
        """
        step = _step(name)
        if problem := check_file_name(file):
            raise CheckpointCorrupt(f"{name}: the file name {file!r:.200}: {problem}")
        with self._lock:
            upload = self._open.get(name) or _Upload(self._store.incoming(step))
            self._open[name] = upload
            have = upload.sizes.get(file, 0)
            if offset not in (0, have):
                error = HybridError(f"{name}/{file}: a piece for byte {offset} came, but the file has {have} bytes")
                raise Refusal(HTTPStatus.CONFLICT, error, {"size": have})
            others = sum(size for other, size in upload.sizes.items() if other != file)
            if len(piece) > PIECE_BYTES:
                raise _too_large(f"{name}/{file}: a piece of {len(piece)} bytes; at most {PIECE_BYTES} are taken")
            if others + offset + len(piece) > self._most or len(upload.sizes.keys() | {file}) > MOST_FILES:
                raise _too_large(
                    f"{name}: a checkpoint of this run has at most {self._most} bytes in {MOST_FILES} files"
                )
            try:
                with (upload.folder / file).open("r+b" if offset else "wb") as target:
                    target.seek(offset)
                    target.truncate()
                    target.write(piece)
            except OSError as error:
                upload.sizes[file] = 0  # whatever of it is there; the sender begins it anew
                raise HybridError(f"{name}/{file}: cannot be written: {error.strerror or error}") from error
            upload.sizes[file] = offset + len(piece)
            return upload.sizes[file]

    def commit(self, name: str, manifest: bytes) -> CheckpointRef:
        """Make a checkpoint of what was uploaded. A commit that comes again because its answer was lost is answered
        again. A refused upload is gone. Errors: CheckpointCorrupt; those of `check`; HybridError when the disk
        refuses."""
        step = _step(name)
        sha256 = hashlib.sha256(manifest).hexdigest()
        with self._lock:
            if self._last is not None and self._last[:2] == (name, sha256):
                return self._last[2]
            upload = self._open.pop(name, None)
            if upload is None:
                raise CheckpointCorrupt(f"{name}: nothing was uploaded under this name")

            def check(loaded: VerifiedCheckpoint) -> None:
                if loaded.manifest.progress.step != step:
                    raise CheckpointCorrupt(f"{name}: the manifest is of step {loaded.manifest.progress.step}")
                self._check(loaded)

            ref = self._store.adopt(upload.folder, manifest, check)
            self._last = (name, sha256, ref)
            self._adopted(ref)
            return ref

    def clear(self) -> None:
        """Drop what is not finished."""
        with self._lock:
            for upload in self._open.values():
                shutil.rmtree(upload.folder, ignore_errors=True)
            self._open.clear()


def _step(name: str) -> int:
    match = _NAME.match(name)
    if match is None or name != f"step-{int(match[1]):08d}":
        raise CheckpointCorrupt(f"{name!r:.200}: expected a checkpoint's name, such as step-00000500")
    return int(match[1])


def _too_large(message: str) -> Refusal:
    return Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, LimitExceeded(message))
