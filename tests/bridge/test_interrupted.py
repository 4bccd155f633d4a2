"""A run whose process was killed is not said to be running."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from hybrid.bridge.server.feed import signature
from hybrid.bridge.server.runs import described
from hybrid.errors import ConfigError
from hybrid.training.lock import FILE, is_abandoned, locked
from hybrid.training.run_files import read_run_file
from training.micro import run
from training.process import Training

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs kill -9")

SETTINGS = ("checkpoint.every=1", "checkpoint.keepLast=2")


def test_a_killed_run_is_shown_as_interrupted_until_it_goes_on(tmp_path: Path) -> None:
    place = tmp_path / "run"
    with Training(tmp_path, "run.steps=100000", *SETTINGS) as training:
        training.until(event="checkpoint")
        training.process.send_signal(signal.SIGSTOP)  # between the two questions nothing but the end happens
        assert described(place)["status"] == "running"
        before = signature(place)
    # It is killed there.
    facts = read_run_file(place)
    assert facts is not None and facts["status"] == "running"
    shown = described(place)
    assert (shown["status"], shown["problem"]) == ("interrupted", None)
    assert shown["message"] == "the process that trained here has ended without a word"
    assert signature(place) != before  # so whoever watches is told
    (place / FILE).write_text("another machine")
    assert described(place)["status"] == "running", "its locks may not be seen here"
    step = described(place)["step"]
    outcome = run(tmp_path, f"run.steps={step + 5}", *SETTINGS, run="run")
    assert outcome.status == "finished" and described(place)["status"] == "finished"


def test_who_looks_does_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    with locked(tmp_path):
        pass
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            is_abandoned(tmp_path)

    looking = [threading.Thread(target=look) for _ in range(2)]
    for thread in looking:
        thread.start()
    try:
        for _ in range(50):
            with locked(tmp_path, patience=10.0):
                assert not is_abandoned(tmp_path)
                with (
                    pytest.raises(ConfigError, match="another process is training in this folder"),
                    locked(tmp_path, 0.0),
                ):
                    pass
    finally:
        over.set()
        for thread in looking:
            thread.join()
    assert is_abandoned(tmp_path)


def test_where_there_are_no_locks_it_is_said_and_nobody_is_taken_for_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with locked(tmp_path):
        pass

    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", none)
    with (
        pytest.raises(ConfigError, match=r"this file system cannot lock files \(No locks available\)"),
        locked(tmp_path),
    ):
        pass
    assert not is_abandoned(tmp_path)


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "link", "empty"])
def test_a_lock_file_that_is_none_says_nothing(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "run" / FILE
    file.parent.mkdir()
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "empty":
        file.touch()
    elif kind == "link":
        with locked(tmp_path):
            pass
        file.symlink_to(tmp_path / FILE)
    assert not is_abandoned(file.parent)
