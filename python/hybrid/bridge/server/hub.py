"""Watchers of run folders: one look at a folder for all who watch it, and every one of them is told everything."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from hybrid.bridge.server.feed import Cursor, News, read_news, signature

POLL_SECONDS = 0.2
KEPT_NEWS = 64  # answers that are kept for others at the same place
SILENCE_SECONDS = 15.0


class Hub:
    """For one event loop; `close` may be called from any thread."""

    def __init__(self, poll_seconds: float = POLL_SECONDS, silence_seconds: float = SILENCE_SECONDS) -> None:
        self.poll_seconds = poll_seconds
        self._silence = silence_seconds
        self._watched: dict[Path, _Watched] = {}
        self.closed = False

    @property
    def watchers(self) -> int:
        """How many there are now."""
        return sum(watched.count for watched in self._watched.values())

    async def follow(self, run_dir: Path, at: Cursor) -> AsyncGenerator[News, None]:
        """What happens in a run from that place on, until the run is gone or the hub is closed. News without events
        come when nothing has happened for a while."""
        watched = self._watched.setdefault(run_dir, _Watched(self, run_dir))
        with watched:
            while not self.closed:
                version = watched.version
                news = await watched.read(at)
                at = news.at
                if news.events:
                    yield news
                if any(event.kind == "gone" for event in news.events):
                    return
                if not news.more and not await watched.changed(version, self._silence):
                    yield News((), at)

    async def follow_all(
        self, run_dirs: Sequence[Path], places: Sequence[Cursor]
    ) -> AsyncGenerator[tuple[int, News], None]:
        """The same of several runs, and which one of them it is about, until all are gone."""
        streams = [self.follow(run_dir, at) for run_dir, at in zip(run_dirs, places, strict=True)]
        waiting = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    index = waiting.pop(task)
                    try:
                        news = task.result()
                    except StopAsyncIteration:
                        continue
                    waiting[asyncio.ensure_future(anext(streams[index]))] = index
                    yield index, news
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            for stream in streams:
                await stream.aclose()

    def close(self) -> None:
        """Every watcher is told no more, within `poll_seconds`."""
        self.closed = True

    def forget(self, run_dir: Path) -> None:
        del self._watched[run_dir]


class _Watched:
    """One run folder with its watchers."""

    def __init__(self, hub: Hub, run_dir: Path) -> None:
        self._hub = hub
        self._run_dir = run_dir
        self._news: dict[Cursor, News] = {}
        self._reading = asyncio.Lock()
        self._news_came = asyncio.Event()
        self._poll: asyncio.Task[None] | None = None
        self.version = 0
        self.count = 0

    def __enter__(self) -> None:
        self.count += 1
        if self._poll is None:
            self._poll = asyncio.create_task(self._look())

    def __exit__(self, *error: object) -> None:
        self.count -= 1
        if not self.count and self._poll is not None:
            self._poll.cancel()
            self._hub.forget(self._run_dir)

    async def read(self, at: Cursor) -> News:
        """The news from a place on; read once for all who stand there."""
        async with self._reading:
            news = self._news.get(at)
            if news is None:
                version = self.version
                news = await asyncio.to_thread(read_news, self._run_dir, at)
                if version == self.version:
                    if len(self._news) >= KEPT_NEWS:
                        self._news.clear()
                    self._news[at] = news
            return news

    async def changed(self, version: int, seconds: float) -> bool:
        """Wait until there may be news; False if there were none for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.version == version:
                    await self._news_came.wait()
        return self.version != version

    async def _look(self) -> None:
        known: Any = None
        while True:
            found = await asyncio.to_thread(signature, self._run_dir)
            if found != known or self._hub.closed:
                known = found
                self._news.clear()
                self.version += 1
                came, self._news_came = self._news_came, asyncio.Event()
                came.set()
            await asyncio.sleep(self._hub.poll_seconds)
