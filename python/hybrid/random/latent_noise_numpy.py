"""NumPy twin of `random.latent_noise`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybrid.random.latent_noise import LEAST, SECOND_SEED, WEYL


def normals(seed: int, count: int, first: int = 0) -> NDArray[np.float64]:
    """`latent_noise.normal` of the indices first .. first + count - 1, before it is rounded to float32."""
    index = np.arange(first, first + count, dtype=np.int64)
    radius = np.sqrt(-2.0 * np.log(np.maximum(_uniforms(seed, 2 * index), LEAST)))
    return radius * np.cos(2.0 * np.pi * _uniforms(seed ^ SECOND_SEED, 2 * index + 1))


def _uniforms(seed: int, index: NDArray[np.int64]) -> NDArray[np.float64]:
    products = (index + 1).astype(np.float64) * float(WEYL)
    words = np.uint32(seed) ^ np.remainder(products, 2.0**32).astype(np.uint32)
    words ^= words << np.uint32(13)
    words ^= words >> np.uint32(17)
    words ^= words << np.uint32(5)
    return (words.astype(np.float64) + 1.0) / 4294967297.0
