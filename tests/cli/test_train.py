"""`hybrid train` from the command line: where it runs, what it prints, how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybrid.checkpoint import finding
from hybrid.cli.main import main
from training.micro import config_file, entries, run_file, state_hash, steps_saved


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYBRID_CACHE", str(tmp_path / "cache"))
    config_file(tmp_path)
    return tmp_path


def train(*words: str) -> int:
    return main(["train", "micro.json", *words])


def test_json_mode_prints_json_lines_and_nothing_else(here: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "hybrid",
        "train",
        "micro.json",
        "--steps",
        "6",
        "--json",
        "--set",
        "sampling.every=3",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(isinstance(event, dict) and isinstance(event["event"], str) for event in events)
    assert events[-1]["event"] == "end" and events[-1]["exitCode"] == 0 and events[-1]["status"] == "finished"
    assert done.stderr == ""


def test_an_error_in_json_mode_is_an_event_as_well(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--steps", "2") == 0
    capsys.readouterr()
    assert train("--steps", "4", "--json", "--set", "optimizer.lr=1.0") == 3
    out, err = capsys.readouterr()
    last = json.loads(out.splitlines()[-1])
    assert (last["event"], last["error"], last["exitCode"]) == ("error", "ContractMismatch", 3)
    assert last["differences"] == [["contract.optimizer.lr", 0.003, 1.0]]
    assert "contract.optimizer.lr" in err
    assert train("--json", "--preset", "x") == 2
    assert json.loads(capsys.readouterr().out)["error"] == "ConfigError"


def test_what_the_machine_refuses_is_an_event_too(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "file").write_text("")
    assert train("--json", "--run-dir", "file/run") == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["event"] == "error" and json.loads(out)["exitCode"] == 1
    assert err.startswith("hybrid: file") and "internal error" not in err


@pytest.mark.parametrize("option", ["--run-dir", "--resume"])
def test_an_empty_path_is_not_the_current_folder(here: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(here.iterdir())
    assert train(option, "") == 2
    assert capsys.readouterr().err.startswith(f"hybrid: argument {option}: expected a path, got an empty text")
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_a_file_is_no_run_folder(here: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    (here / "README.md").write_text("")
    assert train("--run-dir", "README.md", *words) == 2
    assert "README.md is a file: expected a folder" in capsys.readouterr().err


def test_a_run_can_be_named_from_within(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train("--steps", "2") == 0
    monkeypatch.chdir(here / "runs" / "micro" / "checkpoints" / "step-00000002")
    assert main(["train", "--resume", ".", "--steps", "3"]) == 0
    assert run_file(here / "runs", "micro")["step"] == 3


def test_text_that_is_not_utf8_is_refused_before_it_reaches_a_file(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python makes half a surrogate pair of such a byte, which could not be saved minutes later."""
    assert train("--set", "sampling.prompt=\udcff", "--steps", "1") == 2
    assert "configuration key sampling.prompt = " in capsys.readouterr().err
    assert train("--steps", "1") == 0
    change = ["--accept-change", "run.seed", "--reason", "\udcff"]
    assert train("--steps", "2", "--seed", "7", *change) == 2
    assert "hybrid: --reason '\\udcff': expected a text of whole characters" in capsys.readouterr().err
    assert state_hash(here, "runs/micro") and steps_saved(here, "runs/micro") == [1]


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"format": "hybrid.run", "version": 1, "config": 5}'])
def test_a_run_file_that_makes_no_sense_is_a_usage_error(here: Path, text: str) -> None:
    (here / "run").mkdir()
    (here / "run" / "run.json").write_text(text)
    assert main(["train", "--run-dir", "run"]) == 2


def test_a_refusal_shows_the_table_and_how_to_go_on(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train("--steps", "2")
    capsys.readouterr()
    assert train("--steps", "4", "--set", "optimizer.lr=1.0", "--seed", "7") == 3
    err = capsys.readouterr().err
    lines = [" ".join(line.split()) for line in err.splitlines()]
    assert (
        "field saved current" in lines
        and "contract.optimizer.lr 0.003 1" in lines
        and "contract.run.seed 1337 7" in lines
    )
    assert "--accept-change FIELD --reason TEXT" in err
    change = ["--accept-change", "optimizer.lr", "--accept-change", "contract.run.seed"]
    assert train("--steps", "4", "--set", "optimizer.lr=1.0", "--seed", "7", *change, "--reason", "a try") == 0


def test_the_same_command_goes_on_where_the_run_stopped(here: Path) -> None:
    assert train("--steps", "3") == 0
    assert train("--steps", "5") == 0
    assert len(entries(here, "runs/micro")) == 5
    assert train("--steps", "5") == 0 and len(entries(here, "runs/micro")) == 5


def test_a_run_folder_alone_is_enough_to_go_on(here: Path) -> None:
    assert train("--steps", "3", "--run-dir", "a", "--set", "model.width=32") == 0
    assert main(["train", "--run-dir", "a", "--steps", "5"]) == 0
    assert main(["train", "--resume", "a", "--steps", "6"]) == 0
    assert run_file(here, "a")["config"]["model"]["width"] == 32 and run_file(here, "a")["step"] == 6


def test_resume_never_begins_beside_the_old_run(here: Path) -> None:
    for _ in range(2):
        assert train("--steps", "2", "--resume", "never") == 0
    assert sorted(path.name for path in (here / "runs").iterdir()) == ["micro", "micro-2"]
    assert run_file(here, "runs/micro")["runId"] != run_file(here, "runs/micro-2")["runId"]
    assert state_hash(here, "runs/micro") == state_hash(here, "runs/micro-2"), "the same run, twice"


def test_resume_from_an_older_checkpoint_makes_a_branch(here: Path) -> None:
    assert train("--steps", "7") == 0
    assert main(["train", "--resume", "runs/micro/checkpoints/step-00000005", "--steps", "9"]) == 0
    assert steps_saved(here, "runs/micro-from-5") == [9] and steps_saved(here, "runs/micro") == [5, 7]
    assert main(["train", "--resume", "runs/micro/checkpoints/step-00000007", "--steps", "9"]) == 0
    assert steps_saved(here, "runs/micro") == [5, 7, 9], "the newest one goes on in place"
    assert state_hash(here, "runs/micro") == state_hash(here, "runs/micro-from-5")


def test_a_packed_checkpoint_goes_on_in_a_run_of_its_own(here: Path) -> None:
    """To the same state, in a folder that the same command finds again."""
    assert train("--steps", "8") == 0
    assert main(["checkpoint", "pack", "runs/micro/checkpoints/step-00000005", "a.hybrid"]) == 0
    packed = finding.resolve(here / "a.hybrid")
    for steps in (6, 7, 8):
        assert main(["train", "--resume", "a.hybrid", "--steps", str(steps)]) == 0
        assert steps_saved(here, "runs/a-from-5")[-1] == steps
        parent = run_file(here, "runs/a-from-5")["branchedFrom"]
        assert parent["checkpointHash"] == packed.checkpoint_hash
        assert parent["path"] == str(here / "a.hybrid"), "not the folder that it was unpacked into for a while"
    assert state_hash(here, "runs/a-from-5") == state_hash(here, "runs/micro")


def test_a_dry_run_checks_everything_and_trains_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--dry-run") == 0
    assert "all checks passed; nothing was trained" in capsys.readouterr().out
    assert not (here / "runs").exists()
    train("--steps", "3")
    before = run_file(here, "runs/micro")
    capsys.readouterr()
    assert train("--dry-run", "--json") == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["event"] == "dry-run" and (facts["step"], facts["steps"]) == (3, 20)
    assert facts["memory"]["total"] > 4 * 4 * facts["parameters"], "weights, gradients and two moments"
    assert facts["data"]["train"]["ledger"]["rows"] > 1000 and facts["resumesFrom"]["step"] == 3
    assert train("--dry-run", "--set", "optimizer.lr=1.0") == 3
    assert train("--dry-run", "--set", "data.source=nowhere.txt") == 3
    assert train("--dry-run", "--set", "model.width=17") == 2
    assert run_file(here, "runs/micro") == before


def test_a_dry_run_of_a_large_model_says_what_it_needs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("model.layers=8", "model.width=2048", "model.heads=16", "model.kvHeads=16", "model.feedForwardWidth=5472")
    words = [word for setting in (*shape, "backend.name=webgpu", "model.dropout=0") for word in ("--set", setting)]
    assert train("--dry-run", "--json", *words) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["parameters"] == 403_736_576 and facts["memory"]["total"] > 16 * facts["parameters"]
    assert train("--dry-run", *words) == 0
    assert "memory: 6." in capsys.readouterr().out


def test_a_size_that_nothing_can_hold_is_refused_before_anything_is_built(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--set", "model.width=1048576", "--set", "model.layers=1000") == 1
    assert "model.layers = 1000, model.width = 1048576" in capsys.readouterr().err
    assert not (here / "cache").exists()


def test_an_alert_exits_with_4(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alerts = ("enabled=true", "failOnAlert=true", "thresholds.maxGradientNorm=1e-9")
    words = [word for alert in alerts for word in ("--set", f"telemetry.alerts.{alert}")]
    assert train(*words) == 4
    assert capsys.readouterr().err == "hybrid: training telemetry alert(s): max_gradient_norm_exceeded at step 1.\n"


def test_a_damaged_checkpoint_exits_with_3_and_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train("--steps", "2")
    model = here / "runs" / "micro" / "checkpoints" / "step-00000002" / "model.safetensors"
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    model.write_bytes(data)
    capsys.readouterr()
    assert train("--steps", "4") == 3
    assert "model.safetensors" in capsys.readouterr().err


def test_the_events_are_documented(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8").split("## `train --json`")[1]
    documented = {line.split("|")[1].strip(" `"): line for line in table.splitlines() if line.startswith("| `")}
    train("--steps", "5", "--json", "--set", "evaluation.every=5", "--set", "sampling.every=5")
    train("--steps", "7", "--json", "--dry-run")
    train("--steps", "7", "--json", "--seed", "5")
    for line in capsys.readouterr().out.splitlines():
        event = json.loads(line)
        row = documented[event.pop("event")]
        assert [key for key in event if f"`{key}`" not in row] == [], row


@pytest.mark.parametrize("reader", ["head -1", 'grep -m1 \'"event": "step"\''])
def test_a_reader_that_has_seen_enough_stops_the_run_and_nothing_is_lost(here: Path, reader: str) -> None:
    train_it = f"'{sys.executable}' -m hybrid train micro.json --run-dir run --json"
    command = f"{train_it} --steps 1000000 --set run.logEvery=1 | {reader} > read; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "75\n" and "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr
    assert len((here / "read").read_text().splitlines()) == 1
    facts = run_file(here)
    step = facts.get("step", 0)
    assert facts["status"] == "stopped" and (step > 0) == reader.startswith("grep")
    if step:
        assert "nobody reads the output any more" in facts["message"]
        assert finding.resolve(here / "run").step == step == len(entries(here))
    assert train("--run-dir", "run", "--steps", str(step + 2)) == 0
    assert len(entries(here)) == step + 2
