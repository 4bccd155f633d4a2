"""A batch that breaks its contract is refused, naming field, sample and position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from hybrid.backends.validate import validate_batch, validate_prompt
from hybrid.data.batch import IGNORE, Batch
from hybrid.errors import DataContractError

V, CONTEXT, SHAPE = 10, 8, (2, 4)


def good() -> Batch:
    return Batch(
        ids=np.array([[1, 2, 3, 4], [9, 0, 0, 0]], np.uint32),
        targets=np.array([[2, 3, IGNORE, 1], [5, IGNORE, IGNORE, IGNORE]], np.uint32),
        positions=np.array([[0, 1, 2, 0], [7, 0, 1, 2]], np.uint32),
        segment_ids=np.array([[1, 1, 1, 2], [4, 0, 0, 0]], np.uint32),
        sample_ids=np.array([6, 2], np.uint32),
    )


def with_value(name: str, place: tuple[int, ...], value: int) -> Batch:
    array = getattr(good(), name).copy()
    array[place] = value
    return replace(good(), **{name: array})


def test_a_good_batch_passes() -> None:
    validate_batch(good(), V, CONTEXT, SHAPE)


def test_a_row_of_segment_zero_only_is_a_document_like_any_other() -> None:
    batch = replace(good(), segment_ids=np.zeros(SHAPE, np.uint32))
    validate_batch(batch, V, CONTEXT, SHAPE)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (lambda: with_value("ids", (1, 2), V), r"batch.ids\[1, 2\] is 10 \(sample 2, position 2\): .* size 10"),
        (lambda: with_value("ids", (0, 0), IGNORE), r"batch.ids\[0, 0\] is 4294967295"),
        (lambda: with_value("targets", (0, 1), V), r"batch.targets\[0, 1\] is 10 \(sample 6, position 1\)"),
        (lambda: with_value("positions", (0, 3), CONTEXT), r"batch.positions\[0, 3\] is 8 .* context length 8"),
        (lambda: with_value("segment_ids", (0, 1), 2), r"segment_ids\[0, 2\] is 1 .* already ended"),
        (lambda: with_value("targets", (1, 3), 5), r"batch.targets\[1, 3\] is 5 .*padding"),
        (lambda: with_value("sample_ids", (1,), 6), r"sample_ids are \[6, 6\]"),
        (lambda: replace(good(), ids=good().ids[:1]), r"batch.ids is uint32 \[1, 4\]: expected uint32 \[2, 4\]"),
        (lambda: replace(good(), ids=good().ids.astype(np.int64)), r"batch.ids is int64 \[2, 4\]"),
        (lambda: replace(good(), sample_ids=[0, 1]), "batch.sample_ids is list"),
    ],
)
def test_what_is_wrong_is_named(batch: Callable[[], Batch], message: str) -> None:
    with pytest.raises(DataContractError, match=message):
        validate_batch(batch(), V, CONTEXT, SHAPE)


def test_prompts() -> None:
    validate_prompt([0, V - 1], V)
    with pytest.raises(DataContractError, match="no tokens"):
        validate_prompt([], V)
    for wrong in (V, -1):
        with pytest.raises(DataContractError, match=f"prompt token 1 is {wrong}"):
            validate_prompt([0, wrong], V)
