"""The page as `hybrid export-site` writes it, with one model that a software driver trains in seconds."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hybrid.bridge.site import export_site

MICRO: dict[str, Any] = {
    "title": "Micro",
    "about": "Learns letters.",
    "settings": {
        "model": {"layers": 1, "width": 32, "heads": 2},
        "data": {"sequenceLength": 32, "batchSize": 4},
        "optimizer": {"lr": 5e-3},
        "schedule": {"warmupSteps": 5},
        "checkpoint": {"every": 20},
        "evaluation": {"every": 10, "batches": 2},
        "sampling": {"every": 10, "tokens": 24},
        "run": {"name": "micro", "steps": 60, "logEvery": 2},
    },
}


def write(folder: Path, *, python: Path | None = None, server: str | None = None) -> None:
    export_site(folder, {"micro": MICRO}, python=python, server=server)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the page that the browser tests click on.")
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)
