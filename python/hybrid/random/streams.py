"""Named streams: a Philox key for each (seed, name).

Names in use: `init/<tensor>`, `shuffle/<epoch>`, `dropout/<site>`, `mix`, `noise`. The derivation is built from
Philox itself, not from a cryptographic hash, because a browser offers its hashes only asynchronously.
"""

from __future__ import annotations

from hybrid.random.philox import MASK32, Key, philox4x32


def stream_key(seed: int, name: str) -> Key:
    """The key of stream `name` under `seed` (taken modulo 2^64; a negative seed counts as its two's complement).

    The UTF-8 bytes of the name, one byte 0x80 and zeros up to a multiple of 8 are absorbed 8 bytes at a time: XORed
    as two little-endian words into the first two counter words, then one Philox block under the seed. Two words of
    the last block are the key.
    """
    seed_key = (seed & MASK32, (seed >> 32) & MASK32)
    padded = name.encode("utf-8") + b"\x80"
    padded += bytes(-len(padded) % 8)
    counter = (0, 0, 0, 0)
    for start in range(0, len(padded), 8):
        low = int.from_bytes(padded[start : start + 4], "little")
        high = int.from_bytes(padded[start + 4 : start + 8], "little")
        counter = philox4x32((counter[0] ^ low, counter[1] ^ high, counter[2], counter[3]), seed_key)
    return counter[0], counter[1]
