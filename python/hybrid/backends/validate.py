"""Checks on a batch before anything is uploaded: a device clamps or ignores what does not fit, and trains on
nonsense."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybrid.data.batch import IGNORE, Batch
from hybrid.errors import DataContractError


def validate_batch(batch: Batch, vocabulary_size: int, context_length: int, shape: tuple[int, int]) -> None:
    """DataContractError naming field, sample and position unless all of this holds.

    Arrays are uint32 of the session's shape (B, T); ids are below the vocabulary size, targets too or IGNORE;
    positions are below the context length; sample ids differ; each segment is one run of tokens; padding (segment id
    0 beside other segments in the row) has no targets.
    """
    batch_size = shape[0]
    expected = {"ids": shape, "targets": shape, "positions": shape, "segment_ids": shape, "sample_ids": (batch_size,)}
    for name, want in expected.items():
        array = getattr(batch, name)
        if not isinstance(array, np.ndarray) or array.dtype != np.uint32 or array.shape != want:
            got = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            raise DataContractError(f"batch.{name} is {got}: expected uint32 {list(want)}, the shape of the session")
    _refuse(
        batch, "ids", batch.ids >= vocabulary_size, f"expected a token id below the vocabulary size {vocabulary_size}"
    )
    _refuse(
        batch,
        "targets",
        (batch.targets >= vocabulary_size) & (batch.targets != IGNORE),
        f"expected a token id below the vocabulary size {vocabulary_size}, or {IGNORE} for no target",
    )
    _refuse(
        batch, "positions", batch.positions >= context_length, f"expected less than the context length {context_length}"
    )
    if len(np.unique(batch.sample_ids)) != batch_size:
        raise DataContractError(
            f"batch.sample_ids are {batch.sample_ids.tolist()}: each row needs its own index in the global batch"
        )
    _validate_segments(batch)


def validate_prompt(prompt: Sequence[int], vocabulary_size: int) -> None:
    """DataContractError for a prompt without tokens or with an id outside the vocabulary."""
    if not prompt:
        raise DataContractError("the prompt has no tokens: give at least one to start from")
    for place, token in enumerate(prompt):
        if not 0 <= token < vocabulary_size:
            raise DataContractError(
                f"prompt token {place} is {token}: expected an id below the vocabulary size {vocabulary_size}"
            )


def _validate_segments(batch: Batch) -> None:
    segments = batch.segment_ids
    starts = np.ones(segments.shape, bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    if starts[:, 1:].any():
        for row in np.flatnonzero(starts[:, 1:].any(axis=1)):
            where = np.flatnonzero(starts[row])
            ids, first = np.unique(segments[row, where], return_index=True)
            if len(ids) != len(where):
                again = np.setdiff1d(np.arange(len(where)), first)[0]
                again_at = np.zeros(segments.shape, bool)
                again_at[row, where[again]] = True
                _refuse(
                    batch,
                    "segment_ids",
                    again_at,
                    "this segment already ended: the tokens of a segment must be contiguous",
                )
        padding = (segments == 0) & starts[:, 1:].any(axis=1, keepdims=True)
        _refuse(batch, "targets", padding & (batch.targets != IGNORE), "padding (segment id 0) must have no target")


def _refuse(batch: Batch, name: str, wrong: NDArray[np.bool_], expected: str) -> None:
    if wrong.any():
        row, position = (int(i) for i in np.argwhere(wrong)[0])
        value = getattr(batch, name)[row, position]
        sample = batch.sample_ids[row]
        raise DataContractError(
            f"batch.{name}[{row}, {position}] is {value} (sample {sample}, position {position}): {expected}"
        )
