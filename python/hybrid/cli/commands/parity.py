"""`hybrid parity`: train the same small runs on every backend present, and judge how far they are apart."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hybrid.cli.parser import Subparsers, add_command
from hybrid.cli.progress import ProgressLine
from hybrid.errors import EXIT_DONE, EXIT_FAILED

if TYPE_CHECKING:
    from hybrid.training.parity.checks import Report
    from hybrid.training.parity.mutants import Verdict

DESCRIPTION = """\
Trains small GPT-2 style, Llama style and looped models on each backend and compares losses, updates, gradients and
states with the tolerances of docs/parity.md. Exits with 1 when a row fails.

With --mutants, plants known mistakes (no weight decay, decay on norms, epsilon x 100, learning rate + 0.1 %, the last
position's gradient dropped) and exits with 1 when one of them goes unnoticed."""


def register(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, "parity", "prove that the backends agree", DESCRIPTION)
    parser.add_argument(
        "--backends",
        metavar="A,B",
        help="backends to compare: reference, webgpu, webgpu:ADAPTER, torch (default: all that are present)",
    )
    parser.add_argument("--mutants", action="store_true", help="check that planted mistakes are noticed")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from hybrid.training.parity.checks import check_all
    from hybrid.training.parity.mutants import check_mutants
    from hybrid.training.parity.runtimes import open_runtimes

    names = [name.strip() for name in arguments.backends.split(",")] if arguments.backends else None
    runtimes, missing = open_runtimes(names)
    try:
        if arguments.mutants:
            with ProgressLine(in_logs=True) as progress:
                verdicts = check_mutants(runtimes[0], runtimes[1:], progress=progress.show)
            _show(verdict_document(verdicts, missing), verdict_lines(verdicts, missing), arguments.json)
            return EXIT_FAILED if any(verdict.survived for verdict in verdicts) else EXIT_DONE
        with ProgressLine(in_logs=True) as progress:
            report = check_all(runtimes, progress.show)
        report.not_run.update(missing)
        _show(report_document(report), report_lines(report), arguments.json)
        return EXIT_DONE if report.passed else EXIT_FAILED
    finally:
        for runtime in runtimes:
            runtime.close()


def report_document(report: Report) -> dict[str, object]:
    """What `--json` prints."""
    return {
        "format": "hybrid.parity",
        "version": 1,
        "passed": report.passed,
        "rows": [row.to_dict() for row in report.rows],
        "notRun": report.not_run,
    }


def verdict_document(verdicts: list[Verdict], missing: dict[str, str]) -> dict[str, object]:
    """What `--mutants --json` prints."""
    return {
        "format": "hybrid.parity.mutants",
        "version": 1,
        "passed": not any(verdict.survived for verdict in verdicts),
        "mutants": [verdict.to_dict() for verdict in verdicts],
        "notRun": missing,
    }


Lines = tuple[Sequence[str], Sequence[Sequence[str]], Sequence[str]]


def report_lines(report: Report) -> Lines:
    """Headings, rows and closing lines of the table."""
    rows = [
        (
            row.model,
            row.promise.what,
            " / ".join(row.runtimes),
            "not measured" if row.measured is None else f"{row.measured:.3g}",
            f"{row.promise.limit:g}" if row.promise.limit else "exact",
            "ok" if row.passed else "FAILED",
            row.note,
        )
        for row in report.rows
    ]
    failed = sum(not row.passed for row in report.rows)
    closing = [f"{len(rows) - failed} of {len(rows)} rows within the contract" + (f", {failed} not" if failed else "")]
    headings = ("model", "promise", "runtimes", "measured", "allowed", "verdict", "note")
    return headings, rows, closing + _missing_lines(report.not_run)


def verdict_lines(verdicts: list[Verdict], missing: dict[str, str]) -> Lines:
    """The same for mutants."""
    rows = []
    for verdict in verdicts:
        row = verdict.noticed_by
        seen = (row.promise.what, f"{row.measured:.3g}", f"{row.promise.limit:g}") if row else ("-", "-", "-")
        rows.append((verdict.model, verdict.mutant, verdict.runtime, *seen, "noticed" if row else "SURVIVED"))
    survivors = sum(verdict.survived for verdict in verdicts)
    closing = [f"{len(rows) - survivors} of {len(rows)} mutants noticed" + (f", {survivors} not" if survivors else "")]
    headings = ("model", "mutant", "planted in", "noticed by", "measured", "allowed", "verdict")
    return headings, rows, closing + _missing_lines(missing)


def _missing_lines(missing: dict[str, str]) -> list[str]:
    return [f"not run: {name}: {reason}" for name, reason in missing.items()]


def _show(document: dict[str, object], lines: Lines, as_json: bool) -> None:
    if as_json:
        print(json.dumps(document))
        return
    from rich.console import Console

    from hybrid.cli.tables import table

    headings, rows, closing = lines
    Console(width=None if sys.stdout.isatty() else 200).print(table(headings, rows))
    for line in closing:
        print(line)
