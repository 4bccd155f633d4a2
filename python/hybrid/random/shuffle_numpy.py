"""The vectorised twin of `shuffle`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid.errors import DataContractError
from hybrid.random.philox import Key
from hybrid.random.shuffle import epoch_key, half_bits, round_keys, sample_position


def permute(indices: NDArray[np.integer[Any]], n: int, key: Key) -> NDArray[np.int64]:
    """`shuffle.permute` of each element of `indices` (any integer type and shape, 0..n-1); int64 of the same shape."""
    half = half_bits(n)
    given = np.asarray(indices)
    if given.size and not (int(given.min()) >= 0 and int(given.max()) < n):
        wrong = given[(given < 0) | (given >= n)].flat[0]
        raise DataContractError(f"position {wrong} is outside the {n} samples being shuffled: expected 0..{n - 1}")
    result = given.astype(np.uint64).ravel()
    walking = np.arange(result.size)
    while walking.size:
        permuted = _feistel(result[walking], half, key)
        result[walking] = permuted
        walking = walking[permuted >= np.uint64(n)]
    return result.astype(np.int64).reshape(given.shape)


def samples(seed: int, first: int, count: int, n: int) -> NDArray[np.int64]:
    """`shuffle.sample` of the global samples first .. first + count - 1; int64 [count]."""
    epoch, position = sample_position(first, n)
    parts = []
    while count > 0:
        length = min(count, n - position)
        parts.append(permute(np.arange(position, position + length), n, epoch_key(seed, epoch)))
        epoch, position, count = epoch + 1, 0, count - length
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _feistel(values: NDArray[np.uint64], half: int, key: Key) -> NDArray[np.uint64]:
    mask = np.uint32((1 << half) - 1)
    left = (values >> np.uint64(half)).astype(np.uint32)
    right = values.astype(np.uint32) & mask
    for round_key in round_keys(key):
        left, right = right, left ^ (mix32(right ^ np.uint32(round_key)) & mask)
    return left.astype(np.uint64) << np.uint64(half) | right


def mix32(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """`shuffle.mix32` of each word."""
    words = (words ^ (words >> np.uint32(16))) * np.uint32(0x7FEB352D)
    words = (words ^ (words >> np.uint32(15))) * np.uint32(0x846CA68B)
    return words ^ (words >> np.uint32(16))
