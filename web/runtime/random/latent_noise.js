/**
 * @file The noise of the latent objectives: nearly normal numbers of an index, as the mirrored runner draws them.
 *
 * A seed and an index give two words of xorshift32, two uniforms and, by Box and Muller, one normal number. Logarithm and
 * cosine are taken here, in float64, because shaders know neither to the last bit; a plan gets the noise as an input.
 * May import: nothing.
 */

const STEP_STRIDE = 104729; // between the seeds of two steps
const WEYL = 0x9e3779b9;
const SECOND_SEED = 0x85ebca6b; // tells the angle's seed from the radius's
const LEAST = 1e-7; // uniforms below it count as this under the logarithm

/**
 * @param {number} seed u32
 * @param {number} step counted from 0
 * @returns {number} u32: the seed of the step
 */
export function noiseSeed(seed, step) {
  return (seed + Math.imul(step, STEP_STRIDE)) >>> 0;
}

/**
 * Elements `first`, `first + 1`, .. of a step's noise, in row-major order.
 *
 * @param {number} seed of `noiseSeed`
 * @param {Float32Array | Float64Array} result
 * @param {number} [first]
 */
export function normals(seed, result, first = 0) {
  for (let i = 0; i < result.length; i++) {
    const index = 2 * (first + i);
    const radius = Math.sqrt(-2 * Math.log(Math.max(uniform(seed, index), LEAST)));
    result[i] = radius * Math.cos(2 * Math.PI * uniform(seed ^ SECOND_SEED, index + 1));
  }
}

/**
 * The factors of signal and noise at a signal-to-noise ratio of e^logSnr.
 *
 * @param {number} logSnr
 * @returns {[signal: number, noise: number]}
 */
export function levels(logSnr) {
  const ratio = Math.exp(logSnr);
  return [Math.sqrt(ratio / (1 + ratio)), Math.sqrt(1 / (1 + ratio))];
}

/**
 * In (0, 1]. The product is rounded as a float64 before the exclusive or cuts it to 32 bits.
 *
 * @param {number} seed
 * @param {number} index
 * @returns {number}
 */
function uniform(seed, index) {
  let word = seed ^ ((index + 1) * WEYL);
  word ^= word << 13;
  word ^= word >>> 17;
  word ^= word << 5;
  return ((word >>> 0) + 1) / 4294967297;
}
