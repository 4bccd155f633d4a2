"""The noise of the latent objectives: nearly normal numbers of an index, as the mirrored runner draws them.

A seed and an index give two words of xorshift32, two uniforms and, by Box and Muller, one normal number. Logarithm and
cosine are taken in float64 on the host, because shaders know neither to the last bit: a runtime gets the noise as
float32 and adds it with `ops.add_noise`.
"""

from __future__ import annotations

from math import cos, exp, log, pi, sqrt

from hybrid.random.philox import MASK32

STEP_STRIDE = 104_729  # between the seeds of two steps
WEYL = 0x9E3779B9
SECOND_SEED = 0x85EBCA6B  # tells the angle's seed from the radius's
LEAST = 1e-7  # uniforms below it count as this under the logarithm


def noise_seed(seed: int, step: int) -> int:
    """The seed of step `step`, counted from 0."""
    return (seed + step * STEP_STRIDE) & MASK32


def normal(seed: int, index: int) -> float:
    """Element `index`, in row-major order, of the noise of `noise_seed`; round it to float32 to store it.

    n = sqrt(-2 ln max(u(seed, 2 index), 1e-7)) cos(2 pi u(seed ^ 0x85ebca6b, 2 index + 1)).
    """
    radius = sqrt(-2.0 * log(max(_uniform(seed, 2 * index), LEAST)))
    return radius * cos(2.0 * pi * _uniform(seed ^ SECOND_SEED, 2 * index + 1))


def levels(log_snr: float) -> tuple[float, float]:
    """(signal, noise): the factors sqrt(r / (1 + r)) and sqrt(1 / (1 + r)) at signal-to-noise ratio r = e^log_snr."""
    ratio = exp(log_snr)
    return sqrt(ratio / (1.0 + ratio)), sqrt(1.0 / (1.0 + ratio))


def _uniform(seed: int, index: int) -> float:
    """In (0, 1]. The product of index and constant is one of float64s, rounded where it is large, as in JavaScript."""
    word = seed ^ (int(float(index + 1) * float(WEYL)) & MASK32)
    word ^= word << 13 & MASK32
    word ^= word >> 17
    word ^= word << 5 & MASK32
    return (word + 1) / 4294967297
