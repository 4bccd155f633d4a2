"""The loop: resuming exactly, ending in the ways it may end, and what it leaves in the run folder."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

from hybrid.backends.protocol import TrainingSession
from hybrid.checkpoint.diff import show
from hybrid.checkpoint.filesystem import OsFilesystem
from hybrid.data.prepare import prepare
from hybrid.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    ConfigError,
    ContractMismatch,
    LimitExceeded,
    MissingDependency,
)
from hybrid.training.lock import locked
from hybrid.training.metrics_log import read_rows
from hybrid.training.view import Facts
from training.micro import Recorder, entries, micro_config, run, run_file, state_hash, steps_saved
from training.sessions import watched


def test_twenty_steps_are_ten_and_ten_are_five_five_and_ten(tmp_path: Path) -> None:
    run(tmp_path, run="whole")
    for name, parts in (("two", (10, 20)), ("three", (5, 10, 20))):
        for steps in parts:
            run(tmp_path, f"run.steps={steps}", run=name)
        assert state_hash(tmp_path, name) == state_hash(tmp_path, "whole")
    losses = [[row["total_loss"] for row in entries(tmp_path, name)] for name in ("whole", "two", "three")]
    assert losses[0] == losses[1] == losses[2], "bit for bit, with dropout"
    assert losses[0][-1] < losses[0][0], "and it learns"


def test_mixed_precision_resumes_exactly_too(tmp_path: Path) -> None:
    mixed = ("precision.type=mixed-f16", "lossScaling.growthInterval=3")
    run(tmp_path, *mixed, "run.steps=12", run="whole")
    for steps in (5, 12):
        run(tmp_path, *mixed, f"run.steps={steps}", run="parts")
    assert state_hash(tmp_path, "parts") == state_hash(tmp_path, "whole")
    assert [row["loss_scale"] for row in entries(tmp_path, "parts")] == [1024.0] * 3 + [2048.0] * 3 + [4096.0] * 3 + [
        8192.0
    ] * 3


def test_every_step_has_a_valid_entry_that_says_where_it_is(tmp_path: Path) -> None:
    run(tmp_path, "run.steps=6")
    rows = entries(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["optimizer_step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["scheduler_phase"] for row in rows] == ["warmup"] * 3 + ["cosine"] * 3
    assert [row["lr"] for row in rows[:3]] == [3e-3 * step / 3 for step in (1, 2, 3)]
    assert all(row["supervised_token_count"] + row["ignored_target_count"] == 4 * 16 for row in rows)
    assert all(row["gradient_norm_clipped"] <= 0.5 for row in rows)
    assert all(row["forward_ms"] > 0 and row["backward_ms"] > 0 for row in rows)
    assert all(row["forward_ms"] + row["backward_ms"] <= row["step_time_ms"] for row in rows)
    assert rows[-1]["progress_percent_complete"] == 100 and rows[-1]["progress_eta_ms"] == 0
    assert rows[0]["environment_metadata"]["runtime"] == "python" and rows[0]["kernel_path"] == "numpy-f32"


def test_epochs_and_batches_count_on_over_a_resume(tmp_path: Path) -> None:
    def places(name: str) -> list[tuple[int, int]]:
        return [(row["epoch"], row["batch"]) for row in entries(tmp_path, name)]

    small = ("data.maxBytes=900", "data.batchSize=20", "data.microbatchSize=10", "checkpoint.every=0")
    run(tmp_path, *small, "run.steps=4", run="whole")
    for steps in (2, 4):
        run(tmp_path, *small, f"run.steps={steps}", run="parts")
    assert places("whole") == places("parts")
    assert {epoch for epoch, _ in places("whole")} >= {0, 1}


def test_a_run_in_epochs_reads_every_sample_exactly_once_and_then_ends(tmp_path: Path) -> None:
    outcome = run(tmp_path, "data.maxBytes=2000", "run.steps=null", "data.batchSize=50", "data.microbatchSize=25")
    rows = entries(tmp_path)
    assert outcome.status == "finished" and len(rows) == outcome.steps
    assert rows[-1]["ignored_target_count"] > 0, "the last step is partly empty"
    targets = sum(row["supervised_token_count"] for row in rows)
    assert targets == prepare(micro_config(tmp_path, "data.maxBytes=2000").data).train.ledger.targets
    with pytest.raises(ContractMismatch, match=r"run\.epochs"):
        run(
            tmp_path,
            "data.maxBytes=2000",
            "run.steps=null",
            "run.epochs=2",
            "data.batchSize=50",
            "data.microbatchSize=25",
        )


def test_a_schedule_that_no_longer_fits_the_run_is_mentioned(tmp_path: Path) -> None:
    follows = ("schedule.totalSteps=null", "schedule.warmupSteps=4")
    for steps, mentioned in ((4, False), (4, False), (6, True)):
        view = Recorder()
        run(tmp_path, *follows, f"run.steps={steps}", view=view)
        assert any("the learning rate follows" in note["text"] for note in view.of("note")) is mentioned


def test_a_schedule_from_the_settings_of_the_run_folder_is_mentioned_too(tmp_path: Path) -> None:
    """They have the length that was found when the run began."""
    run(tmp_path, "schedule.totalSteps=null", "schedule.warmupSteps=1", "run.steps=4")
    for steps, mentioned in ((4, False), (6, True)):
        view = Recorder()
        run(tmp_path, "schedule.totalSteps=3", "schedule.warmupSteps=1", f"run.steps={steps}", view=view)
        notes = [note["text"] for note in view.of("note") if "the learning rate follows" in note["text"]]
        assert bool(notes) is mentioned
        assert all("a schedule of 4 steps" in note for note in notes)


def test_evaluation_and_samples_do_not_touch_the_training(tmp_path: Path) -> None:
    view = Recorder()
    run(tmp_path, "run.steps=8", run="plain")
    run(tmp_path, "run.steps=8", "evaluation.every=2", "sampling.every=3", run="watched", view=view)
    assert state_hash(tmp_path, "plain") == state_hash(tmp_path, "watched")
    plain, watched = entries(tmp_path, "plain"), entries(tmp_path, "watched")
    assert [row["total_loss"] for row in plain] == [row["total_loss"] for row in watched]
    rows = list(read_rows(tmp_path / "watched" / "validation.jsonl"))
    assert [row["step"] for row in rows] == [2, 4, 6, 8]
    assert rows[-1]["loss"] < rows[0]["loss"] and rows[0]["targetTokens"] == 2 * 2 * 16
    assert [facts["step"] for facts in view.of("sample")] == [3, 6, 8] and view.of("sample")[0]["text"]


def test_a_finished_run_says_so_and_a_larger_number_of_steps_goes_on(tmp_path: Path) -> None:
    run(tmp_path, "run.steps=5")
    before = run_file(tmp_path)
    view = Recorder()
    outcome = run(tmp_path, "run.steps=5", view=view)
    assert outcome.exit_code == 0 and "is finished: it is at step 5 of 5" in outcome.message
    assert "is finished: it is at step 5, beyond the 3 asked for" in run(tmp_path, "run.steps=3").message
    assert run_file(tmp_path) == before and len(entries(tmp_path)) == 5, "no step past the end, nothing changed"
    assert run(tmp_path, "run.steps=4").message.startswith(str(tmp_path)), "nor with fewer steps"
    assert run(tmp_path, "run.steps=7").step == 7 and len(entries(tmp_path)) == 7


def test_a_longer_run_that_never_begins_leaves_the_record_of_the_finished_one(tmp_path: Path) -> None:
    run(tmp_path, "run.steps=5")
    before = run_file(tmp_path)

    def no_device(*arguments: object) -> TrainingSession:
        raise LimitExceeded("no memory left")

    with pytest.raises(LimitExceeded):
        run(tmp_path, "run.steps=7", session=no_device)
    assert run_file(tmp_path) == before
    with pytest.raises(LimitExceeded):
        run(tmp_path, "run.steps=7", run="other", session=no_device)
    assert run_file(tmp_path, "other")["status"] == "failed", "where there was none, it says what became of it"


def test_what_is_not_installed_is_said_before_the_data_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid.training.sessions.find_spec", lambda name: None)
    for setting, package in (
        ("backend.name=torch", "torch"),
        ("telemetry.tensorboard=true", "tensorboard"),
        ("telemetry.wandb=true", "wandb"),
    ):
        view = Recorder()
        with pytest.raises(MissingDependency, match=rf"hybrid\[{package}\]"):
            run(tmp_path, setting, run=package, view=view)
        assert not view.of("phase")


def test_rows_after_the_checkpoint_are_cut_and_kept(tmp_path: Path) -> None:
    view = Recorder()

    def stop_dead(kind: str, facts: object) -> None:
        if kind == "sample":
            raise OSError("the machine was switched off")

    with pytest.raises(OSError, match="switched off"):
        run(tmp_path, "sampling.every=7", "evaluation.every=6", view=Recorder(stop_dead))
    assert run_file(tmp_path)["status"] == "failed"
    assert steps_saved(tmp_path) == [5] and len(entries(tmp_path)) == 7
    run(tmp_path, "run.steps=10", "evaluation.every=6", view=view)
    assert [row["step"] for row in entries(tmp_path)] == list(range(1, 11))
    assert [row["step"] for row in entries(tmp_path, name="metrics.discarded.jsonl")] == [6, 7]
    assert [row["step"] for row in read_rows(tmp_path / "run" / "validation.jsonl")] == [6, 10]
    assert [row["step"] for row in read_rows(tmp_path / "run" / "validation.discarded.jsonl")] == [6]
    assert any("moved 2 metrics rows after step 5" in facts["text"] for facts in view.of("note"))


def test_checkpoints_follow_their_cadence_and_zero_means_only_at_the_end(tmp_path: Path) -> None:
    run(tmp_path, "run.steps=7", "checkpoint.every=3", run="three")
    run(tmp_path, "run.steps=7", "checkpoint.every=0", run="none")
    run(tmp_path, "run.steps=9", "checkpoint.every=2", "checkpoint.keepLast=2", "checkpoint.keepEvery=4", run="kept")
    assert steps_saved(tmp_path, "three") == [3, 6, 7]
    assert steps_saved(tmp_path, "none") == [7]
    assert steps_saved(tmp_path, "kept") == [4, 8, 9]


def test_a_save_is_due_when_so_many_hours_have_passed(tmp_path: Path) -> None:
    """Each step takes half an hour."""
    seconds = 0.0

    def pass_time(method: str, step: int) -> bool:
        nonlocal seconds
        seconds = step * 1800.0 if method == "begin" else seconds
        return False

    settings = ("run.steps=7", "checkpoint.every=0", "checkpoint.everyHours=1")
    run(tmp_path, *settings, session=watched(pass_time), clocks={"clock": lambda: seconds})
    assert steps_saved(tmp_path) == [2, 4, 6, 7]


def test_keeping_every_so_many_of_all_is_a_contradiction(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.keepEvery = 4: with checkpoint\.keepLast = 0 all"):
        run(tmp_path, "checkpoint.keepLast=0", "checkpoint.keepEvery=4")
    with pytest.raises(ConfigError, match=r"checkpoint\.keepHours = 4\.0: with checkpoint\.keepLast = 0 all"):
        run(tmp_path, "checkpoint.keepLast=0", "checkpoint.keepHours=4")
    assert run_file(tmp_path)["status"] == "failed" and not steps_saved(tmp_path)


def test_a_changed_setting_is_refused_with_a_table_and_can_be_accepted_with_a_reason(tmp_path: Path) -> None:
    run(tmp_path, "run.steps=5")
    before = run_file(tmp_path)
    with pytest.raises(ContractMismatch) as refused:
        run(tmp_path, "run.steps=8", "optimizer.lr=0.1", "data.batchSize=2")
    assert refused.value.exit_code == 3
    assert ("contract.optimizer.lr", 0.003, 0.1) in refused.value.differences
    assert "contract.data.batchSize" in str(refused.value) and "saved" in str(refused.value)
    assert run_file(tmp_path) == before, "a refusal leaves the run as it was"
    with pytest.raises(ContractMismatch):
        run(
            tmp_path, "run.steps=8", "optimizer.lr=0.1", "data.batchSize=2", accepted=("optimizer.lr",), reason="faster"
        )
    run(tmp_path, "run.steps=8", "optimizer.lr=0.1", accepted=("optimizer.lr",), reason="faster")
    run(tmp_path, "run.steps=9", "optimizer.lr=0.1")  # accepted once, it is part of the lineage
    audits = show(tmp_path / "run")["manifest"]["resumeAudits"]
    assert [(a["field"], a["saved"], a["current"], a["reason"]) for a in audits] == [
        ("contract.optimizer.lr", 0.003, 0.1, "faster")
    ]


def test_changed_data_is_refused(tmp_path: Path) -> None:
    run(tmp_path, "run.steps=5")
    (tmp_path / "corpus.txt").write_text("other words " * 4000)
    with pytest.raises(ContractMismatch, match=r"dataset\.fingerprint"):
        run(tmp_path, "run.steps=8")


@pytest.mark.parametrize(
    ("accepted", "reason"),
    [(("optimizer.lr",), None), (("optimizer.lr",), " "), ((), "why not"), (("optimizer.eps",), "typo")],
)
def test_an_acceptance_needs_a_reason_and_a_difference(tmp_path: Path, accepted: tuple[str, ...], reason: str) -> None:
    run(tmp_path, "run.steps=2")
    with pytest.raises(ConfigError):
        run(tmp_path, "run.steps=4", "optimizer.lr=0.1", accepted=accepted, reason=reason)


def test_what_does_not_change_the_trajectory_may_differ_at_a_resume(tmp_path: Path) -> None:
    run(tmp_path, "run.steps=4")
    run(
        tmp_path,
        "run.steps=6",
        "telemetry.windowSize=2",
        "run.logEvery=1",
        "checkpoint.every=1",
        "data.microbatchSize=4",
    )
    assert len(entries(tmp_path)) == 6


def test_an_unreadable_checkpoint_is_never_taken_for_none(tmp_path: Path) -> None:
    run(tmp_path, "run.steps=5")
    manifest = tmp_path / "run" / "checkpoints" / "step-00000005" / "checkpoint.json"
    data = bytearray(manifest.read_bytes())
    data[len(data) // 2] ^= 1
    manifest.write_bytes(data)
    with pytest.raises(CheckpointCorrupt):
        run(tmp_path, "run.steps=8")
    with pytest.raises(CheckpointNotFound):
        run(tmp_path, "run.steps=8", run="other", resume=tmp_path / "nowhere")


def test_resume_never_wants_a_folder_without_checkpoints(tmp_path: Path) -> None:
    run(tmp_path, "run.steps=2", resume="never")
    with pytest.raises(ConfigError, match="already holds checkpoints"):
        run(tmp_path, "run.steps=2", resume="never")


def test_a_checkpoint_begins_a_branch_in_another_folder(tmp_path: Path) -> None:
    run(tmp_path, "run.steps=10", run="main")
    origin = tmp_path / "main" / "checkpoints" / "step-00000005"
    run(tmp_path, "run.steps=8", run="branch", resume=origin)
    assert [row["step"] for row in entries(tmp_path, "branch")] == [6, 7, 8]
    assert entries(tmp_path, "main")[5]["total_loss"] == entries(tmp_path, "branch")[0]["total_loss"]
    assert run_file(tmp_path, "branch")["resumedFrom"]["step"] == 5
    assert run_file(tmp_path, "branch")["runId"] == run_file(tmp_path, "main")["runId"]
    run(tmp_path, "run.steps=10", run="branch", resume=origin)
    assert state_hash(tmp_path, "branch") == state_hash(tmp_path, "main"), "started again, the branch goes on"
    with pytest.raises(ConfigError, match="do not come from"):
        run(tmp_path, "run.steps=12", run="branch", resume=tmp_path / "main" / "checkpoints" / "step-00000010")


def test_going_back_to_an_older_checkpoint_of_the_same_run(tmp_path: Path) -> None:
    run(tmp_path, "run.steps=10")
    whole = state_hash(tmp_path)
    run(tmp_path, "run.steps=7", resume=tmp_path / "run" / "checkpoints" / "step-00000005")
    run(tmp_path, "run.steps=10")
    assert state_hash(tmp_path) == whole
    assert [row["step"] for row in entries(tmp_path)] == list(range(1, 11))
    assert [row["step"] for row in entries(tmp_path, name="metrics.discarded.jsonl")] == [6, 7, 8, 9, 10]


def test_the_run_folder_says_what_runs_and_how_it_ended(tmp_path: Path) -> None:
    run(tmp_path, "run.steps=4")
    facts = run_file(tmp_path)
    assert facts["status"] == "finished" and facts["step"] == facts["steps"] == 4
    assert facts["config"]["model"]["vocabularySize"] == 256 and facts["config"]["optimizer"]["lr"] == 0.003
    assert set(facts["fingerprints"]) == {"dataset", "tokenizer", "contract"}
    assert all(len(value) == 64 for value in facts["hashes"].values())
    assert facts["backend"]["backend"] == "reference" and facts["createdAt"] <= facts["updatedAt"]
    svg = (tmp_path / "run" / "loss.svg").read_text()
    assert svg.startswith("<svg") and "<polyline" in svg


def test_one_folder_has_one_process(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with locked(tmp_path / "run"), pytest.raises(ConfigError, match="another process is training in this folder"):
        run(tmp_path, "run.steps=1")
    assert run(tmp_path, "run.steps=1").status == "finished"


def test_the_collector_is_off_in_the_loop_and_on_afterwards(tmp_path: Path) -> None:
    seen: list[bool] = []
    view = Recorder(lambda kind, facts: seen.append(gc.isenabled()) if kind == "step" else None)
    run(tmp_path, "run.steps=4", view=view)
    assert seen == [False] and gc.isenabled() and gc.get_freeze_count() == 0


def test_garbage_in_a_circle_is_freed_at_saves_where_nothing_is_evaluated(tmp_path: Path) -> None:
    class Knot:
        pass

    tied: list[weakref.ref[Knot]] = []
    left: list[int] = []

    def at(kind: str, facts: Facts) -> None:
        if kind == "step":
            knot = Knot()
            knot.itself = knot  # type: ignore[attr-defined]
            tied.append(weakref.ref(knot))
        elif kind == "checkpoint":
            left.append(sum(ref() is not None for ref in tied))

    run(tmp_path, "run.steps=10", "run.logEvery=1", "checkpoint.every=5", view=Recorder(at))
    assert len(tied) == 10 and left[-1] == 0, "a run that only saves would keep it all"


def test_a_slow_disk_saves_the_same_states_while_training_goes_on(tmp_path: Path) -> None:
    run(tmp_path, "run.steps=20", run="fast")
    meanwhile: list[tuple[str, object]] = []
    size = sum(file.stat().st_size for file in (tmp_path / "fast" / "checkpoints" / "step-00000005").iterdir())

    def watch(kind: str, facts: dict[str, object]) -> None:
        if kind in ("step", "checkpoint"):
            meanwhile.append((kind, facts["step"]))

    view = Recorder(watch)
    run(tmp_path, "run.steps=20", "run.logEvery=1", run="slow", view=view, filesystem=OsFilesystem(size / 0.3))
    assert meanwhile.index(("step", 8)) < meanwhile.index(("checkpoint", 5)), (
        "a save takes 0.3 s, a few steps much less"
    )
    for step in (5, 10, 15, 20):
        folder = f"checkpoints/step-{step:08d}"
        assert state_hash(tmp_path, f"slow/{folder}") == state_hash(tmp_path, f"fast/{folder}")
