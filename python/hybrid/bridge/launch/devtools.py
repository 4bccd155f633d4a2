"""What Chromium says through its debugging pipe about the page that it shows: that it has crashed, or was closed."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from typing import Any

PIECE_BYTES = 65536
DISCOVER = {"id": 1, "method": "Target.setDiscoverTargets", "params": {"discover": True}}


class PageWatch:
    """Listens in a thread of its own until the pipe ends. commands, answers: the pipe's ends. url: of the page.

    Messages are JSON with a zero byte behind each (`--remote-debugging-pipe`); the domain is `Target` of the Chrome
    DevTools Protocol.
    """

    def __init__(self, commands: int, answers: int, url: str) -> None:
        self.problem: str | None = None
        self._answers = answers
        self._url = url
        self._pages: set[str] = set()
        with contextlib.suppress(OSError):  # it has ended already, which others notice
            os.write(commands, json.dumps(DISCOVER).encode() + b"\0")
        self._thread = threading.Thread(target=self._listen, name="devtools", daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Wait for the end of the pipe."""
        self._thread.join(seconds)

    def _listen(self) -> None:
        rest = b""
        with contextlib.suppress(OSError):
            while piece := os.read(self._answers, PIECE_BYTES):
                *messages, rest = (rest + piece).split(b"\0")
                for message in messages:
                    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # of another version
                        self._hear(json.loads(message))

    def _hear(self, message: dict[str, Any]) -> None:
        method, facts = message.get("method"), message.get("params", {})
        if method in ("Target.targetCreated", "Target.targetInfoChanged"):
            info = facts["targetInfo"]
            if info["type"] == "page" and info["url"].startswith(self._url):
                self._pages.add(info["targetId"])
        elif method == "Target.targetCrashed" and facts["targetId"] in self._pages:
            self.problem = self.problem or f"the page has crashed ({facts['status']}, code {facts['errorCode']})"
        elif method == "Target.targetDestroyed" and facts["targetId"] in self._pages:
            self.problem = self.problem or "the tab was closed"
