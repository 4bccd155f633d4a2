/** @file Which elements a dropout site keeps: what kernels compute, for tests and for looking at one sample. */

import { philoxInto } from "./philox.js";
import { streamKey } from "./streams.js";

/** @import { Key } from "./philox.js" */

/**
 * The key of a dropout site: the stream `dropout/<site>`.
 *
 * @param {number | bigint} seed
 * @param {string} site
 * @returns {Key}
 */
export function dropoutKey(seed, site) {
  return streamKey(seed, `dropout/${site}`);
}

/**
 * 1 for each of the first `count` elements of one sample that stays, 0 for each that is dropped. Kept values are then
 * multiplied by float32(1 / (1 - rate)).
 *
 * Element e is word e mod 4 of the block with counter (floor(e / 4), sample, step, 0); it stays when the word is at
 * least floor(rate * 2^32).
 *
 * @param {Key} key
 * @param {object} where
 * @param {number} where.step the data step
 * @param {number} where.sample index in the global batch
 * @param {number} rate at least 0 and below 1
 * @param {number} count
 * @returns {Uint8Array<ArrayBuffer>}
 */
export function keepMask(key, { step, sample }, rate, count) {
  const threshold = Math.floor(rate * 2 ** 32);
  const kept = new Uint8Array(count);
  const words = new Uint32Array(4);
  for (let element = 0; element < count; element++) {
    if (element % 4 === 0) philoxInto(words, element / 4, sample, step, 0, key);
    kept[element] = words[element % 4] >= threshold ? 1 : 0;
  }
  return kept;
}
