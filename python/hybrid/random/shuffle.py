"""The stateless shuffle: a permutation of 0..n-1 that is computed one position at a time.

A balanced Feistel network permutes the next power of two with an even exponent; results outside 0..n-1 are permuted
again (cycle walking, fewer than four passes on average) until they fall inside, which keeps the map a permutation of
0..n-1. Nothing is stored, so a run resumes at any step and any rank finds its own samples. Every operation has 32-bit
operands, as `Math.imul` in JavaScript has.
"""

from __future__ import annotations

from functools import lru_cache

from hybrid.errors import DataContractError, LimitExceeded
from hybrid.random.philox import MASK32, Key, philox4x32
from hybrid.random.streams import stream_key

# Halves of at most 24 bits: positions stay exact in a float64, the number type of JavaScript.
LIMIT = 2**48


def permute(index: int, n: int, key: Key) -> int:
    """Where `key`'s permutation of 0..n-1 sends `index`.

    Errors: LimitExceeded for n above 2^48; DataContractError for n below 1 or an `index` outside 0..n-1.
    """
    half = half_bits(n)
    if not 0 <= index < n:
        raise DataContractError(f"position {index} is outside the {n} samples being shuffled: expected 0..{n - 1}")
    mask = (1 << half) - 1
    keys = round_keys(key)
    while True:
        left, right = index >> half, index & mask
        for round_key in keys:
            left, right = right, left ^ (mix32(right ^ round_key) & mask)
        index = left << half | right
        if index < n:
            return index


def sample_position(index: int, n: int) -> tuple[int, int]:
    """(epoch, position in it) of global sample `index`, counted over the whole run, in a data set of n samples."""
    half_bits(n)
    if index < 0:
        raise DataContractError(
            f"global sample index {index} is negative: samples are numbered from 0 over the whole run"
        )
    return divmod(index, n)


def epoch_key(seed: int, epoch: int) -> Key:
    """The key of one epoch's permutation: the stream `shuffle/<epoch>`."""
    return stream_key(seed, f"shuffle/{epoch}")


def sample(seed: int, index: int, n: int) -> int:
    """Which of the n samples a run reads as its global sample `index`: the whole data order, epochs included."""
    epoch, position = sample_position(index, n)
    return permute(position, n, epoch_key(seed, epoch))


def mix32(word: int) -> int:
    """A bijective 32-bit mixer: two multiplications between xor-shifts (constants of C. Wellons' lowbias32, 2018)."""
    word ^= word >> 16
    word = word * 0x7FEB352D & MASK32
    word ^= word >> 15
    word = word * 0x846CA68B & MASK32
    return word ^ word >> 16


def half_bits(n: int) -> int:
    """Bits of one Feistel half: the permuted domain 2^(2 * half_bits) is the least power of four that is at least n."""
    if n < 1:
        raise DataContractError(f"cannot shuffle {n} samples: expected at least 1")
    if n > LIMIT:
        raise LimitExceeded(
            f"cannot shuffle {n} samples: the limit is 2^48 = {LIMIT}; use longer samples or split the data set"
        )
    return ((n - 1).bit_length() + 1) // 2


@lru_cache(maxsize=64)
def round_keys(key: Key) -> tuple[int, ...]:
    """The eight round keys: the Philox blocks 0 and 1 of the epoch's key."""
    return philox4x32((0, 0, 0, 0), key) + philox4x32((1, 0, 0, 0), key)
