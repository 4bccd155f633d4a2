"""A store saves whole checkpoints, finds the newest, keeps what retention promises, and never mistakes damage for
absence.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint import examples
from hybrid.checkpoint import finding, safetensors
from hybrid.checkpoint import manifest as manifests
from hybrid.checkpoint.filesystem import OsFilesystem
from hybrid.checkpoint.store import CheckpointStore
from hybrid.errors import CheckpointCorrupt, CheckpointNotFound, ConfigError, HybridError


def store(path: Path, **settings: Any) -> CheckpointStore:
    return CheckpointStore(path / "run", **{"clock": examples.clock, "filesystem": examples.Unsynced(), **settings})


def steps(kept: CheckpointStore) -> list[int | None]:
    return [status.step for status in kept.list()]


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    saved = examples.snapshot(step=500)
    path = store(tmp_path).save(saved)
    assert path == tmp_path / "run" / "checkpoints" / "step-00000500"
    loaded = store(tmp_path).load(path)
    assert examples.same(loaded.model, saved.model) and examples.same(loaded.optimizer, saved.optimizer)
    assert loaded.model_config == saved.model_config
    assert loaded.tokenizer_json == saved.tokenizer_json
    manifest = loaded.manifest
    assert manifest.progress == saved.progress and manifest.optimizer_step == 499
    assert manifest.scaler == saved.scaler and manifest.cursor == saved.cursor and manifest.session == saved.session
    assert manifest.config == saved.config and manifest.seed == 1337
    assert manifest.hashes == saved.hashes and manifest.fingerprints == saved.fingerprints
    assert manifest.environment == saved.environment and manifest.provenance == saved.provenance
    assert manifest.timestamp_ms == 1_700_000_000_250
    assert manifest.state_hash == saved.state_hash()
    assert all(array.flags.writeable and array.flags.owndata for array in loaded.model.values() if array.base is None)


def test_the_folder_holds_the_files_and_nothing_else(tmp_path: Path) -> None:
    path = store(tmp_path).save(examples.snapshot())
    assert sorted(p.name for p in path.iterdir()) == [
        "checkpoint.json", "config.json", "generation_config.json", "model.safetensors", "optimizer.safetensors",
        "tokenizer.json",
    ]  # fmt: skip
    assert [p.name for p in path.parent.iterdir()] == ["step-00000005"]
    without = store(tmp_path).save(examples.snapshot(step=6, tokenizer_json=None))
    assert not (without / "tokenizer.json").exists()
    assert store(tmp_path).load(without).tokenizer_json is None


def test_a_file_has_exactly_the_bytes_of_its_tensors(tmp_path: Path) -> None:
    """A view is not saved with what lies behind it, and a tied table is one tensor."""
    saved = examples.snapshot()
    views = {name: np.concatenate([array, array])[: len(array)] for name, array in saved.model.items()}
    path = store(tmp_path).save(replace(saved, model=views)) / "model.safetensors"
    header = safetensors.read_header(path)
    assert "lm_head.weight" not in {entry.name for entry in header.entries}
    assert path.stat().st_size == header.data_start + 4 * sum(array.size for array in saved.model.values())


def test_the_state_hash_is_of_the_state_and_of_nothing_else(tmp_path: Path) -> None:
    base = examples.snapshot()
    elsewhere = replace(
        base, runtime="webgpu", environment={}, run_id="other", session={}, config={}, tokenizer_json=None
    )
    assert elsewhere.state_hash() == base.state_hash()
    nudged = {**base.model, "model.norm.weight": np.nextafter(base.model["model.norm.weight"], np.float32(9))}
    for changed in (
        replace(base, model=nudged),
        replace(
            base,
            optimizer={**base.optimizer, "moment1/model.norm.weight": -base.optimizer["moment1/model.norm.weight"]},
        ),
        replace(base, optimizer_step=99),
        replace(base, progress=replace(base.progress, target_tokens=1)),
        replace(base, scaler={"scale": 1.0}),
        replace(base, cursor={"sample": 0}),
    ):
        assert changed.state_hash() != base.state_hash()


def test_equal_states_have_equal_checkpoint_hashes_whenever_they_are_saved(tmp_path: Path) -> None:
    a = CheckpointStore(tmp_path / "a", clock=lambda: 1.0)
    b = CheckpointStore(tmp_path / "b", clock=lambda: 2.0)
    first, second = (s.load(s.save(examples.snapshot())).manifest for s in (a, b))
    assert first.checkpoint_hash == second.checkpoint_hash and first.timestamp_ms != second.timestamp_ms


def test_the_chain_of_checkpoints_is_linked(tmp_path: Path) -> None:
    first = store(tmp_path)
    manifests_ = [first.load(first.save(examples.snapshot(step))).manifest for step in (1, 2)]
    again = store(tmp_path)  # a new process
    manifests_.append(again.load(again.save(examples.snapshot(3))).manifest)
    assert [m.lineage.sequence for m in manifests_] == [1, 2, 3]
    assert [m.lineage.previous_checkpoint_hash for m in manifests_] == [
        None, manifests_[0].checkpoint_hash, manifests_[1].checkpoint_hash,
    ]  # fmt: skip


def test_after_going_back_the_newest_is_of_the_new_history(tmp_path: Path) -> None:
    """Not the largest step: that one belongs to a history that was given up."""
    kept = store(tmp_path)
    kept.save(examples.snapshot(300))
    kept.save(examples.snapshot(500))
    again = store(tmp_path)
    back = again.load(again.folder / "step-00000300")
    again.continue_from(back)
    again.save(examples.snapshot(350, seed=1))
    newest = again.latest()
    assert newest is not None and (newest.step, newest.sequence) == (350, 3)
    assert again.load(newest).manifest.lineage.previous_checkpoint_hash == back.manifest.checkpoint_hash


def test_the_same_step_is_not_saved_twice(tmp_path: Path) -> None:
    kept = store(tmp_path)
    path = kept.save(examples.snapshot())
    before = (path / "checkpoint.json").stat()
    assert kept.save(examples.snapshot()) == path == store(tmp_path).save(examples.snapshot())
    after = (path / "checkpoint.json").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_another_state_of_the_same_step_replaces_it(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.save(examples.snapshot(5, seed=1))
    path = kept.save(examples.snapshot(5, seed=2))
    assert kept.load(path).manifest.state_hash == examples.snapshot(5, seed=2).state_hash()
    assert [p.name for p in kept.folder.iterdir()] == ["step-00000005"]


def test_a_damaged_checkpoint_of_the_step_is_set_aside_not_overwritten(tmp_path: Path) -> None:
    path = store(tmp_path).save(examples.snapshot())
    examples.flip(path / "model.safetensors", -1)
    damaged = (path / "model.safetensors").read_bytes()
    kept = store(tmp_path)
    assert kept.save(examples.snapshot()) == path
    assert kept.load(path).manifest.state_hash == examples.snapshot().state_hash()
    (aside,) = (status for status in kept.list() if status.status == "set aside")
    assert (aside.path / "model.safetensors").read_bytes() == damaged
    assert kept.latest() is not None


# --- finding


def test_absent_unfinished_and_damaged_are_different(tmp_path: Path) -> None:
    kept = store(tmp_path)
    assert kept.latest() is None and kept.list() == ()
    with pytest.raises(CheckpointNotFound, match="no such run or checkpoint"):
        finding.resolve(tmp_path / "run")
    first, second = kept.save(examples.snapshot(1)), kept.save(examples.snapshot(2))

    (second / "checkpoint.json").rename(tmp_path / "taken")  # as if its save had not finished
    newest = kept.latest()
    assert newest is not None and newest.path == first
    with pytest.raises(CheckpointNotFound, match="its save never finished"):
        kept.load(second)

    (second / "checkpoint.json").write_text("{}")
    with pytest.raises(CheckpointCorrupt, match=r"step-00000002.*cannot be used.*resume from .*step-00000001 by name"):
        kept.latest()
    assert [status.status for status in kept.list()] == ["damaged", "complete"]


def test_an_unreadable_folder_is_no_empty_one(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.run_dir.mkdir()
    kept.folder.write_text("not a folder")
    with pytest.raises(CheckpointCorrupt, match="cannot be listed"):
        kept.latest()


def test_a_damaged_older_checkpoint_does_not_stand_in_the_way(tmp_path: Path) -> None:
    kept = store(tmp_path)
    first = kept.save(examples.snapshot(1))
    kept.save(examples.snapshot(2))
    (first / "model.safetensors").unlink()
    newest = kept.latest()
    assert newest is not None and newest.step == 2


def test_temporary_and_foreign_folders_are_ignored(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.save(examples.snapshot(1))
    for name in (".tmp-step-00000009-1", ".trash-step-00000009-1", "step-9", "notes", "step-00000009x"):
        (kept.folder / name).mkdir()
    (kept.folder / "step-00000010").write_text("a file")
    newest = kept.latest()
    assert newest is not None and newest.step == 1
    assert {status.status for status in kept.list()} == {"temporary", "complete"}


def test_a_path_names_a_run_its_checkpoints_or_one_of_them(tmp_path: Path) -> None:
    kept = store(tmp_path)
    one, two = kept.save(examples.snapshot(1)), kept.save(examples.snapshot(2))
    assert finding.resolve(kept.run_dir) == finding.resolve(kept.folder) == finding.resolve(two)
    assert finding.resolve(one).step == 1
    copied = one.rename(tmp_path / "the best")
    assert finding.resolve(copied).step == 1
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFound, match="no finished checkpoint here"):
        finding.resolve(tmp_path / "empty")
    with pytest.raises(CheckpointNotFound, match=f"here; name a run, such as .*{kept.run_dir.name}"):
        finding.resolve(kept.run_dir.parent)
    with pytest.raises(CheckpointNotFound, match="a file; expected a run folder"):
        finding.resolve(copied / "config.json")


def test_a_step_folder_with_another_step_inside_is_refused(tmp_path: Path) -> None:
    kept = store(tmp_path)
    path = kept.save(examples.snapshot(1)).rename(kept.folder / "step-00000002")
    with pytest.raises(CheckpointCorrupt, match=r"progress\.step is 1, but the folder says 2"):
        kept.load(path)


# --- retention


def test_the_newest_are_kept_and_every_so_many_steps(tmp_path: Path) -> None:
    kept = store(tmp_path, keep_last=2, keep_every=10)
    for step in range(5, 36, 5):
        kept.save(examples.snapshot(step))
    assert steps(kept) == [10, 20, 30, 35]
    assert store(tmp_path).prune() == ()


def test_checkpoints_that_are_hours_apart_are_kept(tmp_path: Path) -> None:
    """One an hour: every half hour one is saved, and once the clock stands still for six."""
    hours = [0.0, 0.5, 1.0, 1.5, 2.1, 2.6, 3.0, 3.1, 9.1, 9.6]
    now = iter(hours)
    kept = CheckpointStore(
        tmp_path, keep_last=1, keep_hours=1.0, filesystem=examples.Unsynced(), clock=lambda: 1e9 + 3600 * next(now)
    )
    for step in range(1, len(hours) + 1):
        kept.save(examples.snapshot(step))
    assert steps(kept) == [1, 3, 5, 8, 9, 10]
    with pytest.raises(ConfigError, match="keep_hours is 0"):
        CheckpointStore(tmp_path, keep_hours=0.0)


def test_retention_never_deletes_the_only_good_checkpoint(tmp_path: Path) -> None:
    kept = store(tmp_path)
    paths = [kept.save(examples.snapshot(step)) for step in (1, 2, 3)]
    for path in paths[1:]:
        examples.flip(path / "optimizer.safetensors", -1)
    assert store(tmp_path, keep_last=1).prune() == ()
    kept.load(paths[0])
    kept.save(examples.snapshot(4))
    assert store(tmp_path, keep_last=1).prune() == tuple(paths)


def test_retention_leaves_damaged_and_unfinished_folders_to_a_person(tmp_path: Path) -> None:
    kept = store(tmp_path, keep_last=1)
    damaged = kept.save(examples.snapshot(1))
    (damaged / "checkpoint.json").write_text("?")
    unfinished = kept.folder / "step-00000002"
    unfinished.mkdir()
    kept.save(examples.snapshot(3))
    kept.save(examples.snapshot(4))
    assert steps(kept) == [1, 2, 4]


def test_settings_that_would_keep_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep_last is 0"):
        store(tmp_path, keep_last=0)
    with pytest.raises(ConfigError, match="keep_every is 0"):
        store(tmp_path, keep_every=0)


# --- interruptions


def test_leftovers_are_cleaned_and_finished_checkpoints_are_not(tmp_path: Path) -> None:
    kept = store(tmp_path)
    path = kept.save(examples.snapshot(1))
    leftovers = [kept.folder / ".tmp-step-00000002-7-1", kept.folder / ".trash-step-00000003-7-1"]
    for leftover in leftovers:
        leftover.mkdir()
        (leftover / "model.safetensors").write_bytes(b"half")
    assert sorted(kept.clean()) == sorted(leftovers)
    assert list(kept.folder.iterdir()) == [path]


def test_between_the_renames_of_a_replacement_the_old_save_is_still_found(tmp_path: Path) -> None:
    kept = store(tmp_path)
    path = kept.save(examples.snapshot(4))
    path.rename(kept.folder / ".replaced-step-00000004-77-1")
    newest = kept.latest()
    assert newest is not None and kept.load(newest).manifest.progress.step == 4
    kept.clean()
    assert kept.load(newest).path == path, "it has its name back, and is found by its old one"
    newest = kept.latest()
    assert newest is not None and newest.path == path


def test_an_unfinished_folder_of_the_step_makes_way(tmp_path: Path) -> None:
    kept = store(tmp_path)
    (kept.folder / "step-00000005").mkdir(parents=True)
    (kept.folder / "step-00000005" / "model.safetensors").write_bytes(b"half")
    kept.load(kept.save(examples.snapshot(5)))
    assert [p.name for p in kept.folder.iterdir()] == ["step-00000005"]


class FullDisk(OsFilesystem):
    """No room after `room` bytes."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def write_data(self, file: Any, block: memoryview) -> None:
        self.room -= len(block)
        if self.room < 0:
            raise OSError(28, "No space left on device")
        super().write_data(file, block)


def test_a_full_disk_is_an_error_that_leaves_nothing_behind(tmp_path: Path) -> None:
    first = store(tmp_path).save(examples.snapshot(1))
    full = store(tmp_path, filesystem=FullDisk(room=5000))
    with pytest.raises(HybridError, match="step-00000002: could not be saved: No space left on device; earlier"):
        full.save(examples.snapshot(2))
    assert list(full.folder.iterdir()) == [first]
    full._filesystem = OsFilesystem()
    full.save(examples.snapshot(2))


def test_a_wrong_snapshot_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    good = examples.snapshot()
    norm = good.model["model.norm.weight"]
    wrong = {
        "lacks the tensor 'model.norm.weight'": {n: a for n, a in good.model.items() if n != "model.norm.weight"},
        "has the tensor 'extra'": {**good.model, "extra": norm},
        "'model.norm.weight' has shape (2, 2)": {**good.model, "model.norm.weight": norm.reshape(2, 2)},
        "'model.norm.weight' is float64": {**good.model, "model.norm.weight": norm.astype(np.float64)},
    }
    for message, model in wrong.items():
        with pytest.raises(HybridError) as caught:
            store(tmp_path).save(replace(good, model=model))
        assert message in str(caught.value)
    with pytest.raises(HybridError, match="optimizer tensor 'moment1/nothing'"):
        store(tmp_path).save(replace(good, optimizer={"moment1/nothing": norm}))
    assert not (tmp_path / "run").exists()
    with pytest.raises(HybridError, match=r"manifest\.seed is 9007199254740993: JSON carries integers exactly"):
        store(tmp_path).save(replace(good, seed=2**53 + 1))
    with pytest.raises(HybridError, match="runId is '': expected a text"):
        store(tmp_path).save(replace(good, run_id=""))
    assert store(tmp_path).list() == ()


KEYS = st.text(max_size=6)
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
JSON_OBJECTS = st.dictionaries(KEYS, JSON_VALUES, max_size=4)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(session=JSON_OBJECTS, scaler=JSON_OBJECTS, config=JSON_OBJECTS, step=st.integers(1, 10**10))
def test_every_value_that_json_can_carry_survives(
    tmp_path_factory: pytest.TempPathFactory, session: Any, scaler: Any, config: Any, step: int
) -> None:
    kept = CheckpointStore(tmp_path_factory.mktemp("run"), filesystem=examples.Unsynced())
    saved = replace(examples.snapshot(5), session=session, scaler=scaler, config=config)
    saved = replace(saved, progress=replace(saved.progress, step=step))
    loaded = kept.load(kept.save(saved)).manifest
    assert (loaded.session, loaded.scaler, loaded.config) == (session, scaler, config)
    text = (kept.folder / finding.step_folder_name(step) / manifests.MANIFEST_NAME).read_bytes()
    assert loaded.render() == text
    assert json.loads(text)["checkpointHash"] == loaded.checkpoint_hash
