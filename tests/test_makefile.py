"""What each target of the Makefile installs: torch is half a gigabyte, and only the tests need it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.mark.parametrize(
    ("target", "extras"),
    [
        ("train", set()),
        ("lint", {"dev", "web"}),
        ("typecheck", {"dev", "web"}),
        ("wheel", {"dev", "web"}),
        ("pytest", {"dev", "web", "torch"}),
        ("test", {"dev", "web", "torch"}),
        ("acceptance", {"dev", "web", "torch"}),
    ],
)
def test_a_target_installs_what_it_needs_and_no_more(target: str, extras: set[str]) -> None:
    command = ["make", "--dry-run", "--always-make", target]
    plan = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    installed = re.findall(r"--editable '?\.(?:\[([a-z,]+)\])?", plan)
    assert installed, "every target needs the package itself"
    assert {extra for found in installed for extra in found.split(",") if extra} == extras
