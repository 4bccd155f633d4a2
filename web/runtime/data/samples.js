/**
 * @file What a sample is, what every set of samples offers, and the ledger that says where its tokens went.
 *
 * May import: batch.
 */

import { Batch, IGNORE } from "../batch.js";

/** @import { Words } from "../batch.js" */

/**
 * One row of T tokens, each [T], as in `Batch`. Segments are numbered 1, 2, ... from left to right, each starts at
 * position 0, and padding (only at the end) has id 0, position 0, segment 0 and the target IGNORE.
 *
 * @typedef {object} Sample
 * @property {Words} ids
 * @property {Words} targets
 * @property {Words} positions
 * @property {Words} segmentIds
 */

/**
 * Where the tokens of a view went. For every data set: rows * sequenceLength == kept + repeated + padded, tokens == kept +
 * targetOnly + dropped, and targets + acrossDocuments == kept + repeated.
 *
 * @typedef {object} Ledger
 * @property {number} rows
 * @property {number} sequenceLength
 * @property {number} tokens
 * @property {number} kept tokens read as input
 * @property {number} repeated read once more, as context in another row
 * @property {number} targetOnly never read, only predicted (the last of a stream or packed document)
 * @property {number} dropped neither
 * @property {number} padded places without a token
 * @property {number} splitDocuments documents whose context is cut because they are longer than a row (packing)
 * @property {number} targets targets that count
 * @property {number} acrossDocuments tokens whose successor belongs to another document, so that it is no target
 */

/**
 * A fixed, numbered set of samples.
 *
 * @typedef {object} SampleSet
 * @property {number} size
 * @property {number} sequenceLength
 * @property {number} vocabularySize
 * @property {(index: number) => Promise<Sample>} sample DataContractError for an id outside the vocabulary
 * @property {(indices: Iterable<number>) => Float64Array} targetCounts how many targets each of the samples has, without
 *   reading tokens
 * @property {Ledger} ledger
 * @property {string} fingerprint the stable hash of everything that determines the samples
 * @property {() => Record<string, unknown>} describe
 */

/** @param {number} length @returns {Sample} a row without any token */
export function emptySample(length) {
  const row = () => new Uint32Array(length);
  return { ids: row(), targets: row().fill(IGNORE), positions: row(), segmentIds: row() };
}

/**
 * The samples as one microbatch [B, T].
 *
 * @param {readonly Sample[]} samples
 * @param {number} first place of the first one in the global batch; the others follow
 * @returns {Batch}
 */
export function stack(samples, first) {
  const length = samples[0].ids.length;
  /** @param {keyof Sample} name */
  const joined = (name) => {
    const rows = new Uint32Array(samples.length * length);
    for (const [row, sample] of samples.entries()) rows.set(sample[name], row * length);
    return rows;
  };
  return new Batch([samples.length, length], {
    ids: joined("ids"),
    targets: joined("targets"),
    positions: joined("positions"),
    segmentIds: joined("segmentIds"),
    sampleIds: Uint32Array.from(samples, (_, row) => first + row),
  });
}
