"""The row index of an embedding: which positions of a batch hold which id.

The gradient of a table row is the sum over the positions that read it. With positions sorted by id on the host, a
device adds each row's positions in a fixed order, without floating-point atomics, so that two runs give the same
bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.uint32]


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
