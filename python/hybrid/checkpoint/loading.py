"""From a checkpoint folder to a state: everything is verified before anything is returned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from hybrid.checkpoint import digests, huggingface, safetensors, state, strict_json
from hybrid.checkpoint import manifest as manifests
from hybrid.checkpoint.manifest import CONFIG_FILE, MODEL_FILE, OPTIMIZER_FILE, TOKENIZER_FILE, Manifest
from hybrid.checkpoint.snapshot import tensor_problems
from hybrid.errors import CheckpointCorrupt, CheckpointNotFound
from hybrid.models.config import ModelConfig
from hybrid.models.parameters import parameter_specs

_MAX_CONFIG_BYTES = 16 * 1024 * 1024
_SLOT_DTYPE = "F32"
_GROUPS = {"model": MODEL_FILE, "optimizer": OPTIMIZER_FILE}


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A checkpoint that is whole: every byte of it was read and checked."""

    path: Path
    manifest: Manifest
    model_config: ModelConfig
    tokenizer_json: str | None


@dataclass(frozen=True)
class LoadedCheckpoint(VerifiedCheckpoint):
    """A checkpoint in memory. `model` and `optimizer` are as in `CheckpointSnapshot`; the arrays belong to the
    caller.
    """

    model: dict[str, NDArray[np.float32]]
    optimizer: dict[str, NDArray[np.float32]]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder, its own hashes verified, its files present with the right sizes.

    Errors: CheckpointNotFound if there is no manifest (then there is no checkpoint); CheckpointCorrupt for all else.
    """
    path = folder / manifests.MANIFEST_NAME
    try:
        stream = safetensors.open_regular(path, str(path))
    except CheckpointNotFound:
        problem = "its save never finished, or it is no checkpoint" if folder.exists() else "there is no such folder"
        raise CheckpointNotFound(f"{folder}: no {manifests.MANIFEST_NAME}: {problem}") from None
    with stream:
        data = _read_all(str(path), stream, manifests.MAX_MANIFEST_BYTES)
    manifest = manifests.parse(str(path), data)
    for name, digest in manifest.files.items():
        file = folder / name
        try:
            size = file.stat().st_size
        except FileNotFoundError:
            raise CheckpointCorrupt(f"{file}: the manifest lists this file, but it is missing") from None
        except OSError as error:
            raise CheckpointCorrupt(f"{file}: cannot be read: {error.strerror or error}") from error
        if size != digest.size:
            raise CheckpointCorrupt(f"{file}: {size} bytes, but the manifest says {digest.size}: cut or changed")
    return manifest


def load(folder: Path, verify: bool = True) -> LoadedCheckpoint:
    """Read a checkpoint and check it whole.

    Every byte of every listed file is hashed, the state hash is recomputed, and names, dtypes and shapes of all
    tensors are compared with the model of config.json. Without `verify` nothing is hashed; the structure is still
    checked.

    Errors: CheckpointNotFound, CheckpointCorrupt naming file and fault.
    """
    manifest = read_manifest(folder)
    with _listed_files():
        small = _small_files(folder, manifest, verify)
        model, optimizer = (
            safetensors.read_file(folder / name, manifest.files[name] if verify else None)
            for name in (MODEL_FILE, OPTIMIZER_FILE)
        )
    whole = _checked(folder, manifest, small, model, optimizer, verify)
    return LoadedCheckpoint(
        path=folder,
        manifest=manifest,
        model_config=whole.model_config,
        tokenizer_json=whole.tokenizer_json,
        model=model.tensors,
        optimizer=optimizer.tensors,
    )


def examine(folder: Path) -> VerifiedCheckpoint:
    """All that `load` checks, in a few megabytes of memory however large the checkpoint is. Errors: as `load`."""
    manifest = read_manifest(folder)
    with _listed_files():
        small = _small_files(folder, manifest, True)
        model, optimizer = (
            safetensors.scan_file(folder / name, manifest.files[name]) for name in (MODEL_FILE, OPTIMIZER_FILE)
        )
    return _checked(folder, manifest, small, model, optimizer, True)


class CheckpointStream:
    """A checkpoint whose tensors are read one after the other, so that a process never holds them all.

    about: the checkpoint; everything is verified but the tensors. names: the tensors in the order in which they come,
    each with its group ("model" or "optimizer"); exactly those of the model, in its shapes. Errors: as `load`.
    """

    def __init__(self, folder: Path) -> None:
        manifest = read_manifest(folder)
        with _listed_files():
            self._small = _small_files(folder, manifest, True)
            headers = {group: safetensors.read_header(folder / name) for group, name in _GROUPS.items()}
        stored = [
            safetensors.ScannedFile(header, {}, manifest.files[_GROUPS[group]]) for group, header in headers.items()
        ]
        self.about = _checked(folder, manifest, self._small, stored[0], stored[1], False)
        self.names = [(group, entry.name) for group, header in headers.items() for entry in header.entries]

    def pour(self, take: Callable[[str, str, NDArray[np.float32]], None]) -> None:
        """Give every tensor to `take`, with its group and name. Whether all of them are what the manifest says turns
        out behind the last one: CheckpointCorrupt then, as at any moment before.
        """
        folder, manifest = self.about.path, self.about.manifest
        with _listed_files():
            found = [
                safetensors.pour_file(folder / name, manifest.files[name], partial(take, group))
                for group, name in _GROUPS.items()
            ]
        _checked(folder, manifest, self._small, found[0], found[1], True)


def unlisted(folder: Path, manifest: Manifest) -> list[str]:
    """Names in the folder that the manifest does not list: never read, and worth a mention."""
    known = {manifests.MANIFEST_NAME, *manifest.files}
    return sorted(path.name for path in folder.iterdir() if path.name not in known)


def _small_files(folder: Path, manifest: Manifest, verify: bool) -> dict[str, bytes]:
    return {
        name: _read_small(folder / name, digest, verify)
        for name, digest in manifest.files.items()
        if name not in (MODEL_FILE, OPTIMIZER_FILE)
    }


def _checked(
    folder: Path,
    manifest: Manifest,
    small: dict[str, bytes],
    model: safetensors.ScannedFile,
    optimizer: safetensors.ScannedFile,
    verify: bool,
) -> VerifiedCheckpoint:
    """What the files say together, compared with each other and, with `verify`, with the state hash."""
    config_path = folder / CONFIG_FILE
    model_config = huggingface.model_config(str(config_path), _parse_json(str(config_path), small[CONFIG_FILE]))
    _check_tensors(folder, model, optimizer, model_config)
    if verify:
        found = state.state_hash(
            state.digests_of_file(model),
            state.digests_of_file(optimizer),
            optimizer_step=manifest.optimizer_step,
            progress=manifest.progress.to_json(),
            scaler=manifest.scaler,
            cursor=manifest.cursor,
        )
        if found != manifest.state_hash:
            raise CheckpointCorrupt(
                f"{folder / manifests.MANIFEST_NAME}: stateHash is {manifest.state_hash}, but the files hold {found}"
            )
    tokenizer = small.get(TOKENIZER_FILE)
    return VerifiedCheckpoint(
        path=folder,
        manifest=manifest,
        model_config=model_config,
        tokenizer_json=None if tokenizer is None else _decode(str(folder / TOKENIZER_FILE), tokenizer),
    )


def _check_tensors(
    folder: Path, model: safetensors.ScannedFile, optimizer: safetensors.ScannedFile, model_config: ModelConfig
) -> None:
    for name, file in ((MODEL_FILE, model), (OPTIMIZER_FILE, optimizer)):
        for entry in file.header.entries:
            if entry.dtype != _SLOT_DTYPE:
                raise CheckpointCorrupt(
                    f"{folder / name}: tensor {entry.name!r} is {entry.dtype}, expected {_SLOT_DTYPE}"
                )
    expected = {spec.name: spec.shape for spec in parameter_specs(model_config)}
    stored = [{entry.name: entry for entry in file.header.entries} for file in (model, optimizer)]
    for problem in tensor_problems(str(folder), stored[0], stored[1], expected):
        raise CheckpointCorrupt(problem)


def _read_small(path: Path, expected: digests.FileDigest, verify: bool) -> bytes:
    with safetensors.open_regular(path, str(path)) as stream:
        data = _read_all(str(path), stream, expected.size)
    if verify:
        digests.expect(str(path), digests.digest_bytes(data), expected)
    return data


def _read_all(source: str, stream: BinaryIO, limit: int) -> bytes:
    """Everything up to `limit` bytes; one byte more is an error, so an endless file cannot fill the memory."""
    parts: list[bytes] = []
    size = 0
    try:
        while part := stream.read(min(limit + 1 - size, 1024 * 1024)):
            parts.append(part)
            size += len(part)
            if size > limit:
                raise CheckpointCorrupt(f"{source}: more than {limit} bytes")
    except OSError as error:
        raise CheckpointCorrupt(f"{source}: cannot be read: {error.strerror or error}") from error
    return b"".join(parts)


def read_json(path: Path) -> Any:
    """The value of a JSON file of moderate size. Errors: CheckpointNotFound, CheckpointCorrupt."""
    with safetensors.open_regular(path, str(path)) as stream:
        return _parse_json(str(path), _read_all(str(path), stream, _MAX_CONFIG_BYTES))


def _parse_json(source: str, data: bytes) -> Any:
    if len(data) > _MAX_CONFIG_BYTES:
        raise CheckpointCorrupt(f"{source}: {len(data)} bytes; at most {_MAX_CONFIG_BYTES} are read")
    try:
        return strict_json.parse(data)
    except strict_json.StrictJsonError as error:
        raise CheckpointCorrupt(f"{source}: {error}") from error


def _decode(source: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointCorrupt(f"{source}: not UTF-8 at byte {error.start}") from error


@contextmanager
def _listed_files() -> Iterator[None]:
    """A file that is gone although the manifest lists it is damage, not absence."""
    try:
        yield
    except CheckpointNotFound as error:
        raise CheckpointCorrupt(f"{error}, but the manifest lists it") from error
