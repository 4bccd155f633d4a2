"""Philox 4x32-10 in torch: the words of dropout on whatever device the activations are.

torch has no unsigned arithmetic worth the name, so 32-bit words live in int64. The product of two of them needs 64
bits; int64 multiplication wraps around and keeps all of them, and masking what the arithmetic shift drags in gives
the upper half.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid.random.philox import MASK32, MULTIPLIER0, MULTIPLIER1, ROUNDS, WEYL0, WEYL1


def philox4x32(counters: tuple[Tensor, Tensor, Tensor, Tensor], key: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`random.philox.philox4x32` elementwise: four int64 tensors of 32-bit words that broadcast together, key int64
    [2]."""
    c0, c1, c2, c3 = counters
    for number in range(ROUNDS):
        k0, k1 = (key[0] + number * WEYL0) & MASK32, (key[1] + number * WEYL1) & MASK32
        product0, product1 = c0 * MULTIPLIER0, c2 * MULTIPLIER1
        c0, c1, c2, c3 = (
            ((product1 >> 32) & MASK32) ^ c1 ^ k0,
            product1 & MASK32,
            ((product0 >> 32) & MASK32) ^ c3 ^ k1,
            product0 & MASK32,
        )
    return c0, c1, c2, c3


def keep_mask(key: Tensor, sample_ids: Tensor, data_step: Tensor, shape: tuple[int, int, int], rate: float) -> Tensor:
    """Which elements dropout keeps, bool [B, T, C]; see `ops.dropout`. sample_ids int64 [B], data_step int64 [1]."""
    batch, time, width = shape
    elements = time * width
    block = torch.arange(-(-elements // 4), device=sample_ids.device)[None, :]
    words = philox4x32((block, sample_ids[:, None], data_step[None], torch.zeros_like(block)), key)
    whole = torch.stack([word.expand(batch, -1) for word in words], dim=-1).reshape(batch, -1)
    return (whole[:, :elements] >= int(rate * 2**32)).reshape(shape)
