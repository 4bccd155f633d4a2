/**
 * @file Packing: whole documents side by side in rows, as few rows as best-fit finds. Python has the same in
 * `data/packing.py`. May import: errors, contracts.
 */

import { stableHash } from "../contracts/stable_json.js";
import { ConfigError, DataContractError } from "../errors.js";
import { emptySample } from "./samples.js";
import { nameOf } from "./split.js";

/** @import { Ledger, Sample, SampleSet } from "./samples.js" */
/** @import { TokenView } from "./split.js" */

/**
 * Rows of T tokens, each holding pieces of documents as isolated segments with positions from 0.
 *
 * A document of n tokens needs n - 1 places (its last token is only predicted). A longer one than T is split into pieces
 * of T places and a rest; the piece after a cut begins with the token that the piece before it predicted last, so no
 * target is lost, only context. Pieces go, longest first, into the fullest row that still has room (the oldest of such).
 * A document of one token has no target and is dropped.
 *
 * @implements {SampleSet}
 */
export class PackedDataset {
  #begins;
  #sizes;
  #rowBounds;

  /**
   * @param {TokenView} view
   * @param {number} sequenceLength T
   * @throws {DataContractError} for a view without any target
   */
  constructor(view, sequenceLength) {
    if (sequenceLength < 1) throw new ConfigError(`the sequence length is ${sequenceLength}, expected at least 1`);
    this.view = view;
    this.sequenceLength = sequenceLength;
    this.vocabularySize = view.vocabularySize;
    const { begins, sizes } = cut(view.bounds, sequenceLength);
    if (!sizes.length) {
      throw new DataContractError(
        `the ${view.name} part of the text has only documents of one token: nothing to predict; add text`,
      );
    }
    const { order, rowBounds } = bestFit(sizes, sequenceLength);
    this.#begins = Float64Array.from(order, (piece) => begins[piece]); // in the order of the rows
    this.#sizes = Uint32Array.from(order, (piece) => sizes[piece]);
    this.#rowBounds = rowBounds;
    this.size = rowBounds.length - 1;
  }

  /** @param {number} index @returns {Promise<Sample>} */
  async sample(index) {
    if (!(index >= 0 && index < this.size)) {
      throw new DataContractError(
        `there is no sample ${index} in the ${nameOf(this.view)}, expected 0..${this.size - 1}`,
      );
    }
    const sample = emptySample(this.sequenceLength);
    const { ids, targets, positions, segmentIds } = sample;
    const first = this.#rowBounds[index];
    const begins = this.#begins.subarray(first, this.#rowBounds[index + 1]);
    const read = await Promise.all(
      Array.from(begins, (begin, piece) => this.view.read(begin, begin + this.#sizes[first + piece] + 1)),
    );
    let at = 0;
    for (const [segment, tokens] of read.entries()) {
      const size = tokens.length - 1;
      ids.set(tokens.subarray(0, size), at);
      targets.set(tokens.subarray(1), at);
      for (let position = 0; position < size; position++, at++) {
        positions[at] = position;
        segmentIds[at] = segment + 1;
      }
    }
    return sample;
  }

  /** @param {Iterable<number>} indices */
  targetCounts(indices) {
    return Float64Array.from(indices, (index) => {
      let total = 0;
      for (let piece = this.#rowBounds[index]; piece < this.#rowBounds[index + 1]; piece++) total += this.#sizes[piece];
      return total;
    });
  }

  /** @returns {Ledger} */
  get ledger() {
    const { bounds, pieces, length: tokens } = this.view;
    const { sequenceLength, size: rows } = this;
    let dropped = 0;
    let splitDocuments = 0;
    for (let piece = 0; piece < pieces; piece++) {
      const places = bounds[piece + 1] - bounds[piece] - 1;
      dropped += Number(places === 0);
      splitDocuments += Number(places > sequenceLength);
    }
    const filled = tokens - pieces; // all but the last token of each
    return {
      rows,
      sequenceLength,
      tokens,
      kept: filled,
      repeated: 0,
      targetOnly: pieces - dropped,
      dropped,
      padded: rows * sequenceLength - filled,
      splitDocuments,
      targets: filled,
      acrossDocuments: 0,
    };
  }

  get fingerprint() {
    return stableHash({ view: this.view.fingerprint, samples: this.#settings() });
  }

  describe() {
    return { ...this.view.describe(), samples: this.#settings(), ledger: this.ledger };
  }

  #settings() {
    return { mode: "packed", sequenceLength: this.sequenceLength };
  }
}

/**
 * Where each piece begins in the stream and how many places it takes (1..length), in the order of the documents.
 *
 * @param {Float64Array} bounds of the documents
 * @param {number} length
 */
function cut(bounds, length) {
  let count = 0;
  for (let d = 1; d < bounds.length; d++) count += Math.ceil((bounds[d] - bounds[d - 1] - 1) / length);
  const begins = new Float64Array(count);
  const sizes = new Uint32Array(count);
  let piece = 0;
  for (let d = 1; d < bounds.length; d++) {
    for (let begin = bounds[d - 1]; begin < bounds[d] - 1; begin += length, piece++) {
      begins[piece] = begin;
      sizes[piece] = Math.min(length, bounds[d] - 1 - begin);
    }
  }
  return { begins, sizes };
}

/**
 * Best-fit decreasing, ties by order of appearance.
 *
 * @param {Uint32Array} sizes
 * @param {number} length
 * @returns {{order: Uint32Array, rowBounds: Uint32Array}} pieces row by row, and where each row begins among them
 */
function bestFit(sizes, length) {
  const count = sizes.length;
  const rowOf = new Uint32Array(count);
  const sorted = byKey(sizes, length, (size) => length - size).order;
  // Rows with room r are a queue: heads[r], then next[row]; 0 is none, row numbers are one more.
  const heads = new Uint32Array(length + 1);
  const tails = new Uint32Array(length + 1);
  const next = new Uint32Array(count + 1);
  // Bit r is set iff some row has room r: the least sufficient room is found 32 at a time.
  const open = new Uint32Array((length >>> 5) + 1);
  let rows = 0;
  for (const piece of sorted) {
    const size = sizes[piece];
    let room = leastSet(open, size);
    let row;
    if (room >= 0) {
      row = heads[room];
      heads[room] = next[row];
      if (!heads[room]) open[room >>> 5] &= ~(1 << (room & 31));
    } else {
      room = length;
      row = ++rows;
    }
    rowOf[piece] = row - 1;
    room -= size;
    if (!room) continue;
    next[row] = 0;
    if (heads[room]) next[tails[room]] = row;
    else heads[room] = row;
    tails[room] = row;
    open[room >>> 5] |= 1 << (room & 31);
  }
  // Within a row, pieces lie in the order in which they came to it.
  const { order, starts } = byKey(rowOf, rows, (row) => row, sorted);
  return { order, rowBounds: starts };
}

/**
 * The least number that is set and at least `from`, or -1.
 *
 * @param {Uint32Array} bits
 * @param {number} from
 */
function leastSet(bits, from) {
  let word = from >>> 5;
  let found = word < bits.length ? bits[word] & (-1 << (from & 31)) : 0;
  while (!found && ++word < bits.length) found = bits[word];
  return found ? word * 32 + 31 - Math.clz32(found & -found) : -1;
}

/**
 * Counting sort of the indices of `values` by a key below `keys`, equal ones in the order of `from`.
 *
 * @param {Uint32Array} values
 * @param {number} keys
 * @param {(value: number) => number} keyOf
 * @param {Uint32Array} [from] indices, all of them; in their own order by default
 * @returns {{order: Uint32Array, starts: Uint32Array}} starts: [keys + 1], where each key begins
 */
function byKey(values, keys, keyOf, from = values.map((_, index) => index)) {
  const starts = new Uint32Array(keys + 1);
  for (const value of values) starts[keyOf(value) + 1] += 1;
  for (let key = 0; key < keys; key++) starts[key + 1] += starts[key];
  const places = starts.slice();
  const order = new Uint32Array(values.length);
  for (const index of from) order[places[keyOf(values[index])]++] = index;
  return { order, starts };
}
