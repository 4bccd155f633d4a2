/**
 * @file Initial weights by exact integer arithmetic: every runtime makes bit-identical weights from one seed.
 *
 * Box-Muller needs logarithms and cosines, which differ in the last bit between platforms. Here a value is the sum of
 * eight 16-bit uniforms (an integer, nearly normal by the central limit theorem, never beyond 4.9 standard deviations),
 * centred and scaled once in float64, then rounded once to float32.
 */

import { philoxInto } from "./philox.js";
import { streamKey } from "./streams.js";

/** @import { Key } from "./philox.js" */

export const HALVES = 8;
export const CENTRE = (HALVES * 65535) / 2;
// The variance of a uniform integer in 0..65535 is (65536^2 - 1) / 12; the sum of eight has eight times that:
// 2863311530 exactly.
export const DEVIATION = Math.sqrt((HALVES * (65536 ** 2 - 1)) / 12);

const WORD = 2 ** 32;

/**
 * The key of tensor `name`: the stream `init/<name>`.
 *
 * @param {number | bigint} seed
 * @param {string} name
 * @returns {Key}
 */
export function initKey(seed, name) {
  return streamKey(seed, `init/${name}`);
}

/**
 * `count` values of mean 0 and standard deviation `std` of one tensor, in row-major order, from element `first` on: a
 * large tensor can be made piece by piece.
 *
 * Element i is made of the block with counter (i mod 2^32, i >> 32, 0, 0).
 *
 * @param {number | bigint} seed
 * @param {string} name the tensor's name in the checkpoint
 * @param {number} count
 * @param {number} std
 * @param {number} [first]
 * @returns {Float32Array<ArrayBuffer>}
 */
export function normal(seed, name, count, std, first = 0) {
  const key = initKey(seed, name);
  const factor = std / DEVIATION;
  const values = new Float32Array(count);
  const words = new Uint32Array(4);
  for (let index = 0; index < count; index++) {
    const element = first + index;
    philoxInto(words, element, Math.floor(element / WORD), 0, 0, key);
    let total = 0;
    for (let word = 0; word < 4; word++) total += (words[word] & 0xffff) + (words[word] >>> 16);
    values[index] = (total - CENTRE) * factor;
  }
  return values;
}
