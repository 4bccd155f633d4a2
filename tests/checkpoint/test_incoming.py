"""A checkpoint that was made elsewhere becomes one of the run only when all of it is right."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from checkpoint import examples
from hybrid.checkpoint.finding import newest
from hybrid.checkpoint.loading import LoadedCheckpoint
from hybrid.checkpoint.manifest import MANIFEST_NAME
from hybrid.checkpoint.store import CheckpointStore
from hybrid.errors import CheckpointCorrupt, HybridError


def store(path: Path, **settings: int) -> CheckpointStore:
    return CheckpointStore(path / "run", clock=examples.clock, filesystem=examples.Unsynced(), **settings)


def arrived(kept: CheckpointStore, elsewhere: Path, step: int = 5) -> tuple[Path, bytes]:
    """A folder that holds a foreign checkpoint without its manifest, and the manifest."""
    made = CheckpointStore(elsewhere, clock=examples.clock, filesystem=examples.Unsynced())
    source = made.save(examples.snapshot(step=step))
    folder = kept.incoming(step)
    for path in source.iterdir():
        if path.name != MANIFEST_NAME:
            shutil.copy(path, folder / path.name)
    return folder, (source / MANIFEST_NAME).read_bytes()


def trust(loaded: LoadedCheckpoint) -> None:
    return None


def test_a_whole_one_is_put_in_place_and_counts(tmp_path: Path) -> None:
    kept = store(tmp_path)
    folder, manifest = arrived(kept, tmp_path / "elsewhere")
    assert newest(kept.folder) is None, "not before it is adopted"
    ref = kept.adopt(folder, manifest, trust)
    assert ref == kept.latest() and ref.path.name == "step-00000005"
    assert [path.name for path in kept.folder.iterdir()] == ["step-00000005"]
    following = kept.load(kept.save(examples.snapshot(step=6))).manifest.lineage
    assert (following.sequence, following.previous_checkpoint_hash) == (2, ref.checkpoint_hash)


def test_older_ones_are_pruned_as_after_a_save(tmp_path: Path) -> None:
    kept = store(tmp_path, keep_last=1)
    kept.save(examples.snapshot(step=3))
    folder, manifest = arrived(kept, tmp_path / "elsewhere")
    kept.adopt(folder, manifest, trust)
    assert [status.step for status in kept.list()] == [5]


@pytest.mark.parametrize("fault", ["a flipped bit", "half a file", "a missing file", "a file too many", "refused"])
def test_nothing_is_left_of_one_that_is_not_right(tmp_path: Path, fault: str) -> None:
    kept = store(tmp_path)
    before = kept.save(examples.snapshot(step=3))
    folder, manifest = arrived(kept, tmp_path / "elsewhere")
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    if fault == "a flipped bit":
        weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif fault == "half a file":
        weights.write_bytes(data[: len(data) // 2])
    elif fault == "a missing file":
        weights.unlink()
    elif fault == "a file too many":
        (folder / "more.bin").write_bytes(b"")

    def check(loaded: LoadedCheckpoint) -> None:
        if fault == "refused":
            raise CheckpointCorrupt("not this one")

    with pytest.raises(CheckpointCorrupt):
        kept.adopt(folder, manifest, check)
    assert list(kept.folder.iterdir()) == [before]


def test_a_damaged_one_of_the_same_step_is_set_aside(tmp_path: Path) -> None:
    kept = store(tmp_path)
    (kept.save(examples.snapshot(step=5)) / "model.safetensors").write_bytes(b"")
    folder, manifest = arrived(kept, tmp_path / "elsewhere")
    kept.adopt(folder, manifest, trust)
    names = sorted(path.name for path in kept.folder.iterdir())
    assert names[0].startswith("damaged-step-00000005-") and names[1:] == ["step-00000005"]


def test_a_disk_that_refuses_is_a_failure_with_a_reason(tmp_path: Path) -> None:
    kept = store(tmp_path)
    folder, manifest = arrived(kept, tmp_path / "elsewhere")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(HybridError, match="could not be put in place: Is a directory"):
        kept.adopt(folder, manifest, trust)
    assert list(kept.folder.iterdir()) == []
