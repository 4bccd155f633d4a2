"""What the benchmarks share: where things lie, and results with the commit and command that made them."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RIVALS = ROOT / ".venv-benchmarks" / "bin" / "python"


def corpus(given: Path | None = None) -> Path:
    """tinyshakespeare.txt: `given`, or in `shared/data/` within or beside the checkout."""
    places = [given] if given else [folder / "shared/data/tinyshakespeare.txt" for folder in (ROOT, ROOT.parent)]
    for place in places:
        if place.is_file():
            return place
    raise SystemExit(f"no text at {' or '.join(map(str, places))}: give its path with --text")


def commit() -> str:
    """The commit that was measured, with "+changes" when the tree differs from it."""
    described = subprocess.run(
        ["git", "describe", "--always", "--abbrev=40", "--dirty=+changes", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return described.stdout.strip() or "unknown"


def command() -> str:
    """The command line that was run, with paths relative to the checkout."""
    words = [Path(word).name if word == sys.argv[0] else word for word in sys.argv]
    return shlex.join(["python", f"benchmarks/{words[0]}", *(word.replace(f"{ROOT}/", "") for word in words[1:])])


def machine() -> dict[str, Any]:
    model = next(
        (line.split(":", 1)[1].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")), ""
    )
    return {"processor": model or platform.processor(), "cores": os.cpu_count(), "python": platform.python_version()}


def save_result(name: str, result: dict[str, Any], made_by: str | None = None, measured: str | None = None) -> Path:
    """Write results/NAME.json: the result with commit (today's, or the one that was `measured`), command (this one, or
    `made_by`), machine and time."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    document = {
        "commit": measured or commit(),
        "command": made_by or command(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "result": result,
    }
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return path


@contextmanager
def own_cache() -> Iterator[None]:
    """An empty cache for hybrid in this process and those it starts, so that no result depends on what ran before."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, HYBRID_CACHE=folder):
        yield


def run_json(words: list[str], environment: dict[str, str] | None = None) -> Any:
    """Run a command that prints one JSON document and return it; its standard error passes through."""
    done = subprocess.run(
        words, cwd=ROOT, env=os.environ | (environment or {}), stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{shlex.join(words)} ended with exit code {done.returncode}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def run_quietly(words: list[str]) -> None:
    """Run a command whose output is for nobody, and stop where it fails."""
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{shlex.join(words)} ended with exit code {done.returncode}")


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
