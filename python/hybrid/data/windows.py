"""Windows: the stream of tokens cut into rows of equal length."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid.contracts.stable_json import stable_hash
from hybrid.data.batch import IGNORE
from hybrid.data.samples import Ledger, Sample
from hybrid.data.split import TokenView, name_of
from hybrid.errors import ConfigError, DataContractError


class WindowDataset:
    """Rows of T tokens from a stream of N: row k reads tokens k*stride .. k*stride + T - 1 and predicts the next of
    each.

    Neighbouring windows share the token at their border (the last target of one is the first token of the next), and
    the last row is padded, so no target is lost. With a stride below T, rows overlap and targets count once for each
    row that has them; stride 1 has a row for every offset.

    isolate_documents: each document is a segment of its own with positions from 0, and the last token of a document
    has no target. Otherwise a row is one segment and the borders are invisible.
    """

    def __init__(
        self, view: TokenView, sequence_length: int, *, stride: int | None = None, isolate_documents: bool = True
    ) -> None:
        """DataContractError for a view without any target (fewer than two tokens, or only one-token documents)."""
        stride = sequence_length if stride is None else stride
        if sequence_length < 1:
            raise ConfigError(f"the sequence length is {sequence_length}, expected at least 1")
        if not 1 <= stride <= sequence_length:
            raise ConfigError(f"the stride is {stride}, expected 1..{sequence_length}: a longer one would skip tokens")
        if len(view) < 2:
            raise DataContractError(
                f"the {view.name} part of the text has {len(view)} token: nothing to predict; add text"
            )
        self.view = view
        self.sequence_length = sequence_length
        self.stride = stride
        self.isolate_documents = isolate_documents
        self.vocabulary_size = view.vocabulary_size
        # Most rows lie within one document; these arrays are shared by all of them.
        self._count_up = np.arange(sequence_length, dtype=np.uint32)
        self._ones = np.ones(sequence_length, dtype=np.uint32)
        self._count_up.flags.writeable = self._ones.flags.writeable = False
        # The last row is the first that reaches the last token, N - 1, as a target.
        self._rows = 1 + max(0, -(-(len(view) - 1 - sequence_length) // stride))
        # Where documents begin in the stream, the first one excepted: no target reaches across these.
        self._borders = view.bounds[1:-1] if isolate_documents else view.bounds[:0]
        if self._borders.size == len(view) - 1:
            raise DataContractError(
                f"the {view.name} part of the text has only documents of one token: nothing to predict; add text"
            )

    def __len__(self) -> int:
        return self._rows

    def sample(self, index: int) -> Sample:
        if not 0 <= index < self._rows:
            raise DataContractError(
                f"there is no sample {index} in the {name_of(self.view)}, expected 0..{self._rows - 1}"
            )
        length = self.sequence_length
        begin = index * self.stride
        end = min(begin + length + 1, len(self.view))
        tokens = self.view.read(begin, end)
        count = len(tokens) - 1
        first, last = np.searchsorted(self._borders, (begin + 1, end))
        if count == length and first == last:
            return Sample(tokens[:-1], tokens[1:], self._count_up, self._ones)
        ids, positions, segment_ids = (np.zeros(length, dtype=np.uint32) for _ in range(3))
        targets = np.full(length, IGNORE, dtype=np.uint32)
        ids[:count] = tokens[:-1]
        targets[:count] = tokens[1:]
        borders = self._borders[first:last] - begin  # in 1..count
        targets[borders - 1] = IGNORE
        starts = np.concatenate(([0], borders[borders < count]))
        sizes = np.diff(np.append(starts, count))
        segment_ids[:count] = np.repeat(np.arange(1, len(starts) + 1), sizes)
        positions[:count] = np.arange(count) - np.repeat(starts, sizes)
        return Sample(ids, targets, positions, segment_ids)

    def target_counts(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        begins = indices * self.stride
        ends = np.minimum(begins + self.sequence_length + 1, len(self.view))
        borders = np.searchsorted(self._borders, ends) - np.searchsorted(self._borders, begins + 1)
        return ends - begins - 1 - borders

    @cached_property
    def ledger(self) -> Ledger:
        rows, length, tokens = self._rows, self.sequence_length, len(self.view)
        kept = tokens - 1
        used = (rows - 1) * length + (tokens - 1 - (rows - 1) * self.stride)
        across = used - int(self.target_counts(np.arange(rows)).sum())
        ledger = Ledger(
            rows=rows,
            sequence_length=length,
            tokens=tokens,
            kept=kept,
            repeated=used - kept,
            target_only=1,
            dropped=0,
            padded=rows * length - used,
            split_documents=0,
            targets=used - across,
            across_documents=across,
        )
        ledger.check()
        return ledger

    @property
    def fingerprint(self) -> str:
        return stable_hash({"view": self.view.fingerprint, "samples": self._settings()})

    def describe(self) -> dict[str, Any]:
        return {**self.view.describe(), "samples": self._settings(), "ledger": self.ledger.to_json()}

    def _settings(self) -> dict[str, Any]:
        return {
            "mode": "windows",
            "sequenceLength": self.sequence_length,
            "stride": self.stride,
            "isolateDocuments": self.isolate_documents,
        }
