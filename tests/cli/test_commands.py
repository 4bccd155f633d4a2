"""sample, eval, data, checkpoint and doctor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybrid.cli.commands import doctor
from hybrid.cli.main import main
from hybrid.training.metrics_log import read_rows
from training.micro import config_file, run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of ten steps in `run`."""
    folder = tmp_path_factory.mktemp("trained")
    run(folder, "run.steps=10", "evaluation.every=10", "evaluation.batches=0")
    return folder


def output(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(words) == code
    return capsys.readouterr().out


def document(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    out = output(capsys, *words, "--json")
    assert len(out.splitlines()) == 1
    return json.loads(out)


def test_a_sample_is_the_same_for_the_same_seed(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("sample", str(trained / "run"), "--prompt", "the tensor", "--tokens", "30")
    first = output(capsys, *words, "--seed", "1")
    assert first.startswith("the tensor") and len(first) > 20
    assert output(capsys, *words, "--seed", "1") == first != output(capsys, *words, "--seed", "2")
    greedy = [output(capsys, *words, "--temperature", "0", "--seed", seed) for seed in "12"]
    assert greedy[0] == greedy[1] == output(capsys, *words, "--top-k", "1") == output(capsys, *words, "--top-p", "1e-9")


def test_a_sample_as_json(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = trained / "run" / "checkpoints" / "step-00000005"
    report = document(capsys, "sample", str(path), "--tokens", "5")
    assert report["step"] == 5 and report["tokens"] == 5 and report["prompt"] == "the "
    assert document(capsys, "sample", str(path), "--prompt", "", "--tokens", "3")["tokens"] == 3


def test_eval_repeats_the_validation_of_the_run(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = list(read_rows(trained / "run" / "validation.jsonl"))[-1]
    report = document(capsys, "eval", str(trained / "run"))
    assert {key: report[key] for key in ("loss", "targetTokens", "step")} == {
        key: row[key] for key in ("loss", "targetTokens", "step")
    }
    assert report["bitsPerToken"] == pytest.approx(report["loss"] / 0.6931471805599453)
    earlier = document(capsys, "eval", str(trained / "run" / "checkpoints" / "step-00000005"), "--batches", "2")
    assert earlier["loss"] > report["loss"] and earlier["targetTokens"] == 2 * 2 * 16
    assert "step 10, train: loss " in output(capsys, "eval", str(trained / "run"), "--split", "train", "--batches", "1")


def test_eval_says_when_the_data_is_another(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.txt"
    other.write_text("something else " * 300)
    assert main(["eval", str(trained / "run"), "--set", f"data.source={other}"]) == 0
    assert "not what the run was trained on" in capsys.readouterr().err
    words = ["eval", str(trained / "run"), "--set", f"data.source={other}", "--set", "data.tokenizer.type=characters"]
    assert main(words) == 2
    assert "another tokenizer" in capsys.readouterr().err


def test_eval_cannot_change_the_model(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(trained / "run"), "--set", "model.width=32"]) == 2
    assert capsys.readouterr().err.startswith("hybrid: model.width = 32: the saved model has 16, ")
    assert main(["eval", str(trained / "run"), "--set", "model.width=16", "--batches", "1"]) == 0


@pytest.mark.parametrize("command", ["sample", "eval"])
def test_a_run_that_is_not_there_is_an_error(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(tmp_path / "nowhere")]) == 1
    assert "there is no such run or checkpoint" in capsys.readouterr().err


def test_a_store_is_built_verified_and_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, store = tmp_path / "text.txt", tmp_path / "store"
    text.write_text("to be or not to be " * 500)
    report = document(capsys, "data", "build", str(store), "--source", str(text), "--tokenizer", "characters")
    assert report["tokens"] == 19 * 500 and report["vocabularySize"] == len(set("to be or not to be "))
    assert "every byte is what was written" in output(capsys, "data", "verify", str(store))
    assert "9,500 tokens" in output(capsys, "data", "inspect", str(store), "--sequence-length", "32")
    assert main(["data", "build", str(store), "--source", str(text)]) == 3, "it is there already"
    assert "exists already" in capsys.readouterr().err
    output(capsys, "data", "build", str(store), "--source", str(text), "--replace")
    tokens = store / "tokens.bin"
    data = bytearray(tokens.read_bytes())
    data[100] ^= 1
    tokens.write_bytes(data)
    assert main(["data", "verify", str(store)]) == 3
    assert "tokens.bin" in capsys.readouterr().err


def test_a_store_can_be_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = config_file(tmp_path)
    output(capsys, "data", "build", str(tmp_path / "store"), "--config", str(file))
    words = ("train", str(file), "--set", f"data.store={tmp_path / 'store'}", "--run-dir", str(tmp_path / "run"))
    output(capsys, *words, "--steps", "2")


def test_checkpoints_are_shown_verified_listed_and_compared(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained / "run"
    five, ten = (str(folder / "checkpoints" / f"step-{step:08d}") for step in (5, 10))
    assert document(capsys, "checkpoint", "show", five)["manifest"]["progress"]["step"] == 5
    shown = output(capsys, "checkpoint", "show", str(folder))
    assert "step " in shown and "stateHash" in shown and "made by reference" in shown
    tensors = document(capsys, "checkpoint", "show", five)["tensors"]["model.safetensors"]
    assert f" in {len(tensors)} tensors\n" in shown, "of the parameters; the moments are not theirs"
    assert "every byte is what was saved" in output(capsys, "checkpoint", "verify", ten)
    assert [entry["step"] for entry in document(capsys, "checkpoint", "list", str(folder))] == [5, 10]
    assert "complete" in output(capsys, "checkpoint", "list", str(folder))
    assert output(capsys, "checkpoint", "diff", five, five).strip() == "same state"
    difference = output(capsys, "checkpoint", "diff", five, ten)
    assert (
        difference.startswith("different states")
        and "progress.step" in difference
        and "model.safetensors" in difference
    )
    differ = document(capsys, "checkpoint", "diff", five, ten)
    assert differ["same_state"] is False
    assert f"  model.safetensors: {len(differ['tensors']['model.safetensors'])} differ, by " in difference
    assert main(["checkpoint", "verify", str(folder / "nowhere")]) == 1
    assert output(capsys, "checkpoint", "list", str(trained)) == f"{trained}: no checkpoints\n"


def test_long_work_is_one_line_on_a_terminal_and_nothing_elsewhere(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["eval", str(trained / "run"), "--backend", "reference"]
    assert main(words) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("hybrid.cli.progress.SECONDS", 0.0)
    assert main(words) == 0
    err = capsys.readouterr().err
    assert "batches: 1 of " in err and "\n" not in err and err.endswith("\r\x1b[K")


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds to see whether torch compiles."""
    monkeypatch.setattr(doctor, "_examine_torch", lambda: {"runs": False, "problem": "not here", "mixedF16": None})


@pytest.mark.usefixtures("without_torch")
def test_doctor_says_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    report = document(capsys, "doctor")
    assert report["backends"]["reference"]["runs"] is True
    assert report["backends"]["webgpu"]["runs"] or report["backends"]["webgpu"]["problem"]
    text = output(capsys, "doctor")
    assert "reference: runs" in text and "adapters" in text and "torch: does not run: not here" in text


@pytest.mark.torch
def test_doctor_knows_torch_its_device_and_whether_it_compiles(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from hybrid.backends.torch.examine import examine

    facts = document(capsys, "doctor")["backends"]["torch"]
    assert facts["runs"] and facts["version"] == torch.__version__ and facts["devices"]
    assert facts["compiles"] != bool(facts["compileProblem"])
    report = doctor.examine()

    def broken(*arguments: object) -> object:
        raise RuntimeError("no compiler here\nat all")

    monkeypatch.setattr(torch, "compile", broken)
    report["backends"]["torch"] |= examine.__wrapped__()
    text = doctor.report_text(report)
    assert f"torch {torch.__version__} on " in text and "does not compile (no compiler here)" in text


@pytest.mark.usefixtures("without_torch")
def test_doctor_without_a_driver_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybrid.backends.webgpu import device

    monkeypatch.setattr(device, "list_adapters", list)
    report = doctor.examine()
    assert report["backends"]["webgpu"]["runs"] is False and report["adapterInUse"] is None
    assert "adapters: none" in doctor.report_text(report) and "mesa-vulkan-drivers" in doctor.report_text(report)
