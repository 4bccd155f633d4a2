"""A packed checkpoint is one file that unpacks to the same bytes; what is damaged or hostile is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from checkpoint import examples, zips
from hybrid.checkpoint import archive, finding, loading
from hybrid.checkpoint.store import CheckpointStore
from hybrid.checkpoint.zip_entries import read_entries
from hybrid.errors import CheckpointCorrupt, CheckpointNotFound, HybridError
from training import micro


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = CheckpointStore(tmp_path_factory.mktemp("run"), clock=examples.clock, filesystem=examples.Unsynced())
    return store.save(examples.snapshot())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_unpacking_gives_the_files_that_were_packed(checkpoint: Path, tmp_path: Path) -> None:
    packed = tmp_path / "a.hybrid"
    manifest = archive.pack(checkpoint, packed)
    assert archive.unpack(packed, tmp_path / "step-00000005") == manifest
    assert contents(tmp_path / "step-00000005") == contents(checkpoint)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.hybrid", "step-00000005"]


def test_an_archive_is_an_ordinary_zip_without_compression(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("a.hybrid", "b.hybrid"):
        archive.pack(checkpoint, tmp_path / name)
    with zipfile.ZipFile(tmp_path / "a.hybrid") as opened:
        assert opened.testzip() is None
        assert {name: opened.read(name) for name in opened.namelist()} == contents(checkpoint)
        assert {info.compress_type for info in opened.infolist()} == {zipfile.ZIP_STORED}
    assert (tmp_path / "a.hybrid").read_bytes() == (tmp_path / "b.hybrid").read_bytes()


def test_nothing_is_overwritten(checkpoint: Path, tmp_path: Path) -> None:
    archive.pack(checkpoint, tmp_path / "a.hybrid")
    with pytest.raises(HybridError, match=r"a\.hybrid is there already"):
        archive.pack(checkpoint, tmp_path / "a.hybrid")
    with pytest.raises(HybridError, match="is there already"):
        archive.unpack(tmp_path / "a.hybrid", checkpoint)


def test_a_damaged_checkpoint_is_not_packed(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, data in contents(checkpoint).items():
        (copy / name).write_bytes(data)
    examples.flip(copy / "model.safetensors", -1)
    with pytest.raises(CheckpointCorrupt, match=r"model\.safetensors"):
        archive.pack(copy, tmp_path / "a.hybrid")
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


FILES = {"checkpoint.json": b"{}\n", "config.json": b"[1, 2, 3]" * 9, "empty": b""}


@pytest.mark.parametrize(
    ("data", "message"), [pytest.param(data, message, id=name) for name, data, message in zips.damaged(FILES)]
)
def test_a_hostile_archive_is_refused_and_leaves_nothing(tmp_path: Path, data: bytes, message: str) -> None:
    packed = tmp_path / "a.hybrid"
    packed.write_bytes(data)
    with pytest.raises(CheckpointCorrupt) as caught:
        archive.unpack(packed, tmp_path / "out")
    assert message in str(caught.value) and "a.hybrid" in str(caught.value)
    assert list(tmp_path.iterdir()) == [packed]


def test_a_flipped_byte_of_an_archive_is_refused_or_means_nothing(checkpoint: Path, tmp_path: Path) -> None:
    """Times, versions and attributes are not looked at; everything else that changes is an error. (A sample.)"""
    packed = tmp_path / "a.hybrid"
    archive.pack(checkpoint, packed)
    good = packed.read_bytes()
    with packed.open("rb") as stream:
        inside = {at for entry in read_entries("a", stream) for at in range(entry.start, entry.start + entry.size)}
    outside = [at for at in range(len(good)) if at not in inside]
    refused = 0
    for at in outside[::4] + sorted(inside)[::997]:
        packed.write_bytes(good[:at] + bytes([good[at] ^ 0x41]) + good[at + 1 :])
        try:
            archive.unpack(packed, tmp_path / "out")
        except (CheckpointCorrupt, CheckpointNotFound):
            refused += 1
        else:
            assert contents(tmp_path / "out") == contents(checkpoint)
            assert at not in inside
            for path in (tmp_path / "out").iterdir():
                path.unlink()
            (tmp_path / "out").rmdir()
    assert refused > len(outside) // 8


def test_large_files_are_found_through_zip64(tmp_path: Path) -> None:
    """`zipfile` writes such headers when it is told that a file may become large."""
    packed = tmp_path / "a.zip"
    zips.forced_zip64(packed, {"big": b"12345"})
    with packed.open("rb") as stream:
        (entry,) = read_entries("a", stream)
        stream.seek(entry.start)
        assert (entry.name, stream.read(entry.size)) == ("big", b"12345")


def test_an_archive_without_a_checkpoint_holds_none(tmp_path: Path) -> None:
    (tmp_path / "a.hybrid").write_bytes(zips.archive({"notes.txt": b"hello"}))
    with pytest.raises(CheckpointNotFound, match=r"a\.hybrid: no checkpoint\.json"):
        archive.unpack(tmp_path / "a.hybrid", tmp_path / "out")
    with pytest.raises(CheckpointNotFound, match="there is no such file"):
        archive.unpack(tmp_path / "b.hybrid", tmp_path / "out")


def test_an_archive_is_a_checkpoint_for_every_command(checkpoint: Path, tmp_path: Path) -> None:
    packed = tmp_path / "a.hybrid"
    archive.pack(checkpoint, packed)
    ref = finding.resolve(packed)
    assert ref.step == 5 and finding.resolve(packed) == ref
    assert loading.load(ref.path).manifest.checkpoint_hash == ref.checkpoint_hash
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(CheckpointNotFound, match=r"a file; expected a run folder, a checkpoint folder or \*\.hybrid"):
        finding.resolve(tmp_path / "a.txt")


def command(folder: Path, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "hybrid", "checkpoint", *arguments], cwd=folder, capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


def test_the_checkpoint_of_a_run_is_verified_in_its_archive(tmp_path: Path) -> None:
    micro.run(tmp_path, "run.steps=1")
    assert command(tmp_path, "pack", "run", "run.hybrid")[0] == 0
    code, out, _ = command(tmp_path, "verify", "run.hybrid")
    assert code == 0 and "every byte is what was saved, and all of it agrees" in out


def test_the_commands_pack_and_unpack(checkpoint: Path, tmp_path: Path) -> None:
    run = str(checkpoint.parent.parent)
    code, out, _ = command(tmp_path, "pack", run)
    name = f"{checkpoint.parent.parent.name}-step-00000005"
    assert (code, out) == (0, f"{name}.hybrid: the checkpoint of step 5, every byte verified\n")
    code, out, _ = command(tmp_path, "unpack", f"{name}.hybrid", "there", "--json")
    assert code == 0 and json.loads(out)["path"] == "there"
    assert contents(tmp_path / "there") == contents(checkpoint)
    code, _, error = command(tmp_path, "verify", f"{name}.hybrid")
    assert code == 3 and "checkpoint.json: config: " in error, "whole, but no run saved it"
    code, out, _ = command(tmp_path, "show", f"{name}.hybrid", "--json")
    assert code == 0 and json.loads(out)["path"] == f"{name}.hybrid", "not the folder where it is read"
    (tmp_path / "bad.hybrid").write_bytes(b"no archive of a checkpoint")
    code, _, error = command(tmp_path, "unpack", "bad.hybrid")
    assert code == 3 and "bad.hybrid: does not end like a packed checkpoint" in error
