"""Where a tab reports: which tab has the run, what it said last, and how it ended.

The server's threads report here, and the main thread watches.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from hybrid.bridge.launch.events import AnyEvent, EndEvent, ErrorEvent, Report
from hybrid.bridge.launch.tab_errors import error_of
from hybrid.bridge.server.refusals import Refusal
from hybrid.errors import ConfigError, HybridError
from hybrid.training.signals import StopFlag

TAKEOVER_SECONDS = 3.0  # a tab that was heard of this recently is still there, and keeps the run
FAREWELL_SECONDS = 1.0  # what comes this long after a farewell was on its way before

_TAB = re.compile(r"[A-Za-z0-9-]{1,64}\Z")


class Desk:
    """One run's reports. apply: does what an event says. clock: seconds.

    A tab is one load of the page; it names itself. It takes the run with `claim`, and after that only its requests
    count, until another one claims the run: the page after a reload, say.
    """

    def __init__(self, apply: Callable[[AnyEvent], None], stop: StopFlag, clock: Callable[[], float]) -> None:
        self._apply = apply
        self._stop = stop
        self._clock = clock
        self._lock = threading.RLock()
        self._tab: str | None = None
        self._sequence = 0
        self._busy = 0
        self._heard = self._seen = clock()  # when the tab last said something, and was last answered
        self._left: float | None = None  # when the tab said that it was going
        self.ended = threading.Event()
        self.end: EndEvent | None = None
        self.error: BaseException | None = None

    @property
    def claimed(self) -> bool:
        """Whether any tab has taken the run."""
        return self._tab is not None

    @property
    def silence(self) -> float:
        """Seconds since the tab that has the run was heard of; 0 while a request of it is being answered."""
        with self._lock:
            return 0.0 if self._busy else self._clock() - self._seen

    @property
    def absence(self) -> float:
        """Seconds since the tab that has the run said that it was going; 0 if it did not, or is being answered."""
        with self._lock:
            return 0.0 if self._busy or self._left is None else self._clock() - self._left

    def leave(self, tab: str | None) -> None:
        """The tab is going: it is closed, or loaded again, and then another one claims the run. Errors: Refusal."""
        with self._lock:
            self._check_open()
            if _checked(tab) != self._tab:
                raise _elsewhere()
            self._left = self._clock()

    @contextmanager
    def claim(self, tab: str | None) -> Iterator[None]:
        """Give the run to a tab, and hold every other request off until the block is done. Errors: Refusal."""
        with self._lock:
            self._check_open()
            name = _checked(tab)
            lives = self._left is None and self._clock() - self._heard < TAKEOVER_SECONDS
            if self._tab not in (None, name) and lives:
                raise _elsewhere()
            if self._busy:  # with what a page that was loaded again has left: a checkpoint, say
                raise _elsewhere(busy=True)
            self._tab, self._sequence, self._left = name, 0, None
            self._hear()
            yield
            self._hear()

    @contextmanager
    def request(self, tab: str | None) -> Iterator[None]:
        """Inside, the tab is being answered. Errors: Refusal for a tab that does not have the run, and after its
        end."""
        with self._lock:
            self._check_open()
            if _checked(tab) != self._tab:
                raise _elsewhere()
            self._busy += 1
            self._hear()
        try:
            yield
        finally:
            with self._lock:
                self._busy -= 1
                self._seen = self._clock()

    def report(self, tab: str | None, report: Report) -> dict[str, Any]:
        """Do what the events say, once; the answer. Errors: Refusal. Whatever goes wrong with one event ends the
        run: those before it have happened, and those after it cannot."""
        with self._lock:
            self._check_open()
            if _checked(tab) != self._tab:
                raise _elsewhere()
            self._hear()
            expected = self._sequence + 1
            if report.sequence > expected:
                error = ConfigError(f"events: report {report.sequence} came before report {expected}")
                raise Refusal(HTTPStatus.CONFLICT, error, {"expected": expected})
            if report.sequence == expected:
                self._sequence = expected
                try:
                    for event in report.events:
                        self._take(event)
                except BaseException as error:
                    self.fail(error)
                    raise self._gone() from error
            return {"stop": self._stop.reason}

    def fail(self, error: BaseException) -> None:
        """The run ends with this error, unless it has ended already."""
        with self._lock:
            if not self.ended.is_set():
                self.error = error
                self.ended.set()

    def _hear(self) -> None:
        now = self._clock()
        self._heard = self._seen = now
        if self._left is not None and now - self._left > FAREWELL_SECONDS:
            self._left = None  # it has come back, out of the browser's memory of pages

    def _take(self, event: AnyEvent) -> None:
        if self.ended.is_set():
            raise ConfigError(f"events: {event.kind} came after the end")
        if isinstance(event, EndEvent):
            self._apply(event)
            self.end = event
            self.ended.set()
        elif isinstance(event, ErrorEvent):
            self.fail(error_of(event))
        else:
            self._apply(event)

    def _check_open(self) -> None:
        if self.ended.is_set():
            raise self._gone()

    def _gone(self) -> Refusal:
        return Refusal(HTTPStatus.GONE, self.error or HybridError("the run has ended; start the command again"))


def _checked(tab: str | None) -> str:
    if tab is None or not _TAB.match(tab):
        raise Refusal(HTTPStatus.BAD_REQUEST, ConfigError("the header x-hybrid-tab names no tab"))
    return tab


def _elsewhere(busy: bool = False) -> Refusal:
    message = "this run is already open in another tab: close that one, or this one"
    return Refusal(HTTPStatus.CONFLICT, ConfigError(message), {"busy": True} if busy else None)
