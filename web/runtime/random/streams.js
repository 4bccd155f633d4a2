/**
 * @file Named streams: a Philox key for each (seed, name).
 *
 * Names in use: `init/<tensor>`, `shuffle/<epoch>`, `dropout/<site>`, `mix`, `noise`. The derivation is built from
 * Philox itself, not from a cryptographic hash, because a browser offers its hashes only asynchronously.
 */

import { philoxInto } from "./philox.js";

/** @import { Key } from "./philox.js" */

const UTF8 = new TextEncoder();

/**
 * The key of stream `name` under `seed` (taken modulo 2^64; a negative seed counts as its two's complement).
 *
 * The UTF-8 bytes of the name, one byte 0x80 and zeros up to a multiple of 8 are absorbed 8 bytes at a time: XORed as
 * two little-endian words into the first two counter words, then one Philox block under the seed. Two words of the last
 * block are the key.
 *
 * @param {number | bigint} seed a whole number; beyond 2^53 only a bigint is exact
 * @param {string} name
 * @returns {Key}
 */
export function streamKey(seed, name) {
  const bits = BigInt.asUintN(64, BigInt(seed));
  /** @type {Key} */
  const seedKey = [Number(bits & 0xffffffffn), Number(bits >> 32n)];
  const text = UTF8.encode(name);
  const padded = new Uint8Array((Math.floor(text.length / 8) + 1) * 8);
  padded.set(text);
  padded[text.length] = 0x80;
  const view = new DataView(padded.buffer);
  const words = new Uint32Array(4);
  for (let start = 0; start < padded.length; start += 8) {
    const low = words[0] ^ view.getUint32(start, true);
    const high = words[1] ^ view.getUint32(start + 4, true);
    philoxInto(words, low, high, words[2], words[3], seedKey);
  }
  return [words[0], words[1]];
}
