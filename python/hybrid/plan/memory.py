"""Where temporary tensors live: two colours of pages, offsets by liveness.

Within one dispatch a page may not be read through one binding and written through another, so temporaries are coloured
"ping" or "pong" such that outputs avoid the colour of their inputs where that is possible. Where it is not (a backward
kernel reads both colours), the kernel's read bindings on the shared page are declared writable (`Lowering.upgrade`).
Offsets are then packed per colour: largest first, at the lowest place that no tensor alive at the same time occupies.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from heapq import heappop, heappush

from hybrid.errors import LimitExceeded

ALIGNMENT = 256
COLOURS = 2


@dataclass(eq=False)
class Temporary:
    """A tensor that lives inside one program, from the command that first writes it to the one that last touches it
    (inclusive)."""

    name: str
    bytes: int
    first: int
    last: int
    colour: int = 0
    page: int = -1
    offset: int = -1


def aligned(size: int, alignment: int = ALIGNMENT) -> int:
    return -(-size // alignment) * alignment


def colour(written: list[tuple[Temporary, list[Temporary]]], count: int) -> None:
    """Choose colours in execution order. `written`: each temporary with the other temporaries its first command
    touches.

    A new temporary takes the colour that conflicts with fewer of those, and of equals the one with fewer bytes alive.
    """
    alive: list[tuple[int, int, Temporary]] = []  # a heap by last command
    live_bytes = [0] * COLOURS
    for number, (temporary, neighbours) in enumerate(written):
        while alive and alive[0][0] < temporary.first:
            gone = heappop(alive)[2]
            live_bytes[gone.colour] -= gone.bytes
        conflicts = [sum(1 for n in neighbours if n.colour == c and n is not temporary) for c in range(COLOURS)]
        temporary.colour = min(range(COLOURS), key=lambda c: (conflicts[c], live_bytes[c], c))
        heappush(alive, (temporary.last, number, temporary))
        live_bytes[temporary.colour] += temporary.bytes


# A tensor in a page: offset, first byte behind it, first and last command.
_Place = tuple[int, int, int, int]


def pack(temporaries: list[Temporary], page_bytes: int) -> list[int]:
    """Assign page and offset to temporaries of one colour; returns the bytes each page needs. No tensor straddles
    pages."""
    pages: list[list[_Place]] = []  # each by offset
    heights: list[int] = []
    for t in sorted(temporaries, key=lambda t: (-t.bytes, t.first, t.name)):
        size = aligned(t.bytes)
        if size > page_bytes:
            raise LimitExceeded(
                f"temporary tensor {t.name!r} needs {size} bytes and one buffer holds {page_bytes}: use a "
                "smaller batch or sequence"
            )
        for page in range(len(pages) + 1):
            if page == len(pages):
                pages.append([])
                heights.append(0)
            offset = _lowest_gap(pages[page], t, size)
            if offset + size <= page_bytes:
                t.page, t.offset = page, offset
                insort(pages[page], (offset, offset + size, t.first, t.last))
                heights[page] = max(heights[page], offset + size)
                break
    return heights


def _lowest_gap(page: list[_Place], t: Temporary, size: int) -> int:
    """Where `size` bytes are free as long as `t` lives. This loop is most of the time that a deep model takes."""
    position, first, last = 0, t.first, t.last
    for start, end, begins, ends in page:
        if begins <= last and first <= ends:
            if position + size <= start:
                break
            if end > position:
                position = end
    return position
