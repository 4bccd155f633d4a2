"""Packing: the same targets as unpacked documents, few rows, and a ledger that adds up."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.corpora import store_of, view_of
from data.test_windows import check_row, in_one_folder
from hybrid.data.batch import IGNORE
from hybrid.data.packing import PackedDataset
from hybrid.data.split import TokenView
from hybrid.errors import ConfigError, DataContractError

Segment = tuple[tuple[int, ...], tuple[int, ...]]


def segments(dataset: PackedDataset) -> Counter[Segment]:
    """Every segment of every row as (ids, targets)."""
    found: Counter[Segment] = Counter()
    for index in range(len(dataset)):
        sample = dataset.sample(index)
        for number in range(1, int(sample.segment_ids.max()) + 1):
            place = sample.segment_ids == number
            found[tuple(sample.ids[place].tolist()), tuple(sample.targets[place].tolist())] += 1
    return found


def unpacked(view: TokenView, length: int) -> Counter[Segment]:
    """Every document alone: cut into pieces of `length` inputs, each predicting its next token."""
    found: Counter[Segment] = Counter()
    for begin, end in zip(view.bounds[:-1].tolist(), view.bounds[1:].tolist(), strict=True):
        tokens = tuple(view.read(begin, end).tolist())
        for start in range(0, len(tokens) - 1, length):
            piece = tokens[start : start + length + 1]
            found[piece[:-1], piece[1:]] += 1
    return found


@in_one_folder
@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=20), length=st.integers(1, 12))
def test_packed_equals_unpacked(tmp_path: Path, lengths: list[int], length: int) -> None:
    if max(lengths) < 2:
        return
    view = view_of(tmp_path, lengths)
    dataset = PackedDataset(view, length)
    assert segments(dataset) == unpacked(view, length)
    counts = []
    for index in range(len(dataset)):
        sample = dataset.sample(index)
        check_row(sample, length)
        counts.append(int(np.count_nonzero(sample.targets != IGNORE)))
        assert counts[-1] == np.count_nonzero(sample.segment_ids)
    assert dataset.target_counts(np.arange(len(dataset))).tolist() == counts
    ledger = dataset.ledger
    ledger.check()
    assert ledger.targets == sum(counts) == sum(max(0, size - 1) for size in lengths)
    assert ledger.dropped == lengths.count(1)
    assert ledger.split_documents == sum(size - 1 > length for size in lengths)


@pytest.mark.parametrize("tokens", [2, 7, 8, 9, 10, 16, 17, 18])
def test_lengths_around_the_row(tmp_path: Path, tokens: int) -> None:
    dataset = PackedDataset(view_of(tmp_path, [tokens]), 8)
    assert len(dataset) == -(-(tokens - 1) // 8)
    assert dataset.ledger.targets == tokens - 1


def test_a_worked_example(tmp_path: Path) -> None:
    """Places needed 5, 2, 3, 4 in rows of 7: (5, 2) and (4, 3) fill both rows."""
    dataset = PackedDataset(view_of(tmp_path, [6, 3, 4, 5]), 7)
    first, second = dataset.sample(0), dataset.sample(1)
    assert bytes(first.ids.tolist()) == b"abcdegh"
    assert bytes(first.targets.tolist()) == b"bcdefhi"
    assert first.segment_ids.tolist() == [1, 1, 1, 1, 1, 2, 2]
    assert first.positions.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert bytes(second.ids.tolist()) == b"nopqjkl"
    assert dataset.ledger.padded == 0
    assert dataset.ledger.text().startswith("2 rows of 7 = 14 places: 14 tokens, 0 repeated as context, 0 padded")


def test_the_same_document_packed_twice_gives_the_same_segment(tmp_path: Path) -> None:
    store = store_of(tmp_path, [26, 26, 26])
    found = segments(PackedDataset(store.split("all"), 60))
    assert list(found.values()) == [3]


@pytest.mark.parametrize("longest", [10, 40, 64, 200])
def test_rows_are_few(tmp_path: Path, longest: int) -> None:
    """Best-fit decreasing needs at most 11/9 of the best possible number of rows, plus one (Johnson 1973), and here
    fewer than putting documents into rows in the order they come."""
    generator = random.Random(longest)
    lengths = [generator.randrange(2, longest) for _ in range(400)]
    dataset = PackedDataset(view_of(tmp_path, lengths), 64)
    ledger = dataset.ledger
    assert len(dataset) <= -(-ledger.kept // 64) * 11 / 9 + 1
    assert ledger.dropped == 0
    in_order, room = 0, 0
    for size in (min(64, length - 1 - start) for length in lengths for start in range(0, length - 1, 64)):
        if size > room:
            in_order, room = in_order + 1, 64
        room -= size
    assert len(dataset) < in_order


def test_nothing_to_predict_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataContractError, match="only documents of one token"):
        PackedDataset(view_of(tmp_path, [1, 0, 1]), 8)
    with pytest.raises(ConfigError):
        PackedDataset(view_of(tmp_path, [5]), 0)
    with pytest.raises(DataContractError, match=r"no sample 1 .* expected 0\.\.0"):
        PackedDataset(view_of(tmp_path, [5]), 8).sample(1)
