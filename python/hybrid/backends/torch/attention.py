"""Attention over packed rows: which keys a query sees, as torch's kernels want to be told.

Rows that hold one segment, in a model without a window, need no mask at all: causality is a flag of the kernel. The
others get masks for blocks of queries, so that no T x T matrix exists for long rows; all layers share them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

QUERIES = 1024  # in one block


@dataclass(frozen=True)
class Block:
    """These queries see, of these keys, those that `mask` (bool [B or 1, 1, queries, keys]) says."""

    queries: slice
    keys: slice
    mask: Tensor


def is_plain(segment_ids: NDArray[np.uint32]) -> bool:
    """Whether causality alone isolates the segments of a batch [B, T]: each row is one segment, perhaps with padding
    after it. What padding sees decides nothing: it has no targets, and no other token sees it."""
    padding = (segment_ids == 0) & (segment_ids[:, :1] != 0)
    tail = np.logical_and.accumulate(padding[:, ::-1], axis=1)[:, ::-1]
    return bool(((segment_ids == segment_ids[:, :1]) | tail).all())


def blocks(segment_ids: Tensor, window: int | None, plain: bool = False) -> tuple[Block, ...] | None:
    """The masks of a batch with segment_ids int64 [B, T]; None where the causal flag is enough."""
    time = segment_ids.shape[1]
    if plain and (window is None or window >= time):
        return None
    made = []
    place = torch.arange(time, device=segment_ids.device)
    for first in range(0, time, QUERIES):
        last = min(first + QUERIES, time)
        start = 0 if window is None else max(0, first - window + 1)
        distance = place[first:last, None] - place[None, start:last]
        seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        if not plain:
            seen = seen & (segment_ids[:, first:last, None] == segment_ids[:, None, start:last])
        mask = seen[:, None] if seen.dim() == 3 else seen[None, None]
        made.append(Block(slice(first, last), slice(start, last), mask))
    return tuple(made)


def attend(q: Tensor, k: Tensor, v: Tensor, masks: tuple[Block, ...] | None, scale: float) -> Tensor:
    """q [B, T, H, D], k and v [B, T, K, D] -> [B, T, H, D]; see `ops.attention`."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if masks is None:
        return _kernel(q, k, v, None, scale).transpose(1, 2)
    pieces = [
        _kernel(q[:, :, block.queries], k[:, :, block.keys], v[:, :, block.keys], block.mask, scale) for block in masks
    ]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)).transpose(1, 2)


def _kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    if grouped and mask is not None and q.is_cuda:
        # CUDA's kernel with masks knows no groups, and the one that does would make all scores at once.
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        grouped = False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
