"""A run in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from training.micro import config_file


class Training:
    """`hybrid train --json` in a process of its own, with the events that it prints. A context manager that leaves no
    process behind."""

    def __init__(self, folder: Path, *assignments: str) -> None:
        command = [sys.executable, "-m", "hybrid", "train", str(config_file(folder)), "--json"]
        command += ["--run-dir", str(folder / "run")]
        for assignment in assignments:
            command += ["--set", assignment]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def events(self) -> Iterator[dict[str, Any]]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield json.loads(line)

    def until(self, **wanted: str) -> dict[str, Any]:
        """The next event that has these values."""
        for event in self.events():
            if all(event.get(key) == value for key, value in wanted.items()):
                return event
        raise AssertionError(f"no event {wanted}: {self.process.communicate()[1]}")

    def end(self) -> tuple[int, list[dict[str, Any]], str]:
        """Exit code, the events until then, and standard error."""
        events = list(self.events())
        assert self.process.stderr is not None
        errors = self.process.stderr.read()
        return self.process.wait(timeout=60), events, errors
