"""Signals to a real process: in each phase, twice, and none at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hybrid.errors import StopRequested
from hybrid.training.signals import NAMES, StopFlag
from training.micro import corpus, run_file, steps_saved
from training.process import Training

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals that a parent could send")

# Long enough that no phase is over before the signal arrives.
SLOW = ("run.steps=100000", "evaluation.every=20", "evaluation.batches=0", "sampling.every=30", "sampling.tokens=2000")


@pytest.mark.parametrize("phase", ["data", "warm-up", "train", "evaluate", "sample", "save"])
def test_sigterm_in_any_phase_saves_and_exits_with_75(tmp_path: Path, phase: str) -> None:
    settings = list(SLOW)
    if phase == "data":
        (tmp_path / "corpus.txt").write_text(corpus() * 400)
        settings += ["data.tokenizer.type=characters"]
    with Training(tmp_path, *settings) as training:
        training.until(event="phase", phase=phase)
        training.process.send_signal(signal.SIGTERM)
        code, events, errors = training.end()
    assert code == 75, errors
    assert run_file(tmp_path)["status"] == "stopped"
    if phase == "data":
        assert events[-1]["event"] == "error" and "stopped" in events[-1]["message"]
        assert not list((tmp_path / "cache").glob("tokens-*"))
    else:
        last = events[-1]
        assert last["event"] == "end" and last["exitCode"] == 75 and "SIGTERM received" in last["message"]
        assert steps_saved(tmp_path)[-1:] == ([last["step"]] if last["step"] else [])
        assert run_file(tmp_path)["step"] == last["step"]


@pytest.mark.parametrize("name", ["SIGINT", "SIGUSR1"])
def test_the_other_signals_do_the_same_and_the_run_goes_on(tmp_path: Path, name: str) -> None:
    with Training(tmp_path, *SLOW) as training:
        training.until(event="step")
        training.process.send_signal(getattr(signal, name))
        code, events, errors = training.end()
    assert code == 75 and f"{name} received" in events[-1]["message"], errors
    step = events[-1]["step"]
    with Training(tmp_path, *SLOW[1:], f"run.steps={step + 1}", "evaluation.every=0") as training:
        code, events, errors = training.end()
    assert code == 0 and events[-1]["step"] == step + 1, errors
    assert [event["step"] for event in events if event["event"] == "run"] == [step]


def test_a_second_sigint_ends_the_process_at_once(tmp_path: Path) -> None:
    with Training(tmp_path, *SLOW, "data.prefetch=0", "checkpoint.every=1") as training:
        training.until(event="checkpoint")
        # Stopped, so that both signals are there before the program can react to the first.
        training.process.send_signal(signal.SIGINT)
        for _ in range(200):
            if training.process.poll() is not None:
                break
            training.process.send_signal(signal.SIGINT)
            try:
                training.process.wait(timeout=0.005)
            except subprocess.TimeoutExpired:
                continue
        code, _, _ = training.end()
    assert code in (130, 75), "at once, unless the first one's save was faster"
    assert steps_saved(tmp_path), "what was saved stays"


def test_a_second_sigint_ends_a_process_that_is_inside_a_long_call() -> None:
    code = (
        "import hashlib\n"
        "from hybrid.training.signals import StopFlag\n"
        "with StopFlag().installed(lambda text: print(text, flush=True)):\n"
        "    print('ready', flush=True)\n"
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)\n"  # no handler of Python's runs in it, as in a driver
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "SIGINT received: stopping; a second Ctrl+C ends at once, without saving\n"
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130


def test_a_stop_is_answered_before_it_is_done() -> None:
    notes: list[str] = []
    with StopFlag().installed(notes.append):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
    assert notes == ["SIGTERM received: stopping; a second Ctrl+C ends at once, without saving"]


def test_handlers_are_put_back_and_other_threads_get_none() -> None:
    before = {name: signal.getsignal(getattr(signal, name)) for name in NAMES}
    with StopFlag().installed() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested and stop.reason == "SIGTERM received"
        with pytest.raises(StopRequested, match="stopped before the first step: SIGTERM received"):
            stop.check()
    assert {name: signal.getsignal(getattr(signal, name)) for name in NAMES} == before
    seen: list[bool] = []

    def work() -> None:
        with StopFlag().installed() as quiet:
            seen.append(quiet.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


def test_the_first_reason_is_kept() -> None:
    stop = StopFlag()
    stop.check()
    stop.request("first")
    stop.request("second")
    assert stop.reason == "first"
