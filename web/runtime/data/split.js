/**
 * @file Training and validation parts of a token store, as ranges of its tokens. Python has the same in `data/split.py`.
 *
 * May import: errors, contracts, random.
 */

import { repr } from "../contracts/names.js";
import { stableHash } from "../contracts/stable_json.js";
import { ConfigError, DataContractError } from "../errors.js";
import { philoxInto } from "../random/philox.js";
import { streamKey } from "../random/streams.js";

/** @import { TokenStore } from "./store.js" */

/**
 * What is held out. by "document": document d belongs to validation iff word 0 of the Philox block with counter (d mod
 * 2^32, d >> 32, 0, 0) and the key of stream `split` under `seed` is below floor(validationShare * 2^32); so a document
 * keeps its side when others are added behind it. by "share": the tokens from floor(tokens * (1 - validationShare)) on,
 * in one piece.
 *
 * @typedef {object} SplitRule
 * @property {"document" | "share"} by
 * @property {number} validationShare
 * @property {number} seed
 */

const NAMES = ["train", "validation", "all"];

/**
 * A whole rule of some of its fields.
 *
 * @param {Partial<SplitRule>} [rule]
 * @returns {SplitRule}
 * @throws {ConfigError}
 */
export function splitRule({ by = "document", validationShare = 0.1, seed = 0 } = {}) {
  if (by !== "document" && by !== "share") {
    throw new ConfigError(`the split is by ${repr(by)}, expected "document" or "share"`);
  }
  if (!(validationShare >= 0 && validationShare < 1)) {
    throw new ConfigError(`the validation share is ${repr(validationShare)}, expected a number from 0 to below 1`);
  }
  return { by, validationShare, seed };
}

/**
 * Which documents belong to validation, for the rule by document.
 *
 * @param {SplitRule} rule
 * @param {number} documents
 * @returns {Uint8Array} [documents], 1 or 0
 */
export function heldOut({ validationShare, seed }, documents) {
  const key = streamKey(seed, "split");
  const limit = Math.floor(validationShare * 2 ** 32);
  const words = new Uint32Array(4);
  return new Uint8Array(documents).map((_, document) => {
    philoxInto(words, document, Math.floor(document / 2 ** 32), 0, 0, key);
    return Number(words[0] < limit);
  });
}

/** A part of a store, read as one stream: pieces of documents one after the other, none of them empty. */
export class TokenView {
  /**
   * @param {TokenStore} store
   * @param {string} name "train", "validation" or "all"
   * @param {SplitRule} rule the one in force, see `of`
   * @param {Float64Array} starts [pieces], where each piece begins in the store
   * @param {Float64Array} bounds [pieces + 1], where each begins in the stream
   */
  constructor(store, name, rule, starts, bounds) {
    this.store = store;
    this.name = name;
    this.rule = rule;
    this.starts = starts;
    this.bounds = bounds;
    this.vocabularySize = store.vocabularySize;
  }

  /**
   * The part `name` of a store. Where a split by document would leave a side empty (a corpus of one file, say), the rule
   * in force is by share; `rule` says so. Errors as in `TokenStore.split`.
   *
   * @param {TokenStore} store
   * @param {string} name
   * @param {SplitRule} given
   * @returns {TokenView}
   */
  static of(store, name, given) {
    if (!NAMES.includes(name)) {
      throw new ConfigError(`there is no split ${repr(name)}, expected one of ${NAMES.join(", ")}`);
    }
    let rule = splitRule(given);
    const { bounds: borders, documents, tokens } = store;
    /** @type {Uint8Array | null} */
    let held = null;
    if (rule.by === "document" && rule.validationShare > 0) {
      held = heldOut(rule, documents);
      const sides = [0, 0];
      for (let d = 0; d < documents; d++) sides[held[d]] += borders[d + 1] - borders[d];
      if (!sides[0] || !sides[1]) rule = { ...rule, by: "share" };
    }
    const byDocument = rule.by === "document";
    const cut = Math.floor(tokens * (1 - rule.validationShare));
    const wanted = Number(name === "validation");
    const starts = new Float64Array(documents);
    const bounds = new Float64Array(documents + 1);
    let pieces = 0;
    for (let d = 0; d < documents; d++) {
      let begin = borders[d];
      let end = borders[d + 1];
      if (name !== "all") {
        if (byDocument && (held ? held[d] : 0) !== wanted) continue;
        if (!byDocument && wanted) begin = Math.max(begin, cut);
        if (!byDocument && !wanted) end = Math.min(end, cut);
      }
      if (end <= begin) continue;
      starts[pieces] = begin;
      bounds[pieces + 1] = bounds[pieces] + end - begin;
      pieces += 1;
    }
    if (!pieces) {
      const share = repr(Number(rule.validationShare.toPrecision(6)));
      throw new DataContractError(
        `${store.name}: the ${name} part is empty: ${tokens} tokens in ${documents} documents, split by ${rule.by} ` +
          `with a validation share of ${share}; change the share or add text`,
      );
    }
    return new TokenView(store, name, rule, starts.slice(0, pieces), bounds.slice(0, pieces + 1));
  }

  /** Tokens in the stream. */
  get length() {
    return this.bounds[this.pieces];
  }

  /** Documents and parts of documents in the stream. */
  get pieces() {
    return this.starts.length;
  }

  /** The stable hash of the store's fingerprint, the rule in force and the name. */
  get fingerprint() {
    return stableHash({ store: this.store.fingerprint, split: this.rule, name: this.name });
  }

  /** Plain data for logs. */
  describe() {
    return { name: this.name, tokens: this.length, documents: this.pieces, split: this.rule };
  }

  /**
   * @param {number} begin
   * @param {number} end
   * @returns {Promise<Uint32Array<ArrayBuffer>>} tokens begin..end-1 of the stream, checked against the vocabulary
   */
  async read(begin, end) {
    if (!(begin >= 0 && begin <= end && end <= this.length)) {
      throw new DataContractError(
        `tokens ${begin}..${end} are outside the ${nameOf(this)}: it has ${this.length} tokens`,
      );
    }
    /** @type {Promise<Uint32Array<ArrayBuffer>>[]} */
    const parts = [];
    let piece = countUpTo(this.bounds, begin) - 1;
    while (begin < end) {
      const at = this.starts[piece] - this.bounds[piece];
      let stop = Math.min(end, this.bounds[piece + 1]);
      // Pieces that are neighbours in the store too are one read.
      while (stop < end && this.starts[piece + 1] - this.bounds[piece + 1] === at) {
        piece += 1;
        stop = Math.min(end, this.bounds[piece + 1]);
      }
      parts.push(this.store.read(at + begin, at + stop));
      begin = stop;
      piece += 1;
    }
    const read = await Promise.all(parts);
    if (read.length === 1) return read[0];
    const all = new Uint32Array(read.reduce((sum, part) => sum + part.length, 0));
    let at = 0;
    for (const part of read) {
      all.set(part, at);
      at += part.length;
    }
    return all;
  }
}

/** How error messages call a view. @param {TokenView} view */
export function nameOf(view) {
  return `${view.name} part of ${view.store.name}`;
}

/**
 * @param {Float64Array} sorted
 * @param {number} value
 * @returns {number} how many of them are at most `value`
 */
export function countUpTo(sorted, value) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}
