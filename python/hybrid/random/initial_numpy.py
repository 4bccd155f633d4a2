"""The vectorised twin of `initial`."""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

from hybrid.random.initial import CENTRE, DEVIATION, init_key
from hybrid.random.philox import MASK32
from hybrid.random.philox_numpy import CHUNK, philox4x32


def normal(seed: int, name: str, shape: tuple[int, ...], std: float) -> NDArray[np.float32]:
    """`initial.normal` in the shape of the tensor; float32."""
    return normal_part(seed, name, 0, prod(shape), std).reshape(shape)


def normal_part(seed: int, name: str, first: int, count: int, std: float) -> NDArray[np.float32]:
    """`count` elements of that tensor from `first` on, float32 [count]."""
    values = np.empty(count, dtype=np.float32)
    key = init_key(seed, name)
    factor = std / DEVIATION
    for start in range(0, count, CHUNK):
        elements = np.arange(first + start, first + min(start + CHUNK, count), dtype=np.uint64)
        counters = np.zeros((len(elements), 4), dtype=np.uint32)
        counters[:, 0] = elements & np.uint64(MASK32)
        counters[:, 1] = elements >> np.uint64(32)
        words = philox4x32(counters, key)
        total = ((words & np.uint32(0xFFFF)) + (words >> np.uint32(16))).sum(axis=1, dtype=np.uint32)
        values[start : start + len(elements)] = (total.astype(np.float64) - CENTRE) * factor
    return values
