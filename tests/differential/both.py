"""Asks Python and JavaScript the same questions and compares the answers.

One Node process answers for the whole session (web/test/differential/answer.js). Inputs are drawn with a seed: the
same ones each time, or others with HYBRID_FUZZ_SEED=<anything>, which a failure names.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any

from hybrid.contracts.stable_json import stable_json
from hybrid.errors import HybridError

ROOT = Path(__file__).resolve().parents[2]
ANSWER = ROOT / "web" / "test" / "differential" / "answer.js"
SEED = os.environ.get("HYBRID_FUZZ_SEED", "1337")


class Node:
    """The process that answers."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            ["node", str(ANSWER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )

    def ask(self, task: str, cases: list[Any]) -> list[dict[str, Any]]:
        assert self._process.stdin and self._process.stdout
        # 10^400 stands for infinity, which JSON has no token for: to JavaScript it is infinite, to Python too great.
        self._process.stdin.write(json.dumps({"task": task, "cases": cases}, allow_nan=False) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"node ended with exit code {self._process.wait()} while it was asked {task}"
        answers: list[dict[str, Any]] = json.loads(line)
        assert len(answers) == len(cases)
        return answers

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        assert self._process.wait(timeout=10) == 0


def draw(name: str) -> Random:
    """The random numbers of one test."""
    return Random(f"{SEED}/{name}")


def agree(node: Node, task: str, cases: Iterable[Any], python: Callable[[Any], Any]) -> dict[str, int]:
    """Both languages give the same value, or an error of the same name and message, for each case.

    The result counts the kinds of answers: "value", and each error's name. A test asserts that all of them occur.
    """
    asked = list(cases)
    counts: dict[str, int] = {}
    for case, theirs in zip(asked, node.ask(task, asked), strict=True):
        try:
            ours: dict[str, Any] = {"value": python(case)}
        except HybridError as error:
            ours = {"error": [type(error).__name__, str(error)]}
        # By text: in Python True equals 1.
        assert stable_json(theirs) == stable_json(ours), (
            f"{task} differs (HYBRID_FUZZ_SEED={SEED}) for {json.dumps(case)[:2000]}\n"
            f"JavaScript: {json.dumps(theirs)[:2000]}\nPython:     {json.dumps(ours)[:2000]}"
        )
        kind = "value" if "value" in ours else ours["error"][0]
        counts[kind] = counts.get(kind, 0) + 1
    return counts
