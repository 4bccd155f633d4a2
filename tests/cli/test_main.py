"""The command line's manners: near names, one clear line for an error, exit codes, help."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import pytest

from hybrid.cli import main as cli
from hybrid.cli.main import FIRST, build_parser, main
from hybrid.config.loading import preset_names
from hybrid.errors import ConfigError, ContractMismatch


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(words)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "unknown command 'trian' of `hybrid`: did you mean 'train'?"),
        (["zzz"], "unknown command 'zzz' of `hybrid`; there are: "),
        (["checkpoint", "lst", "x"], "unknown command 'lst' of `hybrid checkpoint`: did you mean 'list'?"),
        (["train", "--presett", "x"], "unknown option '--presett' of `hybrid train`: did you mean '--preset'?"),
        (["train", "--run_dir=x"], "unknown option '--run_dir' of `hybrid train`: did you mean '--run-dir'?"),
        (["train", "--stps", "3"], "did you mean '--steps'?"),
        (["train", "--steps", "many"], "argument --steps: invalid int value: 'many'; see `hybrid train --help`"),
        (["train", "a.toml", "b.toml"], "unexpected argument 'b.toml'; see `hybrid train --help`"),
        (["train", "a.yaml"], "expected a name ending in .toml or .json"),
        (["train", "--preset", "lama-tiny"], "did you mean 'llama-tiny'?"),
        (["train", "--set", "model.widht=3"], "did you mean model.width?"),
        (["train", "--set", "model.width"], "expected KEY=VALUE"),
        (["train", "--backend", "cuda"], "backend.name"),
        (["train", "--steps", "0"], "run.steps"),
        (["sample"], "the following arguments are required: RUN|CHECKPOINT"),
        (["eval", "x", "--batches", "-1"], "expected at least 0"),
    ],
)
def test_a_usage_error_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    code, out, err = answer(capsys, *words)
    assert code == 2 and out == ""
    assert message in err and err.startswith("hybrid: ")
    assert "Traceback" not in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "name", "code"),
    [
        (["train", "--steps", "many", "--json"], "ConfigError", 2),
        (["train", "--json", "--presett", "x"], "ConfigError", 2),
        (["trian", "--json"], "ConfigError", 2),
        (["sample", "--json"], "ConfigError", 2),
        (["eval", "nowhere", "--json"], "CheckpointNotFound", 1),
        (["checkpoint", "verify", "nowhere", "--json"], "CheckpointNotFound", 1),
    ],
)
def test_with_json_an_error_is_an_event_whatever_is_wrong(
    capsys: pytest.CaptureFixture[str], words: list[str], name: str, code: int
) -> None:
    exit_code, out, err = answer(capsys, *words)
    event = json.loads(out)
    assert exit_code == code and (event["event"], event["error"], event["exitCode"]) == ("error", name, code)
    assert err == f"hybrid: {event['message']}\n"


def test_an_error_keeps_its_exit_code_when_nobody_reads_the_event() -> None:
    command = f"'{sys.executable}' -m hybrid train --json --steps many | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "2\n" and "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_a_traceback_is_for_those_who_ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" in answer(capsys, "train", "--preset", "x", "--debug")[2]
    monkeypatch.setenv("HYBRID_DEBUG", "1")
    assert "Traceback" in answer(capsys, "train", "--preset", "x")[2]


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ContractMismatch("refused", (("a", 1, 2),)), 3, "hybrid: refused\n"),
        (ConfigError("wrong"), 2, "hybrid: wrong\n"),
        (
            ValueError("odd"),
            1,
            "hybrid: internal error: ValueError: odd\n  run it again with --debug for the traceback\n",
        ),
        (KeyboardInterrupt(), 130, "hybrid: interrupted\n"),
        (OSError(28, "No space left on device", "runs/x"), 1, "hybrid: runs/x: No space left on device\n"),
        (MemoryError(), 1, "hybrid: out of memory (no size is known): a smaller model, batch or sequence needs less\n"),
        (ConfigError("the key \x1b[2J"), 2, "hybrid: the key \ufffd[2J\n"),
    ],
)
def test_every_error_has_its_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, text: str
) -> None:
    def fail(arguments: argparse.Namespace) -> int:
        raise error

    parser = build_parser()
    parser.set_defaults(run=fail)
    monkeypatch.setattr(cli, "build_parser", lambda: parser)
    assert answer(capsys) == (code, "", text)


@pytest.mark.parametrize("words", [[], ["data"], ["checkpoint"]])
def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    code, out, err = answer(capsys, *words)
    assert code == 2 and out == "" and err.startswith("usage: hybrid")


def test_help_names_every_command_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["--help"])
    assert exit.value.code == 0
    out = capsys.readouterr().out
    names = ["eval" if name == "evaluate" else name for name in FIRST]
    places = [out.index(f"    {name} ") for name in names]
    assert places == sorted(places)


def test_the_help_of_train_names_every_preset(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # argparse would break the names at their hyphens
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    said = capsys.readouterr().out
    assert all(name in said for name in preset_names())


def test_help_is_quick_because_commands_import_late() -> None:
    heavy = ("wgpu", "numpy", "torch", "tokenizers", "pydantic", "rich")
    code = f"import sys, hybrid.cli.main as m; m.build_parser(); print([n for n in {heavy} if n in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout == "[]\n"


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"'{sys.executable}' -m hybrid doctor --json | head -c 1 >/dev/null; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n" and "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_any_text_can_be_printed_whatever_the_encoding() -> None:
    code = (
        "import sys; from hybrid.cli.main import main; sys.argv = ['hybrid']; main(['train', '--preset', 'é\\udcff'])"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stderr.startswith("hybrid: unknown preset '\\xe9\\udcff'") and "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="a shell that closes a stream")
def test_closed_output_is_no_error() -> None:
    command = f"'{sys.executable}' -m hybrid checkpoint list /nowhere --json >&- 2>&-; echo $?"
    assert subprocess.run(["bash", "-c", command], capture_output=True, text=True).stdout == "1\n"
    command = f"'{sys.executable}' -m hybrid train --preset x --json >&-; echo $? >&2"
    assert subprocess.run(["bash", "-c", command], capture_output=True, text=True).stderr.splitlines()[-1] == "2"
