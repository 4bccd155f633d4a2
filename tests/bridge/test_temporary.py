"""Temporary folders: they end with their process, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid.bridge.server import temporary
from hybrid.bridge.server.temporary import TemporaryFolder

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="nothing is removed for another process there")

MAKES_ONE = """
import sys, time
from hybrid.bridge.server.temporary import TemporaryFolder
folder = TemporaryFolder("hybrid-test-", sys.argv[1])
(folder.path / "content").write_text("x")
print(folder.path, flush=True)
time.sleep(60)
"""


@pytest.fixture
def other(tmp_path: Path) -> subprocess.Popen[str]:
    """Another process with a folder of its own."""
    return subprocess.Popen([sys.executable, "-c", MAKES_ONE, str(tmp_path)], stdout=subprocess.PIPE, text=True)


def made_by(process: subprocess.Popen[str]) -> Path:
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


def age(folder: Path) -> None:
    os.utime(folder, (0, 0))


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    theirs = made_by(other)
    age(theirs)
    TemporaryFolder("hybrid-test-", str(tmp_path)).close()
    assert (theirs / "content").exists(), "its process lives"
    other.kill()
    other.wait()
    TemporaryFolder("hybrid-another-", str(tmp_path)).close()
    assert theirs.exists(), "of another kind"
    TemporaryFolder("hybrid-test-", str(tmp_path)).close()
    assert list(tmp_path.iterdir()) == []


def test_what_may_just_be_being_made_is_left_alone(tmp_path: Path) -> None:
    for name, has_lock, is_old in (("young", True, False), ("bare", False, True)):
        folder = tmp_path / f"hybrid-test-{name}"
        folder.mkdir()
        if has_lock:
            (folder / temporary.LOCK).write_text("")
        if is_old:
            age(folder)
    (tmp_path / "hybrid-test-file").write_text("")
    TemporaryFolder("hybrid-test-", str(tmp_path)).close()
    assert {path.name[12:] for path in tmp_path.iterdir()} == {"young", "bare", "file"}
