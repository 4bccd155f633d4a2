"""One microbatch as every backend receives it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IGNORE = 0xFFFFFFFF  # the target id that is no target (graph.ir.IGNORE)


@dataclass(frozen=True)
class Batch:
    """B rows of T tokens, uint32 throughout.

    ids, targets, positions, segment_ids: [B, T]. `targets[b, t]` is the id to predict after `ids[b, t]`, or IGNORE.
    Positions restart at each segment; segments of one row have different `segment_ids`, and padding has segment id 0
    with IGNORE targets. sample_ids: [B], the index of each row within the *global* batch of its step (0..G-1):
    dropout is keyed by it, so that any split of the global batch into microbatches or ranks draws the same masks.
    """

    ids: NDArray[np.uint32]
    targets: NDArray[np.uint32]
    positions: NDArray[np.uint32]
    segment_ids: NDArray[np.uint32]
    sample_ids: NDArray[np.uint32]

    @property
    def target_tokens(self) -> int:
        """How many targets count."""
        return int(np.count_nonzero(self.targets != IGNORE))
