"""Packing: whole documents side by side in rows, as few rows as best-fit finds."""

from __future__ import annotations

from collections import deque
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid.contracts.stable_json import stable_hash
from hybrid.data.batch import IGNORE
from hybrid.data.samples import Ledger, Sample
from hybrid.data.split import TokenView, name_of
from hybrid.errors import ConfigError, DataContractError


class PackedDataset:
    """Rows of T tokens, each holding pieces of documents as isolated segments with positions from 0.

    A document of n tokens needs n - 1 places (its last token is only predicted). A longer one than T is split into
    pieces of T places and a rest; the piece after a cut begins with the token that the piece before it predicted
    last, so no target is lost, only context. Pieces go, longest first, into the fullest row that still has room (the
    oldest of such). Everything is determined by the document lengths. A document of one token has no target and is
    dropped.
    """

    def __init__(self, view: TokenView, sequence_length: int) -> None:
        """DataContractError for a view without any target."""
        if sequence_length < 1:
            raise ConfigError(f"the sequence length is {sequence_length}, expected at least 1")
        self.view = view
        self.sequence_length = sequence_length
        self.vocabulary_size = view.vocabulary_size
        places = np.diff(view.bounds) - 1
        if not places.any():
            raise DataContractError(
                f"the {view.name} part of the text has only documents of one token: nothing to predict; add text"
            )
        begins, sizes = _cut(view.bounds[:-1], places, sequence_length)
        rows = _best_fit(sizes, sequence_length)
        order = np.array([piece for row in rows for piece in row], dtype=np.int64)
        self._begins, self._sizes = begins[order], sizes[order]  # int64 [pieces], in the order of the rows
        self._row_bounds = np.concatenate(([0], np.cumsum([len(row) for row in rows])))  # int64 [rows + 1]
        self._places = places

    def __len__(self) -> int:
        return len(self._row_bounds) - 1

    def sample(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise DataContractError(
                f"there is no sample {index} in the {name_of(self.view)}, expected 0..{len(self) - 1}"
            )
        length = self.sequence_length
        ids, positions, segment_ids = (np.zeros(length, dtype=np.uint32) for _ in range(3))
        targets = np.full(length, IGNORE, dtype=np.uint32)
        at = 0
        first, last = self._row_bounds[index : index + 2]
        for segment, piece in enumerate(range(first, last), start=1):
            begin, size = int(self._begins[piece]), int(self._sizes[piece])
            tokens = self.view.read(begin, begin + size + 1)
            place = slice(at, at + size)
            ids[place] = tokens[:-1]
            targets[place] = tokens[1:]
            positions[place] = np.arange(size)
            segment_ids[place] = segment
            at += size
        return Sample(ids, targets, positions, segment_ids)

    def target_counts(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._row_totals[indices]

    @cached_property
    def _row_totals(self) -> NDArray[np.int64]:
        return np.add.reduceat(self._sizes, self._row_bounds[:-1])

    @cached_property
    def ledger(self) -> Ledger:
        filled = int(self._sizes.sum())
        dropped = int(np.count_nonzero(self._places == 0))
        ledger = Ledger(
            rows=len(self),
            sequence_length=self.sequence_length,
            tokens=len(self.view),
            kept=filled,
            repeated=0,
            target_only=len(self._places) - dropped,
            dropped=dropped,
            padded=len(self) * self.sequence_length - filled,
            split_documents=int(np.count_nonzero(self._places > self.sequence_length)),
            targets=filled,
            across_documents=0,
        )
        ledger.check()
        return ledger

    @property
    def fingerprint(self) -> str:
        return stable_hash({"view": self.view.fingerprint, "samples": self._settings()})

    def describe(self) -> dict[str, Any]:
        return {**self.view.describe(), "samples": self._settings(), "ledger": self.ledger.to_json()}

    def _settings(self) -> dict[str, Any]:
        return {"mode": "packed", "sequenceLength": self.sequence_length}


def _cut(
    starts: NDArray[np.int64], places: NDArray[np.int64], length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each piece begins in the stream and how many places it takes (1..length), in the order of the documents."""
    counts = -(-places // length)
    number = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)  # of a piece in its document
    begins = np.repeat(starts, counts) + number * length
    sizes = np.minimum(np.repeat(places, counts) - number * length, length)
    return begins, sizes


def _best_fit(sizes: NDArray[np.int64], length: int) -> list[list[int]]:
    """Rows of pieces: best-fit decreasing, ties by order of appearance."""
    rows: list[list[int]] = []
    by_room: list[deque[int]] = [deque() for _ in range(length + 1)]
    open_rooms = 0  # bit r is set iff some row has room r > 0: the least sufficient room is one bit operation away
    for piece in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[piece])
        sufficient = open_rooms >> size
        if sufficient:
            room = size + (sufficient & -sufficient).bit_length() - 1
            row = by_room[room].popleft()
            if not by_room[room]:
                open_rooms &= ~(1 << room)
        else:
            room, row = length, len(rows)
            rows.append([])
        rows[row].append(piece)
        room -= size
        if room:
            by_room[room].append(row)
            open_rooms |= 1 << room
    return rows
