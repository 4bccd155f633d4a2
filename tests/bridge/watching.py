"""A watcher of a run: reads server-sent events from a socket, and forgets rows when it is told to."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from bridge.served import TOKEN


@dataclass
class Watcher:
    """What one watcher knows. Connections may come and go; what it was told stays."""

    port: int
    path: str
    last: str = ""
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {"metrics": [], "validation": []})
    record: dict[str, Any] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    gone: bool = False

    @property
    def steps(self) -> list[int]:
        return [row["step"] for row in self.rows["metrics"]]

    def take(self, block: str) -> None:
        """One event."""
        parts = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith((":", "retry")))
        if "event" not in parts:
            return
        value, kind = json.loads(parts["data"]), parts["event"]
        self.last = parts["id"]
        self.events.append(kind)
        if kind in ("entry", "validation"):
            self.rows["metrics" if kind == "entry" else kind].append(value)
        elif kind == "cut":
            rows = self.rows[value["file"]]
            rows[:] = [row for row in rows if row["step"] <= value["step"]]
        elif kind == "run":
            self.record = value
        else:
            self.gone = True

    async def watch(self, until: int | None = None, seconds: float = 30) -> None:
        """Listen until that step has come, or the stream ends."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**24)
        again = f"Last-Event-ID: {self.last}\r\n" if self.last else ""
        writer.write(
            f"GET {self.path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n"
            f"Authorization: token {TOKEN}\r\n{again}\r\n".encode()
        )
        try:
            async with asyncio.timeout(seconds):
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200"), head
                text = ""
                while until is None or not self.steps or self.steps[-1] < until:
                    size = int(await reader.readline(), 16)
                    text += (await reader.readexactly(size + 2))[:-2].decode()
                    *blocks, text = text.split("\n\n")
                    for block in blocks:
                        self.take(block)
                    if not size:
                        return
        finally:
            writer.close()


@dataclass
class WatcherOfMany(Watcher):
    """A watcher of several runs on one stream. runs: one for each, by name."""

    runs: dict[str, Watcher] = field(default_factory=dict)

    @property
    def steps(self) -> list[int]:
        """That which all of them have reached."""
        return [min(one.steps[-1] if one.steps else 0 for one in self.runs.values())]

    def take(self, block: str) -> None:
        parts = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith((":", "retry")))
        if "event" not in parts:
            return
        value = json.loads(parts["data"])
        assert set(value) == {"run", "data"}
        self.last = parts["id"]
        self.events.append(parts["event"])
        self.runs[value["run"]].take(f"id: {parts['id']}\nevent: {parts['event']}\ndata: {json.dumps(value['data'])}")


def watch(watcher: Watcher, until: int | None = None, seconds: float = 30) -> Watcher:
    asyncio.run(watcher.watch(until, seconds))
    return watcher
