/**
 * @file Philox 4x32-10, the counter-based generator behind every stream.
 *
 * Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.
 *
 * A block of four 32-bit words is a pure function of a 128-bit counter and a 64-bit key: nothing is stored, so any
 * element of any stream can be computed anywhere, in any order.
 */

export const MULTIPLIER0 = 0xd2511f53;
export const MULTIPLIER1 = 0xcd9e8d57;
export const WEYL0 = 0x9e3779b9;
export const WEYL1 = 0xbb67ae85;
export const ROUNDS = 10;

/** @typedef {readonly [number, number, number, number]} Counter */
/** @typedef {readonly [number, number]} Key */

/**
 * Four random words from four counter words and two key words, each 0..2^32-1 with the lowest word first.
 *
 * @param {Counter} counter
 * @param {Key} key
 * @returns {[number, number, number, number]}
 */
export function philox4x32(counter, key) {
  const words = new Uint32Array(4);
  philoxInto(words, counter[0], counter[1], counter[2], counter[3], key);
  return [words[0], words[1], words[2], words[3]];
}

/**
 * The same without an allocation, for loops over many blocks.
 *
 * @param {Uint32Array} words four words, overwritten
 * @param {number} counter0
 * @param {number} counter1
 * @param {number} counter2
 * @param {number} counter3
 * @param {Key} key
 */
export function philoxInto(words, counter0, counter1, counter2, counter3, key) {
  // Signed 32-bit numbers all through: engines keep those in registers. `>>>` and Uint32Array make them unsigned again.
  let c0 = counter0 | 0;
  let c1 = counter1 | 0;
  let c2 = counter2 | 0;
  let c3 = counter3 | 0;
  let k0 = key[0] | 0;
  let k1 = key[1] | 0;
  for (let round = 0; round < ROUNDS; round++) {
    const high0 = highProduct(MULTIPLIER0, c0);
    const high1 = highProduct(MULTIPLIER1, c2);
    const low0 = Math.imul(MULTIPLIER0, c0);
    const low1 = Math.imul(MULTIPLIER1, c2);
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 = (k0 + WEYL0) | 0;
    k1 = (k1 + WEYL1) | 0;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

/**
 * The upper 32 bits of the 64-bit product of two 32-bit numbers, by halves of 16 bits: no partial sum reaches 2^32.
 *
 * @param {number} a
 * @param {number} b
 * @returns {number} signed
 */
function highProduct(a, b) {
  const aLow = a & 0xffff;
  const aHigh = a >>> 16;
  const bLow = b & 0xffff;
  const bHigh = b >>> 16;
  const first = (Math.imul(aHigh, bLow) + (Math.imul(aLow, bLow) >>> 16)) | 0;
  const second = (Math.imul(aLow, bHigh) + (first & 0xffff)) | 0;
  return (Math.imul(aHigh, bHigh) + (first >>> 16) + (second >>> 16)) | 0;
}
