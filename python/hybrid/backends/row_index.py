"""The row index of an embedding: which positions of a batch hold which id.

The gradient of a table row is the sum over the positions that read it. With positions sorted by id on the host, a
device adds each row's positions in a fixed order, without floating-point atomics, so that two runs give the same
bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid.data.batch import Batch
from hybrid.ops import NO_TOKEN
from hybrid.random.shuffle_numpy import mix32

Ids = NDArray[np.uint32]
_NGRAM = re.compile(r"(ngram_(\d+)_(\d+)_(\d+)_)row_order")  # ops.ngram_prefix


def row_index(ids: NDArray[np.integer[Any]], prefix: str = "") -> dict[str, Ids]:
    """The program inputs `row_order` [N], `row_starts` [N + 1], `row_ids` [N] and `row_count` [1] for ids of any
    shape; all uint32.

    row_order: positions 0..N-1 sorted by id, equal ids in order of position. Distinct id number u (of `row_count`) is
    `row_ids[u]`, at the positions `row_order[row_starts[u] : row_starts[u + 1]]`. Beyond the count, starts are N and
    ids 0. `prefix` stands before each name.
    """
    flat = np.asarray(ids).ravel()
    size = flat.size
    order = np.argsort(flat, kind="stable")
    ordered = flat[order]
    first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if size else np.empty(0, np.int64)
    starts = np.full(size + 1, size, np.uint32)
    starts[: first.size] = first
    unique = np.zeros(size, np.uint32)
    unique[: first.size] = ordered[first]
    return {
        f"{prefix}row_order": order.astype(np.uint32),
        f"{prefix}row_starts": starts,
        f"{prefix}row_ids": unique,
        f"{prefix}row_count": np.array([first.size], np.uint32),
    }


def row_indices(names: Iterable[str], batch: Batch) -> dict[str, Ids]:
    """The row indices of a batch that program inputs of these names ask for: of ids, of positions, and of the buckets
    of n-gram tables."""
    wanted = set(names)
    values: dict[str, Ids] = {}
    if "row_order" in wanted:
        values |= row_index(batch.ids)
    if "pos_row_order" in wanted:
        values |= row_index(batch.positions, "pos_")
    for match in filter(None, map(_NGRAM.fullmatch, sorted(wanted))):
        order, buckets, seed = (int(match[i]) for i in (2, 3, 4))
        rows = ngram_buckets(batch.ids, batch.segment_ids, order=order, buckets=buckets, seed=seed)
        values |= row_index(rows, match[1])
    return values


def ngram_buckets(ids: Ids, segment_ids: Ids, *, order: int, buckets: int, seed: int) -> Ids:
    """`ops.ngram_bucket` of the n-gram that ends at each position; ids, segment_ids u32 [B, T] -> u32 [B, T]."""
    grams = np.full((order, *ids.shape), NO_TOKEN, np.uint32)  # grams[-1 - back]: the token `back` places before
    for back in range(min(order, ids.shape[1])):
        end = ids.shape[1] - back
        same = segment_ids[:, back:] == segment_ids[:, :end]
        grams[-1 - back, :, back:] = np.where(same, ids[:, :end], np.uint32(NO_TOKEN))
    return _buckets(grams, buckets, seed)


def previous_ids(seen: Sequence[int], count: int) -> Ids:
    """What a decoding program is told of the tokens before its own: the last `count` of `seen` as u32 [1, count]."""
    known = list(seen)[-count:]
    return np.array([[NO_TOKEN] * (count - len(known)) + known], np.uint32)


def ngram_buckets_after(ids: Ids, previous_ids: Ids, *, order: int, buckets: int, seed: int) -> Ids:
    """The same for one sequence that continues others: ids u32 [1, T] come after previous_ids u32 [1, P]."""
    joined = np.concatenate([previous_ids, ids], axis=1)
    first, time = previous_ids.shape[1], ids.shape[1]
    grams = np.stack([joined[:, first - back : first - back + time] for back in reversed(range(order))])
    return _buckets(grams, buckets, seed)


def _buckets(grams: Ids, buckets: int, seed: int) -> Ids:
    """From grams u32 [order, ..], oldest first."""
    start = (seed + len(grams) * 0x9E3779B9) & 0xFFFFFFFF
    h = mix32(np.full(grams.shape[1:], start, np.uint32))
    for tokens in grams:
        h = mix32(h ^ tokens)
    return h % np.uint32(buckets)
