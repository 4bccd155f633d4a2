"""`bridge/vectors/optimizer_table.json`: rows of the optimizer table, to the last bit, for every language.

The rows are the library's own, because what is promised is its order of float64 operations; this test checks them
against exact arithmetic (50 decimal digits) as well. Write the file anew with `python
tests/optim/test_table_golden.py`.
"""

from __future__ import annotations

import json
from decimal import Decimal, localcontext
from pathlib import Path

import pytest

from hybrid.optim.settings import OptimizerSettings
from hybrid.optim.table import rows

FILE = Path(__file__).resolve().parents[2] / "bridge" / "vectors" / "optimizer_table.json"

ABOUT = (
    "Optimizer table: 'rows[i]' is the row [1 - beta1^t, 1 - beta2^t, lr and weight decay of group 0, of group 1] of "
    "optimizer step t = 'steps[i]' under 'optimizer'.\n"
    "Values: the Python table, checked against 50-digit arithmetic. Only IEEE additions, multiplications, divisions "
    "and square roots are used, so every language gives the same bits.\n"
    "Use: compare exactly. Numbers are the shortest decimals that round-trip."
)

PI = Decimal("3.14159265358979323846264338327950288419716939937510582")
STEPS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 20, 30, 37, 38, 40, 41, 42, 43, 50, 100, 1000, 99999]
SCHEDULERS = [
    {"enabled": False},
    {"enabled": True, "type": "constant", "warmupSteps": 7},
    {"enabled": True, "type": "step_decay", "warmupSteps": 3, "stepSize": 5, "gamma": 0.93, "minLr": 1e-6},
    {"enabled": True, "type": "cosine", "warmupSteps": 2, "totalSteps": 40, "minLr": 1e-5},
    {"enabled": True, "type": "cosine_to_min", "warmupSteps": 2, "totalSteps": 40, "minLr": 1e-5},
    {"enabled": True, "type": "wsd", "warmupSteps": 2, "totalSteps": 40, "decayShare": 0.3, "minLr": 1e-5},
    {"enabled": True, "type": "wsd", "totalSteps": 40, "decayShare": 0.9, "decayShape": "cosine"},
    {"enabled": True, "type": "wsd", "totalSteps": 40, "decayShare": 0.9, "decayShape": "sqrt"},
]


def document():
    cases = []
    for scheduler in SCHEDULERS:
        optimizer = {
            "type": "adamw",
            "lr": 3e-4,
            "beta1": 0.9,
            "beta2": 0.95,
            "weightDecay": 0.1,
            "scheduler": scheduler,
        }
        settings = OptimizerSettings.from_dict(optimizer)
        cases.append({"optimizer": optimizer, "steps": STEPS, "rows": [rows(settings, t, 1)[0] for t in STEPS]})
    return {"about": ABOUT, "cases": cases}


def half_wave(progress):
    """(1 + cos(pi p)) / 2 by the cosine series, in decimals."""
    angle, term, total = PI * progress, Decimal(1), Decimal(1)
    for k in range(1, 40):
        term *= -angle * angle / ((2 * k - 1) * 2 * k)
        total += term
    return (1 + total) / 2


def exact_rate(optimizer, t):
    """The schedule's formula, read anew and computed in decimals."""
    rate, scheduler = Decimal(optimizer["lr"]), optimizer["scheduler"]
    if not scheduler["enabled"]:
        return rate
    warmup, lowest = scheduler.get("warmupSteps", 0), Decimal(scheduler.get("minLr", 0))
    if t <= warmup:
        return max(lowest, rate * t / warmup)
    n, total = t - warmup - 1, scheduler.get("totalSteps", 1)
    progress = min(Decimal(1), Decimal(n) / total)
    if scheduler["type"] == "step_decay":
        return max(lowest, rate * Decimal(scheduler["gamma"]) ** (n // scheduler["stepSize"]))
    if scheduler["type"] == "cosine":
        return max(lowest, rate * half_wave(progress))
    if scheduler["type"] == "cosine_to_min":
        return lowest + (rate - lowest) * half_wave(progress)
    if scheduler["type"] == "wsd":
        decay = int(scheduler["decayShare"] * total)
        progress = min(Decimal(1), max(Decimal(0), Decimal(n - (total - decay)) / decay))
        shapes = {"linear": 1 - progress, "cosine": half_wave(progress), "sqrt": 1 - progress.sqrt()}
        return lowest + (rate - lowest) * shapes[scheduler.get("decayShape", "linear")]
    return rate


def test_the_file_holds_the_rows_to_the_last_bit():
    written = json.loads(FILE.read_text(encoding="utf-8"))
    assert written == document(), "run python tests/optim/test_table_golden.py, and find out why the bits changed"
    assert len(written["cases"]) == len(SCHEDULERS) == 8


@pytest.mark.parametrize("number", range(len(SCHEDULERS)))
def test_the_rows_are_right_by_exact_arithmetic(number):
    case = json.loads(FILE.read_text(encoding="utf-8"))["cases"][number]
    optimizer = case["optimizer"]
    for t, row in zip(case["steps"], case["rows"], strict=True):
        with localcontext() as context:
            context.prec = 50
            corrections = [1 - Decimal(optimizer[beta]) ** t for beta in ("beta1", "beta2")]
            rate = exact_rate(optimizer, t)
        assert row[:2] == pytest.approx([float(value) for value in corrections], rel=1e-14)
        assert row[2] == pytest.approx(float(rate), rel=1e-14, abs=1e-16 * optimizer["lr"])
        assert row[3:] == [optimizer["weightDecay"], row[2], 0.0]


if __name__ == "__main__":
    FILE.write_text(json.dumps(document(), indent=1) + "\n", encoding="utf-8")
