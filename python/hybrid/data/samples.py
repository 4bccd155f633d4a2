"""What a sample is, what every set of samples offers, and the ledger that says where its tokens went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hybrid.data.batch import IGNORE, Batch


@dataclass(frozen=True)
class Sample:
    """One row of T tokens; ids, targets, positions and segment_ids are uint32 [T], as in `Batch`.

    Segments are numbered 1, 2, ... from left to right, each starts at position 0, and padding (only at the end) has
    id 0, position 0, segment 0 and the target IGNORE.
    """

    ids: NDArray[np.uint32]
    targets: NDArray[np.uint32]
    positions: NDArray[np.uint32]
    segment_ids: NDArray[np.uint32]

    @classmethod
    def padding(cls, sequence_length: int) -> Sample:
        """A row without any token."""
        zeros = np.zeros(sequence_length, dtype=np.uint32)
        return cls(zeros, np.full(sequence_length, IGNORE, dtype=np.uint32), zeros, zeros)


@dataclass(frozen=True)
class Ledger:
    """Where the tokens of a view went. `check` holds for every data set:

    rows * sequence_length == kept + repeated + padded, tokens == kept + target_only + dropped,
    and targets + across_documents == kept + repeated (each token that is read has a target, or none across a border).

    kept: tokens read as input. repeated: read once more, as context in another row. target_only: never read, only
    predicted (the last of a stream or packed document). dropped: neither. padded: places without a token.
    split_documents: documents whose context is cut because they are longer than a row (packing). targets: targets
    that count. across_documents: tokens whose successor belongs to another document, so that it is no target.
    """

    rows: int
    sequence_length: int
    tokens: int
    kept: int
    repeated: int
    target_only: int
    dropped: int
    padded: int
    split_documents: int
    targets: int
    across_documents: int

    def check(self) -> None:
        """AssertionError if the ledger does not add up: then the data set, not the data, is wrong."""
        assert self.rows * self.sequence_length == self.kept + self.repeated + self.padded, self
        assert self.tokens == self.kept + self.target_only + self.dropped, self
        assert self.targets + self.across_documents == self.kept + self.repeated, self

    def to_json(self) -> dict[str, int]:
        """The fields as plain data, camelCase."""
        return {
            "rows": self.rows,
            "sequenceLength": self.sequence_length,
            "tokens": self.tokens,
            "kept": self.kept,
            "repeated": self.repeated,
            "targetOnly": self.target_only,
            "dropped": self.dropped,
            "padded": self.padded,
            "splitDocuments": self.split_documents,
            "targets": self.targets,
            "acrossDocuments": self.across_documents,
        }

    def text(self) -> str:
        """The ledger for people, one line an account."""
        places = self.rows * self.sequence_length
        return (
            f"{self.rows:,} rows of {self.sequence_length:,} = {places:,} places: {self.kept:,} tokens, "
            f"{self.repeated:,} repeated as context, {self.padded:,} padded\n"
            f"{self.tokens:,} tokens: {self.kept:,} read, {self.target_only:,} only predicted, "
            f"{self.dropped:,} dropped\n"
            f"{self.targets:,} targets; {self.across_documents:,} tokens end a document and have none; "
            f"{self.split_documents:,} documents split"
        )


class SampleSet(Protocol):
    """A fixed, numbered set of samples: `WindowDataset` and `PackedDataset`."""

    sequence_length: int
    vocabulary_size: int

    def __len__(self) -> int: ...

    def sample(self, index: int) -> Sample:
        """Sample `index`, 0..len-1. DataContractError for an id outside the vocabulary, naming file and offset."""
        ...

    def target_counts(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many targets each of the samples has, without reading tokens; int64, the shape of `indices`."""
        ...

    @property
    def ledger(self) -> Ledger: ...

    @property
    def fingerprint(self) -> str:
        """The stable hash of everything that determines the samples."""
        ...

    def describe(self) -> dict[str, Any]: ...


def stack(samples: Sequence[Sample], sample_ids: Sequence[int]) -> Batch:
    """The samples as one microbatch [B, T]; sample_ids [B] are their places in the global batch."""
    return Batch(
        ids=np.stack([sample.ids for sample in samples]),
        targets=np.stack([sample.targets for sample in samples]),
        positions=np.stack([sample.positions for sample in samples]),
        segment_ids=np.stack([sample.segment_ids for sample in samples]),
        sample_ids=np.array(sample_ids, dtype=np.uint32),
    )
