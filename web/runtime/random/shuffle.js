/**
 * @file The stateless shuffle: a permutation of 0..n-1 that is computed one position at a time.
 *
 * A balanced Feistel network permutes the next power of two with an even exponent; results outside 0..n-1 are permuted
 * again (cycle walking, fewer than four passes on average) until they fall inside, which keeps the map a permutation of
 * 0..n-1. Nothing is stored, so a run resumes at any step and any rank finds its own samples.
 */

import { DataContractError, LimitExceeded } from "../errors.js";
import { philox4x32 } from "./philox.js";
import { streamKey } from "./streams.js";

/** @import { Key } from "./philox.js" */

/** Halves of at most 24 bits: positions stay exact in a number. */
export const LIMIT = 2 ** 48;

/**
 * Where `key`'s permutation of 0..n-1 sends `index`.
 *
 * @param {number} index
 * @param {number} n
 * @param {Key} key
 * @returns {number}
 * @throws {LimitExceeded} for n above 2^48
 * @throws {DataContractError} for n below 1 or an `index` outside 0..n-1
 */
export function permute(index, n, key) {
  return permuteWith(index, n, halfBits(n), roundKeys(key));
}

/**
 * @param {number} index
 * @param {number} n
 * @param {number} half
 * @param {Uint32Array} keys
 * @returns {number}
 */
function permuteWith(index, n, half, keys) {
  if (!(Number.isInteger(index) && index >= 0 && index < n)) {
    throw new DataContractError(`position ${index} is outside the ${n} samples being shuffled: expected 0..${n - 1}`);
  }
  const size = 2 ** half;
  const mask = size - 1;
  let image = index;
  do {
    let left = Math.floor(image / size);
    let right = image % size;
    for (let round = 0; round < keys.length; round++) {
      const next = left ^ (mix32(right ^ keys[round]) & mask);
      left = right;
      right = next;
    }
    image = left * size + right;
  } while (image >= n);
  return image;
}

/**
 * [epoch, position in it] of global sample `index`, counted over the whole run, in a data set of n samples.
 *
 * @param {number} index
 * @param {number} n
 * @returns {[epoch: number, position: number]}
 */
export function samplePosition(index, n) {
  halfBits(n);
  if (!(index >= 0)) {
    throw new DataContractError(
      `global sample index ${index} is negative: samples are numbered from 0 over the whole run`,
    );
  }
  return [Math.floor(index / n), index % n];
}

/**
 * The key of one epoch's permutation: the stream `shuffle/<epoch>`.
 *
 * @param {number | bigint} seed
 * @param {number} epoch
 * @returns {Key}
 */
export function epochKey(seed, epoch) {
  return streamKey(seed, `shuffle/${epoch}`);
}

/**
 * Which of the n samples a run reads as its global sample `index`: the whole data order, epochs included.
 *
 * @param {number | bigint} seed
 * @param {number} index
 * @param {number} n
 * @returns {number}
 */
export function sample(seed, index, n) {
  return samples(seed, index, 1, n)[0];
}

/**
 * `sample` of the global samples first .. first + count - 1.
 *
 * @param {number | bigint} seed
 * @param {number} first
 * @param {number} count
 * @param {number} n
 * @returns {number[]}
 */
export function samples(seed, first, count, n) {
  const half = halfBits(n);
  let [epoch, position] = samplePosition(first, n);
  let keys = count > 0 ? roundKeys(epochKey(seed, epoch)) : new Uint32Array(0);
  /** @type {number[]} */
  const found = [];
  while (found.length < count) {
    if (position === n) {
      epoch += 1;
      position = 0;
      keys = roundKeys(epochKey(seed, epoch));
    }
    found.push(permuteWith(position, n, half, keys));
    position += 1;
  }
  return found;
}

/**
 * A bijective 32-bit mixer: two multiplications between xor-shifts (constants of C. Wellons' lowbias32, 2018).
 *
 * @param {number} word
 * @returns {number} signed
 */
export function mix32(word) {
  let mixed = Math.imul(word ^ (word >>> 16), 0x7feb352d);
  mixed = Math.imul(mixed ^ (mixed >>> 15), 0x846ca68b);
  return mixed ^ (mixed >>> 16);
}

/**
 * Bits of one Feistel half: the permuted domain 2^(2 * halfBits) is the least power of four that is at least n.
 *
 * @param {number} n
 * @returns {number}
 */
export function halfBits(n) {
  if (!(Number.isInteger(n) && n >= 1)) throw new DataContractError(`cannot shuffle ${n} samples: expected at least 1`);
  if (n > LIMIT) {
    throw new LimitExceeded(
      `cannot shuffle ${n} samples: the limit is 2^48 = ${LIMIT}; use longer samples or split the data set`,
    );
  }
  let half = 0;
  for (let domain = 1; domain < n; domain *= 4) half += 1;
  return half;
}

/**
 * The eight round keys: the Philox blocks 0 and 1 of the epoch's key.
 *
 * @param {Key} key
 * @returns {Uint32Array}
 */
function roundKeys(key) {
  return Uint32Array.of(...philox4x32([0, 0, 0, 0], key), ...philox4x32([1, 0, 0, 0], key));
}
