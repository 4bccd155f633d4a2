/**
 * @file Batches in shuffled order, by step: any step of a run can be made at any time. Python has the same in
 * `data/loader.py`. May import: errors, contracts, random, batch.
 */

import { repr } from "../contracts/names.js";
import { ConfigError, DataContractError } from "../errors.js";
import { samples as shuffled } from "../random/shuffle.js";
import { emptySample, stack } from "./samples.js";

/** @import { Batch } from "../batch.js" */
/** @import { SampleSet } from "./samples.js" */

/**
 * Which samples each step reads: row j of step s (from 1) is global sample (s - 1) * globalBatch + j of the run.
 *
 * Global sample i belongs to epoch i // size and is sample permute(i mod size) of that epoch's permutation
 * (`random/shuffle.js`). Batches go on across epochs and are never partial.
 */
export class BatchPlan {
  /**
   * @param {object} options
   * @param {number} options.size samples of the data set
   * @param {number} options.globalBatch samples of a step
   * @param {number | bigint} options.seed
   * @param {number | null} [options.limit] the run ends after this many samples; rows beyond it are masked. null: no end
   */
  constructor({ size, globalBatch, seed, limit = null }) {
    if (size < 1) {
      throw new DataContractError(`a data set of ${size} samples cannot be trained on, expected at least 1`);
    }
    if (globalBatch < 1) throw new ConfigError(`the global batch has ${globalBatch} samples, expected at least 1`);
    if (limit !== null && limit < 1) {
      throw new ConfigError(`the run is limited to ${limit} samples, expected at least 1`);
    }
    this.size = size;
    this.globalBatch = globalBatch;
    this.seed = seed;
    this.limit = limit;
  }

  /** Steps of the run, the last one perhaps with masked rows; null without a limit. @returns {number | null} */
  get steps() {
    return this.limit === null ? null : Math.ceil(this.limit / this.globalBatch);
  }

  /**
   * @param {number} dataStep
   * @returns {number[]} [globalBatch] the sample of each row; -1 for a row beyond the limit
   */
  indices(dataStep) {
    const { globalBatch, limit, steps } = this;
    if (!(dataStep >= 1 && dataStep <= (steps ?? Number.MAX_SAFE_INTEGER))) {
      throw new DataContractError(`there is no data step ${dataStep}, expected 1${steps === null ? "" : `..${steps}`}`);
    }
    const first = (dataStep - 1) * globalBatch;
    const count = limit === null ? globalBatch : Math.min(globalBatch, limit - first);
    const rows = shuffled(this.seed, first, count, this.size);
    while (rows.length < globalBatch) rows.push(-1);
    return rows;
  }

  /**
   * Where the data stands after a step (0: at the start): samples read, epoch and position of the next.
   *
   * @param {number} dataStep
   */
  cursor(dataStep) {
    const samples = Math.min(dataStep * this.globalBatch, this.limit ?? Number.POSITIVE_INFINITY);
    return { samples, epoch: Math.floor(samples / this.size), position: samples % this.size };
  }
}

/** A step that is made ahead, unless it is not wanted any more. @typedef {{batches: Promise<Batch[]>, wanted: boolean}} Ahead */

/** The microbatches of a step, made ahead while the device works. One consumer at a time. */
export class DataLoader {
  #prefetch;
  #closed = false;
  /** @type {Map<number, Ahead>} */
  #ahead = new Map();

  /**
   * @param {SampleSet} dataset
   * @param {BatchPlan} plan
   * @param {number} microbatchSize
   * @param {object} [options]
   * @param {number} [options.prefetch] how many steps are made ahead; 0 makes each when it is asked for
   * @throws {ConfigError} if the global batch is not a multiple of the microbatch, or the plan is for another size
   */
  constructor(dataset, plan, microbatchSize, { prefetch = 2 } = {}) {
    if (dataset.size !== plan.size) {
      throw new ConfigError(`the plan is for ${plan.size} samples, but the data set has ${dataset.size}`);
    }
    if (microbatchSize < 1 || plan.globalBatch % microbatchSize) {
      throw new ConfigError(
        `a global batch of ${plan.globalBatch} does not divide into microbatches of ${microbatchSize} on 1 ranks: ` +
          `make it a multiple of ${Math.max(1, microbatchSize)}`,
      );
    }
    this.dataset = dataset;
    this.plan = plan;
    this.microbatchSize = microbatchSize;
    this.#prefetch = prefetch;
  }

  /** Microbatches in a step. */
  get microbatches() {
    return this.plan.globalBatch / this.microbatchSize;
  }

  /**
   * The microbatches of a step (from 1), in order. Steps may be asked for in any order; one after the other is fast.
   *
   * @param {number} dataStep
   * @returns {Promise<Batch[]>}
   * @throws {DataContractError} for what is wrong with the data, and for a step without any target
   */
  step(dataStep) {
    if (this.#closed) return Promise.reject(new Error("the data loader is closed"));
    const found = this.#ahead.get(dataStep);
    this.#ahead.delete(dataStep);
    // Steps that were passed over; after a jump, all.
    for (const step of this.#ahead.keys()) if (!found || step < dataStep) this.#drop(step);
    const batches = found?.batches ?? this.make(dataStep);
    const last = Math.min(dataStep + this.#prefetch, this.plan.steps ?? Number.POSITIVE_INFINITY);
    // One after the other: the next step is wanted first.
    let before = batches;
    for (let step = dataStep + 1; step <= last; step++) {
      before = (this.#ahead.get(step) ?? this.#after(before, step)).batches;
    }
    return batches;
  }

  /**
   * Targets of the whole step, over all microbatches: the denominator of its loss. Reads no tokens.
   *
   * @param {number} dataStep
   * @returns {number}
   * @throws {DataContractError} if there are none
   */
  targetTokens(dataStep) {
    const indices = this.plan.indices(dataStep).filter((index) => index >= 0);
    const total = this.dataset.targetCounts(indices).reduce((sum, count) => sum + count, 0);
    if (total) return total;
    throw new DataContractError(
      `data step ${dataStep} has no target at all: its loss is undefined; use larger batches`,
    );
  }

  /** `BatchPlan.cursor`, for checkpoints. @param {number} dataStep */
  cursor(dataStep) {
    return this.plan.cursor(dataStep);
  }

  /** `step`, not made ahead. @param {number} dataStep @returns {Promise<Batch[]>} */
  async make(dataStep) {
    this.targetTokens(dataStep);
    const indices = this.plan.indices(dataStep);
    const { dataset, microbatchSize } = this;
    /** @type {Batch[]} */
    const batches = [];
    for (let first = 0; first < indices.length; first += microbatchSize) {
      const rows = indices.slice(first, first + microbatchSize);
      const samples = await Promise.all(
        rows.map((index) => (index < 0 ? emptySample(dataset.sequenceLength) : dataset.sample(index))),
      );
      batches.push(stack(samples, first));
    }
    return batches;
  }

  /** Make nothing ahead any more; may be called twice. */
  close() {
    this.#closed = true;
    for (const step of this.#ahead.keys()) this.#drop(step);
  }

  /** @param {number} step */
  #drop(step) {
    const dropped = this.#ahead.get(step);
    if (dropped) dropped.wanted = false;
    this.#ahead.delete(step);
  }

  /** @param {Promise<unknown>} before @param {number} step @returns {Ahead} */
  #after(before, step) {
    /** @type {Ahead} */
    const ahead = {
      batches: before.catch(() => {}).then(() => (ahead.wanted ? this.make(step) : [])),
      wanted: true,
    };
    ahead.batches.catch(() => {}); // said when the step is asked for
    this.#ahead.set(step, ahead);
    return ahead;
  }
}

/**
 * Every sample once, in order, in batches of batchSize rows; the last is filled with rows that have no targets.
 *
 * @param {SampleSet} dataset
 * @param {number} batchSize
 * @param {number | null} [batches] at most this many (a quick evaluation): then the samples are spread evenly over the
 *   data set, and are the same each time
 * @returns {AsyncGenerator<Batch, void, void>}
 */
export async function* evaluationBatches(dataset, batchSize, batches = null) {
  if (batchSize < 1 || (batches !== null && batches < 1)) {
    throw new ConfigError(
      `evaluation needs at least one batch of at least one row, got ${repr(batches)} of ${batchSize}`,
    );
  }
  const { size } = dataset;
  const wanted = batches === null ? size : Math.min(size, batches * batchSize);
  /** @param {number} row */
  const sample = (row) => {
    if (row >= wanted) return emptySample(dataset.sequenceLength);
    // The product may be beyond 2^53.
    return dataset.sample(wanted === size ? row : Number((BigInt(row) * BigInt(size)) / BigInt(wanted)));
  };
  for (let first = 0; first < wanted; first += batchSize) {
    const rows = Array.from({ length: batchSize }, (_, row) => sample(first + row));
    yield stack(await Promise.all(rows), 0);
  }
}
