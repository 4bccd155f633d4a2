/**
 * @file Windows: the stream of tokens cut into rows of equal length. Python has the same in `data/windows.py`.
 *
 * May import: errors, contracts, batch.
 */

import { IGNORE } from "../batch.js";
import { stableHash } from "../contracts/stable_json.js";
import { ConfigError, DataContractError } from "../errors.js";
import { emptySample } from "./samples.js";
import { countUpTo, nameOf } from "./split.js";

/** @import { Ledger, Sample, SampleSet } from "./samples.js" */
/** @import { TokenView } from "./split.js" */

/**
 * Rows of T tokens from a stream of N: row k reads tokens k*stride .. k*stride + T - 1 and predicts the next of each.
 *
 * Neighbouring windows share the token at their border, and the last row is padded, so no target is lost. With a stride
 * below T, rows overlap and targets count once for each row that has them.
 *
 * @implements {SampleSet}
 */
export class WindowDataset {
  #borders;

  /**
   * @param {TokenView} view
   * @param {number} sequenceLength T
   * @param {object} [options]
   * @param {number | null} [options.stride] T by default
   * @param {boolean} [options.isolateDocuments] each document is a segment of its own with positions from 0, and its last
   *   token has no target; otherwise a row is one segment and the borders are invisible
   * @throws {DataContractError} for a view without any target (fewer than two tokens, or only one-token documents)
   */
  constructor(view, sequenceLength, { stride = null, isolateDocuments = true } = {}) {
    const step = stride ?? sequenceLength;
    if (sequenceLength < 1) throw new ConfigError(`the sequence length is ${sequenceLength}, expected at least 1`);
    if (!(step >= 1 && step <= sequenceLength)) {
      throw new ConfigError(`the stride is ${step}, expected 1..${sequenceLength}: a longer one would skip tokens`);
    }
    if (view.length < 2) {
      throw new DataContractError(
        `the ${view.name} part of the text has ${view.length} token: nothing to predict; add text`,
      );
    }
    this.view = view;
    this.sequenceLength = sequenceLength;
    this.stride = step;
    this.isolateDocuments = isolateDocuments;
    this.vocabularySize = view.vocabularySize;
    /** Rows: the last one is the first that reaches the last token, N - 1, as a target. */
    this.size = 1 + Math.max(0, Math.ceil((view.length - 1 - sequenceLength) / step));
    // Where documents begin in the stream, the first one excepted: no target reaches across these.
    this.#borders = isolateDocuments ? view.bounds.subarray(1, -1) : view.bounds.subarray(0, 0);
    if (this.#borders.length === view.length - 1) {
      throw new DataContractError(
        `the ${view.name} part of the text has only documents of one token: nothing to predict; add text`,
      );
    }
  }

  /** @param {number} index @returns {Promise<Sample>} */
  async sample(index) {
    if (!(index >= 0 && index < this.size)) {
      throw new DataContractError(
        `there is no sample ${index} in the ${nameOf(this.view)}, expected 0..${this.size - 1}`,
      );
    }
    const [begin, end, first, last] = this.#range(index);
    const tokens = await this.view.read(begin, end);
    const count = tokens.length - 1;
    const sample = emptySample(this.sequenceLength);
    const { ids, targets, positions, segmentIds } = sample;
    ids.set(tokens.subarray(0, count));
    targets.set(tokens.subarray(1));
    let segment = 1;
    for (let at = 0, start = 0, next = first; at < count; at++) {
      if (next < last && this.#borders[next] === begin + at) {
        start = at;
        segment += 1;
        next += 1;
      }
      positions[at] = at - start;
      segmentIds[at] = segment;
    }
    for (let border = first; border < last; border++) targets[this.#borders[border] - begin - 1] = IGNORE;
    return sample;
  }

  /** @param {Iterable<number>} indices */
  targetCounts(indices) {
    return Float64Array.from(indices, (index) => this.#targets(index));
  }

  /** @returns {Ledger} */
  get ledger() {
    const { size: rows, sequenceLength } = this;
    const tokens = this.view.length;
    const used = (rows - 1) * sequenceLength + (tokens - 1 - (rows - 1) * this.stride);
    let targets = 0;
    for (let index = 0; index < rows; index++) targets += this.#targets(index);
    return {
      rows,
      sequenceLength,
      tokens,
      kept: tokens - 1,
      repeated: used - (tokens - 1),
      targetOnly: 1,
      dropped: 0,
      padded: rows * sequenceLength - used,
      splitDocuments: 0,
      targets,
      acrossDocuments: used - targets,
    };
  }

  get fingerprint() {
    return stableHash({ view: this.view.fingerprint, samples: this.#settings() });
  }

  describe() {
    return { ...this.view.describe(), samples: this.#settings(), ledger: this.ledger };
  }

  /** @param {number} index */
  #targets(index) {
    const [begin, end, first, last] = this.#range(index);
    return end - begin - 1 - (last - first);
  }

  /** @param {number} index @returns {[begin: number, end: number, first: number, last: number]} its tokens and borders */
  #range(index) {
    const begin = index * this.stride;
    const end = Math.min(begin + this.sequenceLength + 1, this.view.length);
    return [begin, end, countUpTo(this.#borders, begin), countUpTo(this.#borders, end - 1)];
  }

  #settings() {
    const { sequenceLength, stride, isolateDocuments } = this;
    return { mode: "windows", sequenceLength, stride, isolateDocuments };
  }
}
