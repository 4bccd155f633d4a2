"""Powers and cosines that are the same float64 in every language.

`pow` and `cos` differ in the last bit between C libraries and JavaScript engines, and schedules are promised to be
exact across runtimes. These use only additions, multiplications and divisions in a fixed order, which IEEE 754 fixes
to the bit.
"""

from __future__ import annotations

from math import factorial, pi

# Taylor coefficients of sin(x)/x in x^2, highest first. |x| is at most pi/4, where the first one left out (x^18/19!)
# is below 2^-53.
_SINE = tuple((-1) ** k / factorial(2 * k + 1) for k in range(8, -1, -1))


def power(base: float, exponent: int) -> float:
    """`base` to a non-negative integer power, by squaring from the lowest bit; relative error < exponent * 2^-52."""
    result = 1.0
    square = base
    while exponent > 0:
        if exponent & 1:
            result *= square
        square *= square
        exponent >>= 1
    return result


def half_cosine(progress: float) -> float:
    """(1 + cos(pi * progress)) / 2 for progress 0..1: exactly 1 at 0 and exactly 0 at 1."""
    if progress <= 0.5:
        sine = _sine(pi * progress / 2)
        return 1 - sine * sine
    sine = _sine(pi * (1 - progress) / 2)
    return sine * sine


def _sine(x: float) -> float:
    square = x * x
    total = 0.0
    for coefficient in _SINE:
        total = total * square + coefficient
    return total * x
