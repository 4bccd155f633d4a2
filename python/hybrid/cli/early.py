"""Stop signals in the first moments of `hybrid train`: its imports take a second or two, and only then can
`training.signals` listen. Until then there is nothing to save, so the process ends on the spot, with one line and exit
code 75. One of several that torchrun started remembers the signal instead: the others have to be told. Imports nothing
that takes time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from hybrid.errors import EXIT_STOPPED

NAMES = ("SIGTERM", "SIGINT", "SIGUSR1")  # those of training.signals; SIGUSR1 does not exist on Windows
COMMAND = "train"

_on_guard = False
_as_json = False
_previous: dict[int, Any] = {}  # handlers by signal
_remembered: str | None = None  # why this one of several processes is to stop


@contextmanager
def guarded(words: Sequence[str]) -> Iterator[None]:
    """Answer stop signals inside the block, if the command line `words` begins a training. Nests: the outermost block
    counts. In another thread than the main one, where Python allows no handlers, a no-op."""
    global _on_guard, _as_json
    if _on_guard or list(words[:1]) != [COMMAND]:
        yield
        return
    _on_guard, _as_json = True, "--json" in words
    with suppress(ValueError):  # not the main thread
        for name in NAMES:
            if hasattr(signal, name):
                number = int(getattr(signal, name))
                _previous[number] = signal.signal(number, _end)
    try:
        yield
    finally:
        _on_guard = False
        while _previous:
            signal.signal(*_previous.popitem())


def hand_over() -> str | None:
    """From here on somebody else listens; should a signal still come here, when he has ended, it does what it always
    did. Gives the reason for a stop that one of several processes has remembered."""
    global _on_guard, _remembered
    _on_guard = False
    reason, _remembered = _remembered, None
    return reason


def _end(number: int, frame: FrameType | None) -> None:
    if not _on_guard:
        before = _previous.get(number, signal.SIG_DFL)
        if callable(before):
            before(number, frame)
        else:
            signal.signal(number, before)
            os.kill(os.getpid(), number)
        return
    global _remembered
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _remembered = f"{signal.Signals(number).name} received"
        return
    message = f"stopped before anything was there to save ({signal.Signals(number).name} received)"
    with suppress(OSError):
        if _as_json:
            event = (
                f'{{"event": "error", "error": "StopRequested", "message": "{message}", "exitCode": {EXIT_STOPPED}}}'
            )
            os.write(1, f"{event}\n".encode())
        os.write(2, f"hybrid: {message}\n".encode())
    # No exception: one that is raised in the middle of an import may be taken for a module that is missing.
    os._exit(EXIT_STOPPED)
