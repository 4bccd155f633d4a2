/** @file float16, exactly: browsers that have no Float16Array read and write it through these. */

/**
 * The value of float16 bits.
 *
 * @param {number} bits 0..65535
 * @returns {number}
 */
export function halfToFloat(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 0x1f) return fraction ? Number.NaN : sign * Number.POSITIVE_INFINITY;
  return sign * (1024 + fraction) * 2 ** (exponent - 25);
}

/**
 * The values of float16 elements.
 *
 * @param {Uint16Array} halves bits
 * @returns {Float32Array<ArrayBuffer>}
 */
export function halvesToFloats(halves) {
  const floats = new Float32Array(halves.length);
  for (let index = 0; index < halves.length; index++) floats[index] = halfToFloat(halves[index]);
  return floats;
}
