"""Checkpoints that come in as one file (`*.hybrid`), in pieces, and become runs of this machine.

An upload lies in a hidden folder among the runs. What has arrived stays, also when the connection breaks or the server
is started again: the same file is declared again, and goes on where it stands. Only a file that was verified whole, in
the way `hybrid checkpoint unpack` does, becomes a run; until then nobody sees anything of it.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

from hybrid.bridge.server.refusals import Refusal, no_room, not_found
from hybrid.bridge.server.runs import NAME
from hybrid.bridge.server.temporary import TemporaryFolder
from hybrid.checkpoint import archive
from hybrid.checkpoint.finding import CHECKPOINTS_FOLDER, step_folder_name
from hybrid.checkpoint.loading import VerifiedCheckpoint
from hybrid.config.tree import RunConfig
from hybrid.contracts.javascript import iso_time
from hybrid.contracts.stable_json import stable_hash
from hybrid.errors import CheckpointCorrupt, HybridError, LimitExceeded
from hybrid.models.parameters import count_parameters
from hybrid.training.run_files import RunFile
from hybrid.training.saved_run import check_all_but_state

FOLDER = ".uploads"
MOST_OPEN = 16
KEPT_SECONDS = 7 * 24 * 3600
LEFT_SECONDS = 3600  # after which an upload may go for another one
READ_BYTES = 1024 * 1024

Facts = dict[str, Any]

_ARCHIVE = "archive.hybrid"
_FACTS = "upload.json"
_STAGED = "run-"
_ID = re.compile(r"[0-9a-f]{32}\Z")
_RUN_NAME = re.compile(NAME.removesuffix("$") + r"\Z")


class Imports:
    """Uploads into a folder of runs. Calls may come from several threads.

    most_bytes: of one file. clock: Unix time in seconds.
    """

    def __init__(self, runs: Path, most_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self.most_bytes = most_bytes
        self._runs = runs
        self._folder = runs / FOLDER
        self._clock = clock
        self._lock = threading.Lock()  # of what follows, and of names of runs
        self._busy: dict[str, threading.Lock] = {}
        self._pieces: dict[str, Piece] = {}

    def declare(self, name: str, size: int, sha256: str) -> Facts:
        """Begin an upload, or go on with that of the same file: `state`. Errors: Refusal 413 for a file that is too
        large, 409 when there are too many, 507 when the disk has no room."""
        if size > self.most_bytes:
            raise _too_large(f"{name}: {size} bytes; this server takes {self.most_bytes} (--max-upload)")
        identity = stable_hash({"name": name, "size": size, "sha256": sha256})[:32]
        with self._lock, _disk():
            self._clean()
            folder = self._folder / identity
            facts = _read(folder)
            if facts is not None and self._is_here(folder, facts):
                return self._state(identity, facts)
            shutil.rmtree(folder, ignore_errors=True)
            if not self._has_place():
                error = LimitExceeded(f"{MOST_OPEN} uploads are open: finish one, or remove one")
                raise Refusal(HTTPStatus.CONFLICT, error)
            folder.mkdir(parents=True)
            if shutil.disk_usage(folder).free < 2 * size:  # the file, and the checkpoint that is made of it
                shutil.rmtree(folder, ignore_errors=True)
                raise no_room(f"{name}: the disk has no room for {size} bytes and a checkpoint made of them")
            (folder / _ARCHIVE).touch()
            facts = {"name": name, "size": size, "sha256": sha256, "createdAt": self._time()}
            _write(folder, facts)
            return self._state(identity, facts)

    def state(self, identity: str) -> Facts:
        """How an upload stands: id, name, size, sha256, `received` bytes, and `run`, once it is one. Errors: Refusal
        404."""
        return self._state(identity, self._facts(identity))

    def begin(self, identity: str, offset: int) -> Piece:
        """A piece that continues the file at a byte. The newest one wins: one of a broken connection that the server
        still waits for is not continued. Errors: Refusal 404; 409 with `size`, where the file stands, for another
        byte."""
        facts = self._facts(identity)
        with self._lock:
            have = _size(self._folder / identity, facts)
            if offset != have or "run" in facts:
                error = HybridError(f"{facts['name']}: a piece for byte {offset} came, but {have} bytes are there")
                raise Refusal(HTTPStatus.CONFLICT, error, {"size": have})
            path = self._folder / identity / _ARCHIVE
            piece = Piece(path, offset, facts, lambda: self._pieces.get(identity) is piece)
            self._pieces[identity] = piece
            return piece

    def commit(self, identity: str) -> Facts:
        """Verify the file and make a run of it: `state`. Again, it is answered again. A refused file is gone. Errors:
        Refusal 404, 409 for half a file, 507; CheckpointNotFound, CheckpointCorrupt."""
        with self._lock:
            busy = self._busy.setdefault(identity, threading.Lock())
        with busy, _disk():
            facts = self._facts(identity)
            if "run" in facts:
                return self._state(identity, facts)
            folder = self._folder / identity
            have = _size(folder, facts)
            if have != facts["size"]:
                error = HybridError(f"{facts['name']}: {have} of {facts['size']} bytes are there; send the rest first")
                raise Refusal(HTTPStatus.CONFLICT, error, {"size": have})
            with self._lock:
                self._pieces.pop(identity, None)
            # Nobody else has this place, not even another server of these runs that commits the same file.
            place = TemporaryFolder(_STAGED, str(folder))
            try:
                result = self._make_run(folder / _ARCHIVE, place.path / "run", facts)
            except HybridError as error:
                if type(error) is HybridError:  # the disk refuses; the file may be good
                    raise no_room(str(error)) from error
                shutil.rmtree(folder, ignore_errors=True)
                raise
            finally:
                place.close()
            facts = {**facts, **result}
            _write(folder, facts)
            (folder / _ARCHIVE).unlink(
                missing_ok=True
            )  # last: whatever ends this process before, the file can be committed again
            return self._state(identity, facts)

    def drop(self, identity: str) -> None:
        """Forget an upload; a run that it has become stays. Errors: Refusal 404."""
        with self._lock:
            self._facts(identity)
            self._pieces.pop(identity, None)
            shutil.rmtree(self._folder / identity, ignore_errors=True)

    # --- how

    def _make_run(self, file: Path, staged: Path, facts: Facts) -> Facts:
        found = _sha256(file)
        if found != facts["sha256"]:
            raise CheckpointCorrupt(f"{facts['name']}: sha256 {found}, but {facts['sha256']} was declared: damaged")
        unpacked = staged / CHECKPOINTS_FOLDER / "incoming"
        try:
            whole = archive.unpack_whole(file, unpacked)
            config = check_all_but_state(whole)
        except HybridError as error:
            # The sender knows the file by its own name.
            text = str(error).replace(str(unpacked), facts["name"]).replace(str(file), facts["name"])
            raise type(error)(text) from error
        manifest = whole.manifest
        target = step_folder_name(manifest.progress.step)
        unpacked.rename(unpacked.with_name(target))
        RunFile(staged, self._run_facts(whole, config, facts["name"])).update()
        return {
            "run": self._publish(staged, config.run.name),
            "checkpoint": target,
            "step": manifest.progress.step,
            "checkpointHash": manifest.checkpoint_hash,
        }

    def _run_facts(self, whole: VerifiedCheckpoint, config: RunConfig, name: str) -> Facts:
        """run.json of a run that lies here as it was stopped there."""
        manifest = whole.manifest
        time = self._time()
        return {
            "status": "stopped",
            "message": f"uploaded as {name}",
            "runId": manifest.lineage.run_id,
            "name": config.run.name,
            "step": manifest.progress.step,
            "steps": config.run.steps,
            "resumedFrom": None,
            "config": manifest.config,
            "fingerprints": manifest.fingerprints.to_json(),
            "hashes": manifest.hashes.to_json(),
            "parameters": count_parameters(whole.model_config),
            "environment": manifest.environment,
            "provenance": manifest.provenance,
            "createdAt": time,
            "updatedAt": time,
        }

    def _publish(self, staged: Path, wanted: str) -> str:
        """Give the folder a name among the runs that nobody has; it is there at once and whole."""
        wanted = wanted if _RUN_NAME.match(wanted) and len(wanted) <= 100 else "uploaded"
        with self._lock:
            number = 1
            while True:
                target = self._runs / (wanted if number == 1 else f"{wanted}-{number}")
                number += 1
                if target.exists():
                    continue
                try:
                    staged.rename(target)
                except OSError:
                    if target.exists():  # somebody else was faster
                        continue
                    raise
                return target.name

    def _facts(self, identity: str) -> Facts:
        facts = _read(self._folder / identity) if _ID.match(identity) else None
        if facts is None:
            raise not_found(f"upload {identity!r:.60}")
        return facts

    def _state(self, identity: str, facts: Facts) -> Facts:
        return {
            "id": identity,
            **{key: facts[key] for key in ("name", "size", "sha256")},
            "received": _size(self._folder / identity, facts),
            **{key: facts.get(key) for key in ("run", "checkpoint", "step", "checkpointHash")},
        }

    def _is_here(self, folder: Path, facts: Facts) -> bool:
        """Whether the file is there, or the run that it has become (somebody may have removed it since)."""
        return (self._runs / facts["run"]).is_dir() if "run" in facts else (folder / _ARCHIVE).is_file()

    def _clean(self) -> None:
        for folder in self._folder.glob("*"):
            if self._idle(folder) > KEPT_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)

    def _has_place(self) -> bool:
        """Whether one more may be open. The one that was left longest goes for it, if it was left for long."""
        open_ones = [path.parent for path in self._folder.glob(f"*/{_ARCHIVE}")]
        if len(open_ones) < MOST_OPEN:
            return True
        left = max(open_ones, key=self._idle)
        if self._idle(left) <= LEFT_SECONDS:
            return False
        shutil.rmtree(left, ignore_errors=True)
        return True

    def _idle(self, folder: Path) -> float:
        """Seconds since somebody has touched an upload; 0 for one that goes away meanwhile."""
        try:
            return self._clock() - max(path.stat().st_mtime for path in (folder, *folder.glob("*")))
        except OSError:
            return 0.0

    def _time(self) -> str:
        return iso_time(self._clock() * 1000) or ""


class Piece:
    """Bytes on their way to the end of a file. wanted: whether this piece still is the one that continues it."""

    def __init__(self, path: Path, position: int, facts: Facts, wanted: Callable[[], bool]) -> None:
        self._path = path
        self._facts = facts
        self._wanted = wanted
        self._lock = threading.Lock()
        self.position = position

    def write(self, data: bytes) -> None:
        """Append. Errors: Refusal 413 beyond the declared size, 409 when another piece goes on, 507."""
        name, size = self._facts["name"], self._facts["size"]
        with self._lock, _disk():
            if self.position + len(data) > size:
                raise _too_large(f"{name}: more than the {size} bytes that were declared")
            if not self._wanted():
                error = HybridError(f"{name}: another request goes on with this upload")
                raise Refusal(HTTPStatus.CONFLICT, error, {"size": self.position})
            with self._path.open("r+b") as file:
                file.seek(self.position)
                file.write(data)
            self.position += len(data)


@contextmanager
def _disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise no_room(f"the disk refuses: {error.strerror or error}") from error


def _read(folder: Path) -> Facts | None:
    try:
        facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) and {"name", "size", "sha256"} <= facts.keys() else None


def _write(folder: Path, facts: Facts) -> None:
    temporary = folder / f"{_FACTS}.tmp"
    temporary.write_text(json.dumps(facts), encoding="utf-8")
    temporary.replace(folder / _FACTS)


def _size(folder: Path, facts: Facts) -> int:
    if "run" in facts:
        size: int = facts["size"]
        return size
    try:
        return (folder / _ARCHIVE).stat().st_size
    except OSError:
        return 0


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _too_large(message: str) -> Refusal:
    return Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, LimitExceeded(message))
