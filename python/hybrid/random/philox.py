"""Philox 4x32-10, the counter-based generator behind every stream.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.

A block of four 32-bit words is a pure function of a 128-bit counter and a 64-bit key: nothing is stored, so any
element of any stream can be computed anywhere, in any order.
"""

from __future__ import annotations

MASK32 = 0xFFFFFFFF
MULTIPLIER0 = 0xD2511F53
MULTIPLIER1 = 0xCD9E8D57
WEYL0 = 0x9E3779B9
WEYL1 = 0xBB67AE85
ROUNDS = 10

Counter = tuple[int, int, int, int]
Key = tuple[int, int]


def philox4x32(counter: Counter, key: Key) -> Counter:
    """Four random words from four counter words and two key words, each 0..2^32-1 with the lowest word first."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0 = MULTIPLIER0 * c0
        product1 = MULTIPLIER1 * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & MASK32,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & MASK32,
        )
        k0 = (k0 + WEYL0) & MASK32
        k1 = (k1 + WEYL1) & MASK32
    return c0, c1, c2, c3
