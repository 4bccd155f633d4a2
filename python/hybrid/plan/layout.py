"""Fixed arenas: parameters with their gradients and moments, inputs, state, tables, caches.

Parameters of one optimizer group lie side by side, so that the gradient norm and the update are a few dispatches over
flat ranges. The arenas `params`, `grads`, `moment1` and `moment2` have one layout; `half` (f16 copies, mixed precision)
mirrors it at half the offsets.

A matrix has room for rows up to a multiple of four, so that an output head can take four of them at a time whatever the
vocabulary. Like the rest of what lies between two tensors they are zero: buffers begin as zeros, no gradient is ever
written there, and what has neither weight, gradient nor moments stays as it is in every update.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from hybrid.errors import LimitExceeded
from hybrid.models.parameters import ParameterSpec
from hybrid.optim.groups import Group
from hybrid.plan.document import ITEM_BYTES
from hybrid.plan.lowering import Slice, Tensor, padded_rows
from hybrid.plan.memory import aligned
from hybrid.plan.profile import DeviceProfile

# Twice the 256 bytes that WebGPU asks for, so that the f16 mirror of a tensor starts at a 256-byte boundary too.
PARAMETER_ALIGNMENT = 512
MIRRORS = {"grads": "grad/", "moment1": "moment1/", "moment2": "moment2/"}


@dataclass(frozen=True)
class FlatRange:
    """A run of parameters of one group on one page. Bytes; `group` indexes the schedule table's columns."""

    page: int
    begin: int
    end: int
    group: int


@dataclass
class ArenaBuilder:
    """Places tensors one after another into pages of one arena."""

    name: str
    page_bytes: int
    alignment: int = 256

    def __post_init__(self) -> None:
        self.pages: list[int] = [0]

    def place(self, tensor: Tensor, room: int = 0) -> Tensor:
        """Give the tensor its page and offset, with `room` bytes where that is more than its own."""
        size = aligned(max(tensor.bytes, room), self.alignment)
        if size > self.page_bytes:
            raise LimitExceeded(
                f"tensor {tensor.name!r} needs {size} bytes and one buffer of this device holds {self.page_bytes}: "
                f"use a smaller vocabulary or width"
            )
        if self.pages[-1] + size > self.page_bytes:
            self.pages.append(0)
        tensor.page, tensor.offset = len(self.pages) - 1, self.pages[-1]
        self.pages[-1] += size
        return tensor


@dataclass
class ParameterLayout:
    """Tensors by plan name (`<name>`, `grad/<name>`, `moment1/<name>`, `moment2/<name>`, `half/<name>`), page sizes,
    flat ranges."""

    tensors: dict[str, Tensor]
    pages: list[int]
    ranges: list[FlatRange]
    half: bool

    def range_slice(self, arena: str, piece: FlatRange) -> Slice:
        """The bytes of a flat range in `params`, one of its mirrors, or `half`."""
        share = 2 if arena == "half" else 1
        dtype = "f16" if arena == "half" else "f32"
        size = (piece.end - piece.begin) // share
        tensor = Tensor(
            f"{arena} {piece.begin}..{piece.end}",
            (size // ITEM_BYTES[dtype],),
            dtype,
            arena,
            piece.page,
            piece.begin // share,
        )
        return Slice(tensor, 0, size)

    def pieces(self, binding_bytes: int) -> Iterable[FlatRange]:
        """The flat ranges cut to what one binding holds."""
        limit = binding_bytes - binding_bytes % PARAMETER_ALIGNMENT
        for r in self.ranges:
            for begin in range(r.begin, r.end, limit):
                yield FlatRange(r.page, begin, min(begin + limit, r.end), r.group)


def lay_out_parameters(
    specs: Sequence[ParameterSpec], groups: Sequence[Group], profile: DeviceProfile, *, half: bool
) -> ParameterLayout:
    by_name = {spec.name: spec for spec in specs}
    builder = ArenaBuilder("params", profile.page_bytes, PARAMETER_ALIGNMENT)
    tensors: dict[str, Tensor] = {}
    ranges: list[FlatRange] = []
    for index, group in enumerate(groups):
        for name in group.names:
            shape = tuple(by_name[name].shape)
            room = ITEM_BYTES["f32"] * padded_rows(shape[0]) * prod(shape[1:]) if len(shape) > 1 else 0
            master = builder.place(Tensor(name, shape, "f32", "params", group=group.name), room)
            tensors[name] = master
            end = master.offset + aligned(max(master.bytes, room), PARAMETER_ALIGNMENT)
            last = ranges[-1] if ranges else None
            if last and last.group == index and last.page == master.page and last.end == master.offset:
                ranges[-1] = FlatRange(last.page, last.begin, end, index)
            else:
                ranges.append(FlatRange(master.page, master.offset, end, index))
            for arena, prefix in MIRRORS.items():
                tensors[prefix + name] = Tensor(
                    prefix + name, master.shape, "f32", arena, master.page, master.offset, group.name
                )
            if half:
                tensors["half/" + name] = Tensor(
                    "half/" + name, master.shape, "f16", "half", master.page, master.offset // 2
                )
    missing = set(by_name) - {name for group in groups for name in group.names}
    if missing:
        raise ValueError(f"parameters without an optimizer group: {sorted(missing)}")
    return ParameterLayout(tensors, builder.pages, ranges, half)


def place_all(
    arena: str, tensors: Iterable[tuple[str, Sequence[int], str]], profile: DeviceProfile
) -> tuple[dict[str, Tensor], list[int]]:
    """Place (name, shape, dtype) one after another; returns tensors by name and the page sizes."""
    builder = ArenaBuilder(arena, profile.page_bytes)
    placed = {
        name: builder.place(Tensor(name, tuple(shape) if prod(shape) else (1,), dtype, arena))
        for name, shape, dtype in tensors
    }
    return placed, builder.pages
