"""A stop signal before `hybrid train` has loaded what it needs: exit code 75 and one line, whenever it comes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid.cli import early
from hybrid.training import signals
from training.micro import config_file, run_file

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals that a parent could send")

# Python runs a sitecustomize before anything else. This one says when the named module is about to be imported, and
# waits for an answer.
HOOK = """
import os, sys

class Waiting:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["WAIT_FOR"]:
            sys.meta_path.remove(self)
            os.write(3, b"here")
            os.read(4, 1)

sys.meta_path.insert(0, Waiting())
"""

MOMENTS = ("hybrid.cli.main", "argparse", "pydantic", "hybrid.config.tree", "hybrid.training.runner", "numpy")


def train(folder: Path, moment: str, number: int, *words: str) -> subprocess.CompletedProcess[str]:
    """`hybrid train` that gets a signal while it waits to import a module."""
    (folder / "sitecustomize.py").write_text(HOOK)
    said, says = os.pipe()
    answers, answer = os.pipe()
    command = [sys.executable, "-m", "hybrid", "train", str(config_file(folder)), "--run-dir", str(folder / "run")]
    descriptors = f'exec 3>&{says} 4<&{answers}; exec "$@"'
    process = subprocess.Popen(
        ["bash", "-c", descriptors, "bash", *command, *words],
        env={**os.environ, "PYTHONPATH": str(folder), "WAIT_FOR": moment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pass_fds=(says, answers),
    )  # fmt: skip
    os.close(says)
    assert os.read(said, 4) == b"here", process.communicate()
    process.send_signal(number)
    os.write(answer, b"!")  # where the process lives on, it goes on now
    out, err = process.communicate(timeout=60)
    for descriptor in (said, answers, answer):
        os.close(descriptor)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.mark.parametrize("moment", MOMENTS)
def test_sigterm_while_modules_load_ends_with_75_and_one_line(tmp_path: Path, moment: str) -> None:
    done = train(tmp_path, moment, signal.SIGTERM)
    assert (done.returncode, done.stdout) == (75, "")
    assert done.stderr == "hybrid: stopped before anything was there to save (SIGTERM received)\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["SIGINT", "SIGUSR1"])
def test_the_other_signals_do_the_same(tmp_path: Path, name: str) -> None:
    done = train(tmp_path, "pydantic", getattr(signal, name))
    assert done.returncode == 75
    assert done.stderr == f"hybrid: stopped before anything was there to save ({name} received)\n"


def test_in_json_mode_it_is_an_event_as_well(tmp_path: Path) -> None:
    done = train(tmp_path, "numpy", signal.SIGINT, "--json")
    event = json.loads(done.stdout)
    assert (event["event"], event["error"], event["exitCode"]) == ("error", "StopRequested", 75)
    assert event["message"] in done.stderr


def test_later_the_run_itself_answers(tmp_path: Path) -> None:
    """A backend is loaded behind the hand-over."""
    done = train(tmp_path, "hybrid.backends.reference.session", signal.SIGTERM)
    assert done.returncode == 75 and done.stderr == ""
    assert "stopped (SIGTERM received), nothing to save at step 0" in done.stdout
    assert run_file(tmp_path)["status"] == "stopped"


def test_another_command_keeps_the_signals_as_they_are() -> None:
    before = {name: signal.getsignal(getattr(signal, name)) for name in signals.NAMES}
    with early.guarded(["sample", "run"]):
        assert {name: signal.getsignal(getattr(signal, name)) for name in signals.NAMES} == before
    with early.guarded(["train"]), early.guarded(["train"]):
        assert all(signal.getsignal(getattr(signal, name)) is early._end for name in early.NAMES)
    assert {name: signal.getsignal(getattr(signal, name)) for name in signals.NAMES} == before
    assert early.NAMES == signals.NAMES


def test_after_the_hand_over_a_signal_does_what_it_always_did() -> None:
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it
    try:
        with early.guarded(["train"]):
            early.hand_over()
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, inherited)


def test_one_of_several_processes_remembers_the_signal_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended alone, it would leave them waiting."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with early.guarded(["train"]):
        os.kill(os.getpid(), signal.SIGTERM)
        assert early.hand_over() == "SIGTERM received"
    assert early.hand_over() is None
