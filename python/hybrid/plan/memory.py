"""Where temporary tensors live: two colours of pages, offsets by liveness.

Within one dispatch a page may not be read through one binding and written through another, so temporaries are coloured
"ping" or "pong" such that outputs avoid the colour of their inputs where that is possible. Where it is not (a backward
kernel reads both colours), the kernel's read bindings on the shared page are declared writable (`Lowering.upgrade`).
Offsets are then packed per colour: largest first, at the lowest place that no tensor alive at the same time occupies.
"""

from __future__ import annotations

from dataclasses import dataclass

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

    def overlaps(self, other: Temporary) -> bool:
        return self.first <= other.last and other.first <= self.last


def aligned(size: int, alignment: int = ALIGNMENT) -> int:
    return -(-size // alignment) * alignment


def colour(written: list[tuple[Temporary, list[Temporary]]], count: int) -> None:
    """Choose colours in execution order. `written`: each temporary with the other temporaries its first command
    touches.

    A new temporary takes the colour that conflicts with fewer of those, and of equals the one with fewer bytes alive.
    """
    alive: list[Temporary] = []
    live_bytes = [0] * COLOURS
    for temporary, neighbours in written:
        for other in [t for t in alive if t.last < temporary.first]:
            alive.remove(other)
            live_bytes[other.colour] -= other.bytes
        conflicts = [sum(1 for n in neighbours if n.colour == c and n is not temporary) for c in range(COLOURS)]
        temporary.colour = min(range(COLOURS), key=lambda c: (conflicts[c], live_bytes[c], c))
        alive.append(temporary)
        live_bytes[temporary.colour] += temporary.bytes


def pack(temporaries: list[Temporary], page_bytes: int) -> list[int]:
    """Assign page and offset to temporaries of one colour; returns the bytes each page needs. No tensor straddles
    pages."""
    pages: list[list[Temporary]] = []
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
            offset = _lowest_gap([o for o in pages[page] if o.overlaps(t)], size)
            if offset + size <= page_bytes:
                t.page, t.offset = page, offset
                pages[page].append(t)
                heights[page] = max(heights[page], offset + size)
                break
    return heights


def _lowest_gap(occupied: list[Temporary], size: int) -> int:
    position = 0
    for other in sorted(occupied, key=lambda o: o.offset):
        if position + size <= other.offset:
            break
        position = max(position, other.offset + aligned(other.bytes))
    return position
