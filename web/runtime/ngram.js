/**
 * @file Hashed n-gram tables: which row the last few tokens choose.
 *
 * The device hashes for itself when it looks rows up; the host hashes too, because the gradient of a table needs a row
 * index (`row_index.js`) of the rows that a batch used. May import: random/shuffle.
 */

import { mix32 } from "./random/shuffle.js";

/** Stands for a token before the start of a segment: no vocabulary has this id. */
export const NO_TOKEN = 0xffffffff;

/**
 * @typedef {object} NgramTable
 * @property {string} prefix of the names of its row index among the plan's inputs
 * @property {number} order tokens in an n-gram
 * @property {number} buckets rows of the table
 * @property {number} seed u32
 */

/**
 * The tables whose row index a plan asks for.
 *
 * @param {Iterable<string>} names of the plan's inputs
 * @returns {NgramTable[]}
 */
export function ngramTables(names) {
  const tables = [];
  for (const name of names) {
    const found = /^(ngram_(\d+)_(\d+)_(\d+)_)row_order$/.exec(name);
    if (found) {
      const [, prefix, order, buckets, seed] = found;
      tables.push({ prefix, order: Number(order), buckets: Number(buckets), seed: Number(seed) });
    }
  }
  return tables;
}

/**
 * The row of the n-gram that ends at each position: h = mix32(seed + order * 0x9e3779b9), then h = mix32(h ^ id) for its
 * ids, oldest first; the row is h mod buckets. An id before the row's start, or of another segment, counts as NO_TOKEN.
 *
 * @param {Uint32Array} ids [B * T]
 * @param {Uint32Array} segmentIds [B * T]
 * @param {number} time T
 * @param {Omit<NgramTable, "prefix">} table
 * @param {Uint32Array} rows [B * T], the result
 */
export function ngramBuckets(ids, segmentIds, time, { order, buckets, seed }, rows) {
  const start = mix32((seed + Math.imul(order, 0x9e3779b9)) | 0);
  for (let n = 0; n < ids.length; n++) {
    const t = n % time;
    let hash = start;
    for (let back = order - 1; back >= 0; back--) {
      const known = back <= t && segmentIds[n - back] === segmentIds[n];
      hash = mix32(hash ^ (known ? ids[n - back] : NO_TOKEN));
    }
    rows[n] = (hash >>> 0) % buckets;
  }
}
