"""Initial weights by exact integer arithmetic: every runtime makes bit-identical weights from one seed.

Box-Muller needs logarithms and cosines, which differ in the last bit between platforms. Here a value is the sum of
eight 16-bit uniforms (an integer, nearly normal by the central limit theorem, never beyond 4.9 standard deviations),
centred and scaled once in float64, then rounded once to float32.
"""

from __future__ import annotations

from array import array
from math import sqrt

from hybrid.random.philox import MASK32, Key, philox4x32
from hybrid.random.streams import stream_key

HALVES = 8
CENTRE = HALVES * 65535 / 2
# The variance of a uniform integer in 0..65535 is (65536^2 - 1) / 12; the sum of eight has eight times that:
# 2863311530 exactly.
DEVIATION = sqrt(HALVES * (65536**2 - 1) / 12)


def init_key(seed: int, name: str) -> Key:
    """The key of tensor `name`: the stream `init/<name>`."""
    return stream_key(seed, f"init/{name}")


def normal(seed: int, name: str, count: int, std: float) -> array[float]:
    """`count` float32 values of mean 0 and standard deviation `std` for one tensor, in row-major order.

    `name` is the tensor's name in the checkpoint. Element i is made of the block with counter (i mod 2^32, i >> 32,
    0, 0).
    """
    key = init_key(seed, name)
    factor = std / DEVIATION
    values = array("f")
    for element in range(count):
        words = philox4x32((element & MASK32, element >> 32, 0, 0), key)
        total = sum((word & 0xFFFF) + (word >> 16) for word in words)
        values.append((total - CENTRE) * factor)
    return values
