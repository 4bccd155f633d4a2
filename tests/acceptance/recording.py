"""Keeps what the long checks found: `make acceptance` leaves benchmarks/results/acceptance.json.

Each test has an entry with its outcome, its time, the figures it gave to `record_property`, and the commit and command
that made it. Tests that were not run this time keep the entry they had.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from common import RESULTS, commit, machine  # noqa: E402

FILE = RESULTS / "acceptance.json"

_found: dict[str, dict[str, Any]] = {}
_commit = commit()  # now, before the tests: the tree may move on while they run


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "acceptance" not in report.keywords or report.skipped:
        return
    if report.when == "call" or report.failed:  # a set-up that fails has no call
        entry = {"passed": report.passed, "seconds": round(report.duration, 2), "figures": dict(report.user_properties)}
        _found[report.nodeid] = entry


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not _found:
        return
    words = [str(word) for word in session.config.invocation_params.args]
    facts = {
        "commit": _commit,
        "command": shlex.join(["python", "-m", "pytest", *words]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    known: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))["tests"] if FILE.exists() else {}
    tests = {**known, **{name: {**entry, **facts} for name, entry in _found.items()}}
    RESULTS.mkdir(parents=True, exist_ok=True)
    document = {"machine": machine(), "tests": dict(sorted(tests.items()))}
    FILE.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
