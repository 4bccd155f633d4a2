"""Batches of a script's own, without NumPy: arrays of unsigned 32-bit words."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hybrid.errors import DataContractError
from hybrid.random.shuffle import permute
from hybrid.random.streams import stream_key

IGNORE = 0xFFFFFFFF  # the target id that is no target
WORD = "I" if array("I").itemsize == 4 else "L"


@dataclass(frozen=True)
class Batch:
    """B rows of T tokens, as `hybrid.data.batch.Batch` has them, row after row.

    ids, targets, positions, segment_ids: B*T words each. sample_ids: B words.
    """

    ids: Sequence[int]
    targets: Sequence[int]
    positions: Sequence[int]
    segment_ids: Sequence[int]
    sample_ids: Sequence[int]

    @property
    def target_tokens(self) -> int:
        """How many targets count."""
        return sum(target != IGNORE for target in self.targets)

    def words(self) -> array[int]:
        """All of it in one array, in the order of the fields: it crosses the border in one piece."""
        count = len(self.ids)
        if any(len(part) != count for part in (self.targets, self.positions, self.segment_ids)):
            raise DataContractError(f"a batch of {count} ids needs as many targets, positions and segment ids")
        words = array(WORD)
        for part in (self.ids, self.targets, self.positions, self.segment_ids, self.sample_ids):
            words.extend(part)
        return words


def byte_batches(
    text: str | bytes, *, batch_size: int, sequence_length: int, steps: int, seed: int = 1337
) -> Iterator[Batch]:
    """Batches of windows of a text's bytes (a vocabulary of 256), each window once an epoch, in an order that follows
    from the seed. DataContractError for a text shorter than one window."""
    data = text.encode("utf-8") if isinstance(text, str) else text
    windows = (len(data) - 1) // sequence_length
    if windows < 1:
        raise DataContractError(
            f"a text of {len(data)} bytes has no window of {sequence_length} tokens and a target for each"
        )
    positions = [*range(sequence_length)] * batch_size
    segments = [1] * (sequence_length * batch_size)
    samples = [*range(batch_size)]
    for step in range(steps):
        ids, targets = bytearray(), bytearray()
        for row in range(step * batch_size, (step + 1) * batch_size):
            epoch, place = divmod(row, windows)
            start = permute(place, windows, stream_key(seed, f"windows/{epoch}")) * sequence_length
            ids += data[start : start + sequence_length]
            targets += data[start + 1 : start + 1 + sequence_length]
        yield Batch(ids, targets, positions, segments, samples)
