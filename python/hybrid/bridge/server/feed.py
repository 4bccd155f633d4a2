"""What happens in a run folder, as events, from any place on.

An event names the place behind it (its id), so a watcher that was cut off goes on there: where each file was read to,
the step of its last row, and a checksum of the bytes before. If those are no more what they were (a resume has taken
steps back, or another run has the folder), a `cut` says that all rows are to be forgotten, and they come again.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybrid.bridge.server.rows import LINE_BYTES, opened, parse_row
from hybrid.bridge.server.runs import described
from hybrid.training.lock import is_abandoned
from hybrid.training.metrics_log import METRICS, VALIDATION
from hybrid.training.run_files import RUN_FILE

BLOCK_BYTES = 256 * 1024
SEAL_BYTES = 4096  # covers the last row, which has times in it that no other one has
FILES = {"entry": METRICS, "validation": VALIDATION}

_ID = re.compile(
    r"([0-9]{1,15})\.([0-9]{1,15})\.([0-9]{1,10})-([0-9]{1,15})\.([0-9]{1,15})\.([0-9]{1,10})-([0-9]{1,10})"
)


@dataclass(frozen=True)
class Place:
    """In a file of rows. seal: the checksum of the bytes before `offset`, at most SEAL_BYTES of them."""

    offset: int = 0
    step: int = 0
    seal: int = 0


@dataclass(frozen=True)
class Cursor:
    """What a watcher has been told. record: the checksum of what run.json said."""

    entry: Place = Place()
    validation: Place = Place()
    record: int = 0

    @property
    def id(self) -> str:
        places = (f"{place.offset}.{place.step}.{place.seal}" for place in (self.entry, self.validation))
        return "-".join([*places, str(self.record)])

    def moved(self, kind: str, place: Place) -> Cursor:
        """The same with another place in the file of this kind of rows."""
        return replace(self, entry=place) if kind == "entry" else replace(self, validation=place)

    @staticmethod
    def parse(text: str) -> Cursor:
        """The cursor of an id; the beginning for a text that is none."""
        match = _ID.fullmatch(text)
        if match is None:
            return Cursor()
        numbers = [int(number) for number in match.groups()]
        return Cursor(Place(*numbers[0:3]), Place(*numbers[3:6]), numbers[6])


@dataclass(frozen=True)
class Event:
    """kind: run, entry, validation, cut, or gone. value: plain JSON. at: the place behind it."""

    kind: str
    value: dict[str, Any]
    at: Cursor


@dataclass(frozen=True)
class News:
    """Some events, where they end, and whether there is more to read already."""

    events: tuple[Event, ...]
    at: Cursor
    more: bool = False


def end_of(run_dir: Path) -> Cursor:
    """The place behind all rows that are there now; what run.json says is still to be told."""
    at = Cursor()
    for kind, name in FILES.items():
        with opened(run_dir / name) as file:
            if file is not None:
                begin = max(0, file.seek(0, os.SEEK_END) - BLOCK_BYTES)
                file.seek(begin)
                data = file.read(BLOCK_BYTES)
                end = data.rfind(b"\n") + 1  # none: the rows are told from the beginning
                rows = (parse_row(line) for line in reversed(data[:end].splitlines()))
                step = next((row["step"] for row in rows if row is not None), 0)
                place = Place(begin + end, step, zlib.crc32(data[max(0, end - SEAL_BYTES) : end]))
                at = at.moved(kind, place if end else Place())
    return at


def signature(run_dir: Path) -> tuple[Any, ...]:
    """Something that is another one whenever there may be news."""
    return (is_abandoned(run_dir), *(_facts(run_dir / name) for name in ("", RUN_FILE, *FILES.values())))


def read_news(run_dir: Path, at: Cursor) -> News:
    """What a watcher who stands there has not been told, a block of each file at most. The last event is `gone` when
    there is no such run any more."""
    if not run_dir.is_dir():
        return News((Event("gone", {"name": run_dir.name}, at),), at)
    events: list[Event] = []
    facts = described(run_dir)
    seal = zlib.crc32(json.dumps(facts).encode()) or 1
    if seal != at.record:
        at = replace(at, record=seal)
        events.append(Event("run", facts, at))
    more = False
    for kind, name in FILES.items():
        at, rest = _read_rows(run_dir / name, kind, at, events)
        more |= rest
    return News(tuple(events), at, more)


def _read_rows(path: Path, kind: str, at: Cursor, events: list[Event]) -> tuple[Cursor, bool]:
    """Adds the rows behind a place to the events; where that ends, and whether there is more."""
    place = at.entry if kind == "entry" else at.validation
    position = known = min(place.offset, SEAL_BYTES)
    data = _bytes(path, place.offset - known, known + BLOCK_BYTES)
    if zlib.crc32(data[:known]) != place.seal:
        at = at.moved(kind, Place())
        events.append(Event("cut", {"file": path.stem, "step": 0}, at))
        return at, True
    while (end := data.find(b"\n", position) + 1) > 0:
        row = parse_row(data[position:end])
        step = place.step if row is None else row["step"]
        place = Place(place.offset + end - position, step, zlib.crc32(data[max(0, end - SEAL_BYTES) : end]))
        at, position = at.moved(kind, place), end
        if row is not None:
            events.append(Event(kind, row, at))
    return at, position > known and len(data) - known >= BLOCK_BYTES


def _bytes(path: Path, begin: int, count: int) -> bytes:
    """Some bytes of a file, and the rest of their line where they hold no whole one; none of a file that is gone."""
    with opened(path) as file:
        if file is None:
            return b""
        file.seek(begin)
        data = file.read(count)
        return data if b"\n" in data[-BLOCK_BYTES:] else data + file.readline(LINE_BYTES)


def _facts(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
