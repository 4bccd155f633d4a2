"""How far long work is: one line on standard error that is written over, where that is a terminal; elsewhere nothing,
or a line for each new text."""

from __future__ import annotations

import sys
import time

SECONDS = 0.1  # between two texts


class ProgressLine:
    """Call it with each report of progress. A context manager: the line is empty again when it is left.

    in_logs: print what `show` is given as lines where standard error is no terminal: for work of minutes, of which
    there are few texts.
    """

    def __init__(self, in_logs: bool = False) -> None:
        self._in_logs = in_logs
        self._terminal = sys.stderr.isatty()
        self._last = float("-inf")
        self._what = ""

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """what: the name of the work. total: None if not known."""
        if time.monotonic() - self._last >= SECONDS or what != self._what:
            self._what = what
            self.show(f"{what}: {done:,}" + (f" of {total:,}" if total else ""))

    def show(self, text: str) -> None:
        """Put this text in place of the last one."""
        if self._terminal:
            self._last = time.monotonic()
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif self._in_logs:
            print(text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Leave an empty line, for something else to be printed."""
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self.clear()
        print(text, file=sys.stderr)
