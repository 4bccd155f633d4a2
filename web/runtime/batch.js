/** @file One microbatch as every backend receives it. May import: nothing. */

/** The target id that is no target. */
export const IGNORE = 0xffffffff;

/** @typedef {Uint32Array<ArrayBuffer>} Words */

/**
 * @typedef {object} BatchArrays
 * @property {Words} ids
 * @property {Words} targets
 * @property {Words} positions
 * @property {Words} segmentIds
 * @property {Words} sampleIds
 */

/**
 * B rows of T tokens, row after row.
 *
 * ids, targets, positions, segmentIds: [B, T]. `targets[b * T + t]` is the id to predict after `ids[b * T + t]`, or
 * IGNORE. Positions restart at each segment; segments of one row have different ids, and padding has segment id 0 with
 * IGNORE targets. sampleIds: [B], the index of each row within the *global* batch of its step (0..G-1): dropout is keyed
 * by it, so that any split of the global batch into microbatches draws the same masks.
 */
export class Batch {
  /**
   * @param {readonly [batchSize: number, sequenceLength: number]} shape
   * @param {BatchArrays} arrays
   */
  constructor(shape, { ids, targets, positions, segmentIds, sampleIds }) {
    this.shape = shape;
    this.ids = ids;
    this.targets = targets;
    this.positions = positions;
    this.segmentIds = segmentIds;
    this.sampleIds = sampleIds;
  }

  /** How many targets count. */
  get targetTokens() {
    let count = 0;
    for (const target of this.targets) if (target !== IGNORE) count++;
    return count;
  }
}
