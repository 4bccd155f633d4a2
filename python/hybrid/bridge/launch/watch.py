"""Is the tab still there? Waits for the end of a run that a tab has."""

from __future__ import annotations

from collections.abc import Callable

from hybrid.bridge.launch.browser import Browser
from hybrid.bridge.launch.desk import Desk
from hybrid.bridge.launch.events import EndEvent
from hybrid.errors import HybridError
from hybrid.training.signals import StopFlag

SILENCE_SECONDS = 30.0  # reports come four times a second; a laptop's lid may be closed for a moment
ABSENCE_SECONDS = 10.0  # after a tab has said that it goes: for the page to be there again, if it is loaded anew
OPENING_SECONDS = 60.0  # for a browser that we have started ourselves
PAUSE_SECONDS = 0.1


class TabLost(HybridError):
    """The tab is gone: closed, crashed, or its browser was. What it had saved stays."""


def wait_for_end(
    desk: Desk, browser: Browser, stop: StopFlag, clock: Callable[[], float], go_on: Callable[[], str]
) -> EndEvent:
    """How the tab ended the run. go_on: where the same command would go on, in words.

    Errors: those that the tab or the desk ended it with; TabLost; StopRequested before any tab took the run.
    """
    opened = clock()
    while not desk.ended.wait(PAUSE_SECONDS):
        problem = browser.problem()
        if not desk.claimed:
            stop.check()
            if problem is None and browser.is_ours and clock() - opened > OPENING_SECONDS:
                problem = f"the browser has not opened the page within {OPENING_SECONDS:g} s"
            if problem is not None:
                problem += browser.says()
        elif problem is None and desk.absence > ABSENCE_SECONDS:
            problem = "the tab was closed"
        elif problem is None and desk.silence > SILENCE_SECONDS:
            problem = f"nothing was heard of the tab for {SILENCE_SECONDS:g} s: it was closed or has crashed"
        if problem is not None and not desk.ended.is_set():
            error = TabLost(f"{problem}; the same command goes on {go_on()}")
            desk.fail(error)
    if desk.error is not None:
        raise desk.error
    assert desk.end is not None
    return desk.end
