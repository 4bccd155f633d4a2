"""Stopping on request: signals and the time limit set a flag, and whoever works asks it.

The first SIGTERM, SIGINT or SIGUSR1 asks for a stop: the run saves and ends with exit code 75. A second SIGINT ends the
process at once; saved checkpoints stay valid.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from hybrid.errors import EXIT_INTERRUPTED, StopRequested

NAMES = ("SIGTERM", "SIGINT", "SIGUSR1")  # SIGUSR1 does not exist on Windows
SHOW_CURSOR = b"\x1b[?25h\n"  # the live view hides it


class StopFlag:
    """A request to stop, from a signal, the time limit or the program itself.

    max_hours: hours after which a stop is due, counted from here; None means never. clock: seconds.
    """

    def __init__(self, max_hours: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._deadline: float | None = None
        self._max_hours = max_hours
        self._reason: str | None = None
        self.limit(max_hours)

    def limit(self, max_hours: float | None) -> None:
        """A stop is due that many hours after the flag was made; None: never."""
        self._deadline = None if max_hours is None else self._began + max_hours * 3600
        self._max_hours = max_hours

    @property
    def reason(self) -> str | None:
        """Why a stop is due; None while none is."""
        if self._reason is None and self._deadline is not None and self._clock() >= self._deadline:
            self._reason = f"run.maxHours = {self._max_hours:g} is over"
        return self._reason

    @property
    def requested(self) -> bool:
        """Whether a stop is due."""
        return self.reason is not None

    def request(self, reason: str) -> None:
        """Ask for a stop; the first reason is kept."""
        self._reason = self._reason or reason

    def check(self) -> None:
        """Raise StopRequested if a stop is due: for work that has nothing to save."""
        if self.reason is not None:
            raise StopRequested(f"stopped before the first step: {self.reason}")

    @contextmanager
    def installed(self, note: Callable[[str], None] | None = None) -> Iterator[StopFlag]:
        """Listen to signals inside the block. Elsewhere than in the main thread, where Python allows no handlers, a
        no-op.

        note: takes a sentence for the user at the first signal, in another thread, and not after the block.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        with self._watched(note):
            previous = {number: signal.signal(number, self._on_signal) for number in _numbers()}
            try:
                yield self
            finally:
                for number, handler in previous.items():
                    signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.request(_reason(number))

    @contextmanager
    def _watched(self, note: Callable[[str], None] | None) -> Iterator[None]:
        """A thread that is told of each signal by the system. Python runs handlers in the main thread only, and not
        while that is inside a call of a driver, which may take minutes."""
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        thread = threading.Thread(target=self._watch, args=(ours, note), name="signals", daemon=True)
        thread.start()
        previous = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(previous)
            theirs.close()
            thread.join()
            ours.close()

    def _watch(self, signals: socket.socket, note: Callable[[str], None] | None) -> None:
        asked = interrupts = 0
        while number := int.from_bytes(signals.recv(1)):
            if number not in _numbers():
                continue  # it is for another handler in this process
            self.request(_reason(number))
            asked += 1
            interrupts += number == signal.SIGINT
            if interrupts == 2:
                _end_at_once()
            if asked == 1 and note is not None:
                with contextlib.suppress(OSError, ValueError):  # nobody reads any more
                    note(f"{_reason(number)}: stopping; a second Ctrl+C ends at once, without saving")


def _numbers() -> list[int]:
    return [int(getattr(signal, name)) for name in NAMES if hasattr(signal, name)]


def _reason(number: int) -> str:
    return f"{signal.Signals(number).name} received"


def _end_at_once() -> None:
    with contextlib.suppress(OSError, ValueError):
        out = sys.__stdout__  # the live view has put its own in place of sys.stdout
        if out is not None and out.isatty():
            os.write(out.fileno(), SHOW_CURSOR)
    os._exit(EXIT_INTERRUPTED)
