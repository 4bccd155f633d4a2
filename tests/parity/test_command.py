"""`hybrid parity`: what it prints and how it exits."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from hybrid.cli.commands import parity
from hybrid.cli.parser import Parser
from hybrid.training.parity import checks, mutants
from hybrid.training.parity.contract import Row

GOOD = Row("llama", "loss", ("float64", "reference"), 2e-8, "step 3")
BAD = Row("llama", "update", ("float64", "reference"), 2e-3)
UNMEASURED = Row("llama", "gradients", ("reference",), None, "no gradient")


def run(*words: str) -> int:
    parser = Parser(prog="hybrid")
    parity.register(parser.add_subparsers(parser_class=Parser))
    arguments = parser.parse_known_args(["parity", "--backends", "reference", *words])[0]
    return int(arguments.run(arguments))


def found(monkeypatch: pytest.MonkeyPatch, *rows: Row) -> None:
    monkeypatch.setattr(checks, "check_all", lambda *_: checks.Report(list(rows), {"webgpu": "no adapter"}))


@pytest.mark.parametrize("words", [(), ("--json",), ("--mutants",)])
def test_in_a_pipe_it_says_what_runs_on_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    def check_all(runtimes: object, progress: Callable[[str], None]) -> checks.Report:
        progress("llama: f32")
        assert capsys.readouterr().err == "llama: f32\n", "at once"
        progress("llama: mixed-f16")
        return checks.Report([GOOD])

    monkeypatch.setattr(checks, "check_all", check_all)
    monkeypatch.setattr(mutants, "check_mutants", lambda *_, progress: check_all(None, progress) and [])
    assert run(*words) == 0
    out, err = capsys.readouterr()
    assert err == "llama: mixed-f16\n" and "mixed-f16" not in out


def test_rows_within_the_contract_exit_with_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found(monkeypatch, GOOD)
    assert run() == 0
    shown = capsys.readouterr().out
    assert "2e-08" in shown and "1e-06" in shown and "1 of 1 rows within the contract" in shown
    assert "not run: webgpu: no adapter" in shown


@pytest.mark.parametrize("row", [BAD, UNMEASURED], ids=["too far", "not measured"])
def test_a_row_outside_the_contract_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], row: Row
) -> None:
    found(monkeypatch, GOOD, row)
    assert run() == 1
    shown = capsys.readouterr().out
    assert "FAILED" in shown and "1 of 2 rows within the contract, 1 not" in shown


def test_nothing_measured_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch)
    assert run() == 1


def test_json_is_one_document(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found(monkeypatch, GOOD, BAD)
    assert run("--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["format"], document["version"], document["passed"]) == ("hybrid.parity", 1, False)
    assert [row["passed"] for row in document["rows"]] == [True, False]
    assert document["rows"][0] == {
        "model": "llama",
        "check": "loss",
        "what": "loss of ten f32 steps, two runtimes",
        "runtimes": ["float64", "reference"],
        "measure": "largest relative difference",
        "measured": 2e-8,
        "tolerance": 1e-6,
        "passed": True,
        "note": "step 3",
    }
    assert document["notRun"] == {"webgpu": "no adapter"}


@pytest.mark.parametrize(("noticed", "code"), [(BAD, 0), (None, 1)], ids=["noticed", "survived"])
def test_a_surviving_mutant_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], noticed: Row | None, code: int
) -> None:
    verdict = mutants.Verdict("no weight decay", "reference", "llama", noticed)
    monkeypatch.setattr(mutants, "check_mutants", lambda *_, **__: [verdict])
    assert run("--mutants") == code
    assert ("SURVIVED" in capsys.readouterr().out) == bool(code)
    assert run("--mutants", "--json") == code
    assert json.loads(capsys.readouterr().out)["passed"] == (not code)
