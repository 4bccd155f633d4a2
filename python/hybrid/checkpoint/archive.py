"""`*.hybrid`: a checkpoint folder as one uncompressed zip, to carry a run from one place to another."""

from __future__ import annotations

import dataclasses
import os
import shutil
import stat
import tempfile
import zipfile
from pathlib import Path
from typing import BinaryIO, Final

from hybrid.checkpoint import loading
from hybrid.checkpoint.filesystem import fresh
from hybrid.checkpoint.loading import VerifiedCheckpoint
from hybrid.checkpoint.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, parse
from hybrid.checkpoint.safetensors import open_regular
from hybrid.checkpoint.zip_entries import Entry, read_content, read_entries
from hybrid.errors import CheckpointCorrupt, CheckpointNotFound

SUFFIX: Final = ".hybrid"

_BLOCK_BYTES = 1024 * 1024
_FIRST_DAY = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip can say: equal folders give equal archives


def pack(folder: Path, archive: Path) -> Manifest:
    """Write the checkpoint in `folder`, which is verified first, into the file `archive`, which must not exist.

    Errors: CheckpointNotFound, CheckpointCorrupt; HybridError when the archive exists or the disk refuses.
    """
    manifest = loading.examine(folder).manifest
    with fresh(archive) as temporary, zipfile.ZipFile(temporary, "x", zipfile.ZIP_STORED) as target:
        for name in (MANIFEST_NAME, *sorted(manifest.files)):
            info = zipfile.ZipInfo(name, _FIRST_DAY)
            info.create_system = 3
            info.external_attr = (stat.S_IFREG | 0o644) << 16
            info.file_size = (folder / name).stat().st_size
            with open_regular(folder / name, str(folder / name)) as source, target.open(info, "w") as sink:
                shutil.copyfileobj(source, sink, _BLOCK_BYTES)
    return manifest


def unpack(archive: Path, folder: Path) -> Manifest:
    """Make the folder `folder`, which must not exist, of the checkpoint in an archive. Every byte is verified.

    Errors: as `unpack_whole`.
    """
    return unpack_whole(archive, folder).manifest


def unpack_whole(archive: Path, folder: Path) -> VerifiedCheckpoint:
    """The same, and all that is known of the checkpoint then. It takes a few megabytes of memory, whatever its size.

    Errors: CheckpointNotFound if there is no such archive; CheckpointCorrupt for a damaged or hostile one;
    HybridError when the folder exists or the disk refuses.
    """
    source = str(archive)
    with open_regular(archive, source) as stream:
        entries = {entry.name: entry for entry in read_entries(source, stream)}
        with fresh(folder) as temporary:
            temporary.mkdir()
            for name in (MANIFEST_NAME, *_manifest(source, stream, entries).files):
                if name not in entries:
                    raise CheckpointCorrupt(f"{source}/{name}: the manifest lists this file, but it is missing")
                with (temporary / name).open("xb") as file:
                    for block in read_content(source, stream, entries[name]):
                        file.write(block)
                    file.flush()
                    os.fsync(file.fileno())
            try:
                return dataclasses.replace(loading.examine(temporary), path=folder)
            except CheckpointCorrupt as error:
                raise CheckpointCorrupt(str(error).replace(str(temporary), source)) from error


def as_folder(archive: Path) -> Path:
    """The checkpoint in an archive as a folder, for as long as this process runs. Errors: as `unpack`."""
    status = archive.stat()
    key = (str(archive.resolve()), status.st_size, status.st_mtime_ns)
    if key not in _unpacked:
        place = tempfile.TemporaryDirectory(prefix="hybrid-")
        unpack(archive, Path(place.name) / archive.name)
        _unpacked[key] = place
    return Path(_unpacked[key].name) / archive.name


# The folders vanish with their objects, at the latest when the process ends.
_unpacked: dict[tuple[str, int, int], tempfile.TemporaryDirectory[str]] = {}


def origin(folder: Path) -> Path:
    """The archive that a folder of `as_folder` came from; any other path is its own."""
    for (archive, _, _), place in _unpacked.items():
        if folder.parent == Path(place.name):
            return Path(archive)
    return folder


def is_archive(path: Path) -> bool:
    """Whether `path` is a file that is named like an archive."""
    return path.suffix == SUFFIX and path.is_file()


def _manifest(source: str, stream: BinaryIO, entries: dict[str, Entry]) -> Manifest:
    entry = entries.get(MANIFEST_NAME)
    if entry is None:
        raise CheckpointNotFound(f"{source}: no {MANIFEST_NAME}: its save never finished, or it is no checkpoint")
    if entry.size > MAX_MANIFEST_BYTES:
        raise CheckpointCorrupt(f"{source}/{MANIFEST_NAME}: more than {MAX_MANIFEST_BYTES} bytes")
    return parse(f"{source}/{MANIFEST_NAME}", b"".join(read_content(source, stream, entry)))
