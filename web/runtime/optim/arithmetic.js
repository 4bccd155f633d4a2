/**
 * @file Powers and cosines that are the same float64 in every language.
 *
 * `**` and `Math.cos` differ in the last bit between engines and C libraries, and schedules are promised to be exact
 * across runtimes. These use only additions, multiplications and divisions in a fixed order, which IEEE 754 fixes to
 * the bit.
 */

// Taylor coefficients of sin(x)/x in x^2, highest first. |x| is at most pi/4, where the first one left out (x^18/19!)
// is below 2^-53. Factorials up to 17! are exact in float64.
const SINE = Array.from({ length: 9 }, (_, index) => {
  const k = 8 - index;
  let factorial = 1;
  for (let i = 2; i <= 2 * k + 1; i++) factorial *= i;
  return (k % 2 ? -1 : 1) / factorial;
});

/**
 * `base` to a non-negative integer power, by squaring from the lowest bit; relative error < exponent * 2^-52.
 *
 * @param {number} base
 * @param {number} exponent
 * @returns {number}
 */
export function power(base, exponent) {
  let result = 1;
  let square = base;
  for (let rest = exponent; rest > 0; rest = Math.floor(rest / 2)) {
    if (rest % 2) result *= square;
    square *= square;
  }
  return result;
}

/**
 * (1 + cos(pi * progress)) / 2 for progress 0..1: exactly 1 at 0 and exactly 0 at 1.
 *
 * @param {number} progress
 * @returns {number}
 */
export function halfCosine(progress) {
  if (progress <= 0.5) {
    const sine = polynomialSine((Math.PI * progress) / 2);
    return 1 - sine * sine;
  }
  const sine = polynomialSine((Math.PI * (1 - progress)) / 2);
  return sine * sine;
}

/** @param {number} x @returns {number} */
function polynomialSine(x) {
  const square = x * x;
  let total = 0;
  for (const coefficient of SINE) total = total * square + coefficient;
  return total * x;
}
