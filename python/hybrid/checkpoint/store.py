"""Saving and keeping checkpoints of one run folder.

A save writes a temporary sibling, syncs every file, writes the manifest last, syncs the folder, renames it into place
and syncs the parent. At every moment the newest finished checkpoint is whole; a process may die at any of them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from hybrid.checkpoint import canonical, finding, huggingface, loading, safetensors, state
from hybrid.checkpoint import manifest as manifests
from hybrid.checkpoint.digests import Digester, FileDigest
from hybrid.checkpoint.filesystem import OsFilesystem
from hybrid.checkpoint.finding import CheckpointRef, CheckpointStatus
from hybrid.checkpoint.loading import CheckpointStream, LoadedCheckpoint, VerifiedCheckpoint
from hybrid.checkpoint.manifest import Lineage, Manifest
from hybrid.checkpoint.snapshot import CheckpointSnapshot
from hybrid.errors import CheckpointCorrupt, CheckpointNotFound, ConfigError, HybridError
from hybrid.models.config import ModelConfig


class CheckpointStore:
    """The checkpoints of the run in `run_dir`. One process saves; any number may read.

    keep_last: how many of the newest to keep (None: all). keep_every: also keep steps divisible by it. keep_hours: also
    keep the first one, and each that is so many hours younger than the one kept before it. clock: Unix time in
    seconds. Errors: ConfigError for settings below 1, and hours that are not above 0.
    """

    def __init__(
        self,
        run_dir: Path | str,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_hours: float | None = None,
        filesystem: OsFilesystem | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise ConfigError(f"checkpoint.{name} is {value}: expected at least 1, or none")
        if keep_hours is not None and not keep_hours > 0:
            raise ConfigError(f"checkpoint.keep_hours is {keep_hours}: expected a number above 0, or none")
        self.run_dir = Path(run_dir)
        self.folder = self.run_dir / finding.CHECKPOINTS_FOLDER
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._keep_hours = keep_hours
        self._filesystem = filesystem or OsFilesystem()
        self._clock = clock
        self._parent: str | None = None  # checkpointHash of what the next save was trained from
        self._parent_known = False
        self._sequence: int | None = None  # of the last save of this process
        self._written: dict[Path, str] = {}  # saved by this process: path to state hash
        self._names = 0

    # --- reading

    def list(self) -> tuple[CheckpointStatus, ...]:
        """Every folder under `checkpoints/` with its status, the newest complete one last."""
        return tuple(finding.scan(self.folder))

    def latest(self) -> CheckpointRef | None:
        """The newest complete checkpoint; None if there is none. Errors: CheckpointCorrupt naming a damaged newer
        one.
        """
        return finding.newest(self.folder)

    def load(self, ref: CheckpointRef | Path, verify: bool = True) -> LoadedCheckpoint:
        """Read a checkpoint, verified. Errors: CheckpointNotFound, CheckpointCorrupt."""
        path = ref if isinstance(ref, Path) else self._where(ref)
        finding.read_ref(path)
        return loading.load(path, verify)

    def stream(self, ref: CheckpointRef) -> CheckpointStream:
        """A checkpoint to be read tensor by tensor. Errors: CheckpointNotFound, CheckpointCorrupt."""
        path = self._where(ref)
        finding.read_ref(path)
        return CheckpointStream(path)

    def verify(self, path: Path) -> Manifest:
        """Read and check every byte; the manifest if all is well. Errors: CheckpointNotFound, CheckpointCorrupt."""
        finding.read_ref(path)
        return loading.examine(path).manifest

    # --- saving

    def continue_from(self, whole: VerifiedCheckpoint) -> None:
        """The next save descends from `whole`, which need not be the newest one, nor lie in this run folder."""
        self._parent, self._parent_known = whole.manifest.checkpoint_hash, True

    def save(self, snapshot: CheckpointSnapshot) -> Path:
        """Save and return the checkpoint's folder. The same state at the same step is not saved twice.

        Errors: HybridError when the snapshot is wrong or the disk refuses; what was saved before is untouched.
        """
        snapshot.validate()
        target = self.folder / finding.step_folder_name(snapshot.progress.step)
        temporary = self._sibling(finding.TEMPORARY, target.name)
        try:
            if target.exists() and self._holds(target, snapshot):
                self._prune_after_save(target)
                return target
            self._filesystem.create_folder(temporary)
            manifest = self._write(temporary, snapshot)
            self._put_in_place(temporary, target)
        except Exception as error:
            with contextlib.suppress(OSError):
                self._filesystem.remove_folder(temporary)
            if not isinstance(error, OSError):
                raise
            reason = error.strerror or error
            raise HybridError(f"{target}: could not be saved: {reason}; earlier checkpoints are untouched") from error
        self._written[target] = manifest.state_hash
        self._parent, self._parent_known = manifest.checkpoint_hash, True
        self._sequence = manifest.lineage.sequence
        self._prune_after_save(target)
        return target

    def incoming(self, step: int) -> Path:
        """A new folder for the files of a checkpoint of this step that was made elsewhere, or for pieces of them. It is
        temporary until `adopt` or `discard`. Errors: HybridError when the disk refuses.
        """
        folder = self._sibling(finding.TEMPORARY, finding.step_folder_name(step))
        with _disk_errors(f"{folder}: could not be made"):
            self._filesystem.create_folder(folder)
        return folder

    def discard(self, folder: Path) -> None:
        """Remove a folder from `incoming`. What cannot be removed now, `clean` removes later."""
        with contextlib.suppress(OSError):
            self._filesystem.remove_folder(folder)

    def adopt(self, folder: Path, manifest: bytes, check: Callable[[VerifiedCheckpoint], None]) -> CheckpointRef:
        """Turn a folder from `incoming`, which holds every file but the manifest, into a checkpoint of this run.

        It is verified like one that is loaded, `check` may refuse it, and then it is put in place like one that is
        saved. The folder is gone afterwards, whatever happens. Errors: CheckpointCorrupt; what `check` raises;
        HybridError when the disk refuses.
        """
        try:
            with _disk_errors(f"{folder}: could not be put in place"):
                ref = self._adopt(folder, manifest, check)
        except BaseException:
            with contextlib.suppress(OSError):
                self._filesystem.remove_folder(folder)
            raise
        self._written[ref.path] = ref.state_hash
        self._parent, self._parent_known = ref.checkpoint_hash, True
        self._sequence = ref.sequence
        self._prune_after_save(ref.path)
        return ref

    def clean(self) -> tuple[Path, ...]:
        """Remove what an interrupted process left behind. For the one process that trains in this folder, at its
        start.

        A step whose replacement was interrupted between two renames gets its name back. Returns what was removed.
        """
        removed = []
        for status in self.list():
            step = finding.replaced_step(status.path)
            if status.status == "temporary" or (step is not None and status.status == "unfinished"):
                self._filesystem.remove_folder(status.path)
                removed.append(status.path)
            elif step is not None:
                self._filesystem.rename(status.path, self.folder / step)
                self._filesystem.sync_folder(self.folder)
        return tuple(removed)

    def prune(self, trusted: Path | None = None) -> tuple[Path, ...]:
        """Delete what retention does not keep; damaged and unfinished folders stay for someone to look at.

        trusted: a checkpoint known to be good. Without one, checkpoints are read from the newest on until one proves
        good, and none of those is deleted: the only good one is never lost. Returns what was removed.
        """
        if self._keep_last is None:
            return ()
        refs = [status.ref for status in self.list() if status.ref is not None]
        kept = {ref.path for ref in refs[-self._keep_last :]}
        if self._keep_every is not None:
            kept |= {ref.path for ref in refs if ref.step % self._keep_every == 0}
        if self._keep_hours is not None:
            kept |= _hours_apart(refs, self._keep_hours)
        if trusted is None or trusted not in kept:
            kept |= self._up_to_a_good_one(refs)
        removed = tuple(ref.path for ref in refs if ref.path not in kept)
        for path in removed:
            self._discard(path)
        return removed

    # --- how

    def _adopt(self, folder: Path, manifest: bytes, check: Callable[[VerifiedCheckpoint], None]) -> CheckpointRef:
        for path in sorted(folder.iterdir()):
            with path.open("r+b", buffering=0) as file:
                self._filesystem.sync_file(file)
        self._write_manifest(folder, manifest)
        whole = loading.examine(folder)
        if extra := loading.unlisted(folder, whole.manifest):
            raise CheckpointCorrupt(f"{folder}: the manifest does not list {', '.join(extra)}")
        check(whole)
        target = self.folder / finding.step_folder_name(whole.manifest.progress.step)
        if target.exists():
            try:
                loading.examine(target)
            except CheckpointNotFound:
                pass
            except CheckpointCorrupt:
                self._set_aside(target)
        self._put_in_place(folder, target)
        return CheckpointRef.of(target, whole.manifest)

    def _write(self, folder: Path, snapshot: CheckpointSnapshot) -> Manifest:
        files: dict[str, FileDigest] = {}
        tensors: dict[str, state.TensorDigests] = {}
        for name, arrays in ((manifests.MODEL_FILE, snapshot.model), (manifests.OPTIMIZER_FILE, snapshot.optimizer)):
            files[name], sha256 = self._write_tensors(folder / name, arrays)
            tensors[name] = {
                key: state.tensor_digest(safetensors.stored_dtype(key, array), array.shape, sha256[key])
                for key, array in arrays.items()
            }
        small = small_files(snapshot.model_config, snapshot.special_tokens, snapshot.tokenizer_json)
        for name, data in small.items():
            files[name] = self._write_bytes(folder / name, data)
        manifest = self._manifest(snapshot, files, tensors)
        data = manifest.render()
        try:
            manifest = manifests.parse(manifests.MANIFEST_NAME, data)
        except CheckpointCorrupt as error:
            raise HybridError(f"the snapshot cannot be saved, for nobody could load it: {error}") from error
        self._write_manifest(folder, data)
        return manifest

    def _write_manifest(self, folder: Path, data: bytes) -> None:
        with self._filesystem.create_file(folder / manifests.MANIFEST_NAME) as file:
            for block in self._filesystem.blocks(memoryview(data)):
                self._filesystem.write_manifest(file, block)
            self._filesystem.sync_file(file)
        self._filesystem.sync_folder(folder)

    def _manifest(
        self, snapshot: CheckpointSnapshot, files: dict[str, FileDigest], tensors: dict[str, state.TensorDigests]
    ) -> Manifest:
        parent, sequence = self._parent, self._sequence
        if sequence is None:
            refs = [status.ref for status in self.list() if status.ref is not None]
            sequence = max((ref.sequence for ref in refs), default=0)
            if not self._parent_known and refs:
                parent = refs[-1].checkpoint_hash
        return Manifest(
            progress=snapshot.progress,
            optimizer_step=snapshot.optimizer_step,
            scaler=dict(snapshot.scaler),
            seed=snapshot.seed,
            cursor=dict(snapshot.cursor),
            config=dict(snapshot.config),
            hashes=snapshot.hashes,
            fingerprints=snapshot.fingerprints,
            environment=dict(snapshot.environment),
            provenance=None if snapshot.provenance is None else dict(snapshot.provenance),
            lineage=Lineage(
                run_id=snapshot.run_id,
                sequence=sequence + 1,
                previous_checkpoint_hash=parent,
                runtime=snapshot.runtime,
            ),
            resume_audits=tuple(dict(audit) for audit in snapshot.resume_audits),
            session=dict(snapshot.session),
            files=files,
            timestamp_ms=int(self._clock() * 1000),
            state_hash=state.state_hash(
                tensors[manifests.MODEL_FILE],
                tensors[manifests.OPTIMIZER_FILE],
                optimizer_step=snapshot.optimizer_step,
                progress=snapshot.progress.to_json(),
                scaler=snapshot.scaler,
                cursor=snapshot.cursor,
            ),
        )

    def _write_tensors(
        self, path: Path, arrays: Mapping[str, safetensors.TensorArray | safetensors.LateTensor]
    ) -> tuple[FileDigest, dict[str, str]]:
        digester = Digester()
        with self._filesystem.create_file(path) as file:

            def sink(data: memoryview) -> None:
                digester.update(data)
                for block in self._filesystem.blocks(data):
                    self._filesystem.write_data(file, block)

            # `transformers` opens only files that declare this format.
            sha256 = safetensors.write(sink, arrays, {"format": "pt"})
            self._filesystem.sync_file(file)
        return digester.result(), sha256

    def _write_bytes(self, path: Path, data: bytes) -> FileDigest:
        digester = Digester()
        with self._filesystem.create_file(path) as file:
            digester.update(memoryview(data))
            for block in self._filesystem.blocks(memoryview(data)):
                self._filesystem.write_data(file, block)
            self._filesystem.sync_file(file)
        return digester.result()

    def _prune_after_save(self, target: Path) -> None:
        try:
            self.prune(trusted=target)
        except OSError as error:
            reason = error.strerror or error
            raise HybridError(f"{target} is saved, but older checkpoints could not be removed: {reason}") from error

    def _where(self, ref: CheckpointRef) -> Path:
        """The folder of a checkpoint that was found earlier; `clean` may have given it its name back since."""
        named = self.folder / finding.step_folder_name(ref.step)
        moved = (
            not ref.path.exists() and named.exists() and finding.read_ref(named).checkpoint_hash == ref.checkpoint_hash
        )
        return named if moved else ref.path

    def _holds(self, target: Path, snapshot: CheckpointSnapshot) -> bool:
        """Whether `target` already is a good checkpoint of this very state. A damaged one is set aside, never
        overwritten.
        """
        try:
            ref = finding.read_ref(target)
            if ref.state_hash != snapshot.state_hash() or ref.sequence < self._newest_sequence():
                return False  # after going back and training again, an old checkpoint of this state is not the newest
            if self._written.get(target) != ref.state_hash:
                loading.examine(target)
        except CheckpointNotFound:
            return False
        except CheckpointCorrupt:
            self._set_aside(target)
            return False
        return True

    def _set_aside(self, damaged: Path) -> None:
        self._filesystem.rename(damaged, self._sibling(finding.DAMAGED, damaged.name))
        self._filesystem.sync_folder(self.folder)

    def _newest_sequence(self) -> int:
        return max((status.ref.sequence for status in self.list() if status.ref is not None), default=0)

    def _put_in_place(self, temporary: Path, target: Path) -> None:
        """Rename into place. A folder that has the name (another history's save of this step, or an unfinished one)
        is renamed first and deleted last; until the name is taken again, it is still found under its other name.
        """
        replaced = None
        if target.exists():
            replaced = self._sibling(finding.REPLACED, target.name)
            self._filesystem.rename(target, replaced)
        self._filesystem.rename(temporary, target)
        self._filesystem.sync_folder(self.folder)
        if replaced is not None:
            self._discard(replaced)

    def _discard(self, path: Path) -> None:
        """Delete a folder so that a reader never sees half of it."""
        trash = self._sibling(finding.TRASH, path.name.lstrip("."))
        self._filesystem.rename(path, trash)
        self._written.pop(path, None)
        self._filesystem.remove_folder(trash)

    def _up_to_a_good_one(self, refs: Sequence[CheckpointRef]) -> set[Path]:
        tried: set[Path] = set()
        for ref in reversed(refs):
            tried.add(ref.path)
            try:
                loading.examine(ref.path)
            except (CheckpointCorrupt, CheckpointNotFound):
                continue
            break
        return tried

    def _sibling(self, prefix: str, name: str) -> Path:
        """A folder name nobody has yet: process and time make it unique across processes, a counter within this one."""
        self._names += 1
        return self.folder / f"{prefix}{name}-{os.getpid()}-{time.time_ns():x}-{self._names}"


def _hours_apart(refs: Sequence[CheckpointRef], hours: float) -> set[Path]:
    """The first, and each that is at least so many hours younger than the one before it in this set. What is left of
    them after deleting the others are the same ones."""
    kept: set[Path] = set()
    after = float("-inf")
    for ref in refs:
        if ref.timestamp_ms >= after:
            kept.add(ref.path)
            after = ref.timestamp_ms + hours * 3_600_000
    return kept


def small_files(
    model_config: ModelConfig, special_tokens: Mapping[str, int], tokenizer_json: str | None
) -> dict[str, bytes]:
    """The files of a checkpoint that are the same for the whole run: all but the tensors and the manifest."""
    config = huggingface.config_document(model_config, special_tokens)
    generation = huggingface.generation_document(special_tokens)
    files = {
        manifests.CONFIG_FILE: canonical.render(canonical.plain(config, manifests.CONFIG_FILE)),
        manifests.GENERATION_FILE: canonical.render(canonical.plain(generation, manifests.GENERATION_FILE)),
    }
    if tokenizer_json is not None:
        files[manifests.TOKENIZER_FILE] = tokenizer_json.encode("utf-8")
    return files


@contextlib.contextmanager
def _disk_errors(what: str) -> Iterator[None]:
    """An error of the disk as one of ours."""
    try:
        yield
    except OSError as error:
        raise HybridError(f"{what}: {error.strerror or error}; earlier checkpoints are untouched") from error
