"""Files of rows (`metrics.jsonl`, `validation.jsonl`) that another process may be writing, and that may be damaged."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from hybrid.bridge.server.plain import open_plain

LINE_BYTES = 4 * 1024 * 1024  # a row is about 3 KB; a longer line ends what is read of a file
TAIL_BYTES = 256 * 1024
SPAN_BYTES = 64 * 1024
MOST_STEP = 10**15 - 1  # as many digits as the events' places have

Row = dict[str, Any]

_STEP = re.compile(rb'"step":([0-9]{1,15})[,}]')


def parse_row(line: bytes) -> Row | None:
    """The row in a line; None if it is none: cut off, no object, without a step that is one, or with a number that JSON
    has not."""
    try:
        row = json.loads(line, parse_constant=_refuse)
        if isinstance(row, dict) and type(step := row.get("step")) is int and 0 <= step <= MOST_STEP:
            json.dumps(row, allow_nan=False)  # 1e999 is read as infinity
            return row
    except (ValueError, RecursionError):
        pass
    return None


def only(row: Row, fields: Sequence[str] | None) -> Row:
    """The step and these fields of a row; all of it for None."""
    return row if fields is None else {name: row[name] for name in ("step", *fields) if name in row}


def last_row(path: Path) -> Row | None:
    """The last complete row of a file; None if there is none near its end."""
    with opened(path) as file:
        if file is None:
            return None
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        lines = file.read(TAIL_BYTES).split(b"\n")
    return next((row for line in reversed(lines[:-1]) if (row := parse_row(line)) is not None), None)


def rows_after(path: Path, step: int, most: int) -> Iterator[Row]:
    """At most so many rows of later steps. Lines that are no rows are left out."""
    with opened(path) as file:
        if file is None:
            return
        for line in _lines(file, _position(file, step)):
            row = parse_row(line)
            if row is not None and row["step"] > step:
                yield row
                most -= 1
            if most < 1:
                return


def every_nth_row(path: Path, stride: int, last: int) -> Iterator[Row]:
    """The rows whose step is a multiple of the stride, and that of the last step."""
    with opened(path) as file:
        if file is None:
            return
        for line in _lines(file, 0):
            match = _STEP.search(line)
            if match is not None and int(match[1]) % stride and int(match[1]) != last:
                continue  # most lines, without reading all of them
            row = parse_row(line)
            if row is not None and (row["step"] % stride == 0 or row["step"] == last):
                yield row


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO | None]:
    """A plain file for reading; None for one that is not there, is no plain file, or is a link to elsewhere."""
    file = open_plain(path, links=False)
    with file or contextlib.nullcontext():
        yield file


def _lines(file: BinaryIO, begin: int) -> Iterator[bytes]:
    """Complete lines from `begin` on, where one begins."""
    file.seek(begin)
    while (line := file.readline(LINE_BYTES)).endswith(b"\n"):
        yield line


def _position(file: BinaryIO, step: int) -> int:
    """Where a line begins that is at or shortly before the first row of a later step, by halving: rows are in step
    order."""
    low, high = 0, file.seek(0, os.SEEK_END)
    while high - low > SPAN_BYTES:
        middle = (low + high) // 2
        file.seek(middle)
        begin = middle + len(file.readline(LINE_BYTES))
        row = parse_row(file.readline(LINE_BYTES)) if begin < high else None
        if row is None:
            break  # the rest is read line by line
        if row["step"] > step:
            high = middle
        else:
            low = begin
    return low


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
