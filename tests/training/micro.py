"""Runs so small that a test can have many: one layer, 16 wide, 16 tokens, a corpus of a few thousand words."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hybrid.backends.protocol import TrainingSession
from hybrid.checkpoint import finding
from hybrid.checkpoint.filesystem import OsFilesystem
from hybrid.config.loading import load_config
from hybrid.config.tree import RunConfig
from hybrid.contracts.metrics import validate_entry
from hybrid.training.metrics_log import read_rows
from hybrid.training.outcome import Outcome
from hybrid.training.runner import train
from hybrid.training.sessions import make_session
from hybrid.training.signals import StopFlag
from hybrid.training.start import Request, Services
from hybrid.training.view import Facts, QuietView

SETTINGS: dict[str, Any] = {
    "model": {
        "layers": 1, "width": 16, "heads": 2, "kvHeads": 1, "feedForwardWidth": 32, "dropout": 0.1,
    },
    "data": {
        "maxBytes": None, "sequenceLength": 16, "batchSize": 4, "microbatchSize": 2,
        "split": {"by": "share", "validationShare": 0.1},
    },
    "optimizer": {"lr": 3e-3, "maxNorm": 0.5},
    "schedule": {"type": "cosine_to_min", "warmupSteps": 3, "totalSteps": 40, "minLr": 3e-4},
    "checkpoint": {"every": 5, "keepLast": 0},
    "evaluation": {"every": 0, "batches": 2},
    "sampling": {"every": 0, "tokens": 8, "prompt": "the "},
    "backend": {"name": "reference"},
    "run": {"name": "micro", "steps": 20, "logEvery": 4},
}  # fmt: skip

# Members of the events `run` and `step` that a tab does not measure.
NOT_IN_A_TAB = ("peakFlops", "utilisation", "mfu", "mfuCausal", "dataWaitShare", "peakMemoryBytes")

WORDS = ("the", "tensor", "learns", "a", "gradient", "of", "loss", "and", "token", "by", "step", "batch", "rows")


def corpus(words: int = 4000) -> str:
    """The same text each time, with something to learn in it."""
    choose = np.random.default_rng(7)
    return " ".join(WORDS[index] for index in choose.integers(0, len(WORDS), words)) + "\n"


def micro_config(folder: Path, *assignments: str) -> RunConfig:
    """The micro settings with a corpus and a cache in `folder`."""
    return load_config(config_file(folder), assignments=assignments)


def config_file(folder: Path) -> Path:
    """The micro settings as a file, for command lines."""
    text = folder / "corpus.txt"
    if not text.exists():
        _write(text, corpus())
    data = {**SETTINGS["data"], "source": str(text), "cacheDir": str(folder / "cache")}
    file = folder / "micro.json"
    _write(file, json.dumps({**SETTINGS, "data": data}))
    return file


def _write(file: Path, text: str) -> None:
    """As a whole: other processes of the test read it, or write the same."""
    whole = file.with_name(f".{file.name}.{os.getpid()}")
    whole.write_text(text)
    whole.replace(file)


class Recorder(QuietView):
    """Keeps the events; may do something at each."""

    def __init__(self, at: Callable[[str, Facts], None] | None = None) -> None:
        self.events: list[tuple[str, Facts]] = []
        self._at = at

    def event(self, kind: str, facts: Facts) -> None:
        self.events.append((kind, facts))
        if self._at is not None:
            self._at(kind, facts)

    def of(self, kind: str) -> list[Facts]:
        return [facts for name, facts in self.events if name == kind]


def run(
    folder: Path,
    *assignments: str,
    run: str = "run",
    view: Recorder | None = None,
    stop: StopFlag | None = None,
    session: Callable[..., TrainingSession] = make_session,
    clocks: dict[str, Callable[[], float]] | None = None,
    filesystem: OsFilesystem | None = None,
    **request: Any,
) -> Outcome:
    """Train with the micro settings in `folder`/`run`."""
    services = Services(
        view=view or Recorder(), stop=stop or StopFlag(), make_session=session, filesystem=filesystem or OsFilesystem(),
        **(clocks or {}),
    )  # fmt: skip
    return train(Request(micro_config(folder, *assignments), folder / run, **request), services)


def state_hash(folder: Path, run: str = "run") -> str:
    """The state hash of the newest checkpoint."""
    return finding.resolve(folder / run).state_hash


def steps_saved(folder: Path, run: str = "run") -> list[int]:
    return sorted(status.step for status in finding.scan(folder / run / "checkpoints") if status.step is not None)


def entries(folder: Path, run: str = "run", name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The rows of a metrics file, each of them valid."""
    rows = list(read_rows(folder / run / name))
    for row in rows:
        validate_entry(row)
    return rows


def run_file(folder: Path, run: str = "run") -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / run / "run.json").read_text())
    return facts
