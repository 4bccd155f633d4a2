/**
 * @file How long the parts of a step take: device timestamps, or a synchronised step now and then where there are none.
 *
 * May import: command_stream, executor, step_result.
 */

import { Timestamps } from "./command_stream.js";
import { NOT_TIMED, stepTimes } from "./step_result.js";

/** @import {Executor} from "./executor.js" */
/** @import {StepTimes} from "./step_result.js" */

const QUERY_SLOTS = 4096; // what one query set may hold
const QUERY_BYTES = 8;
const SLOT_ALIGNMENT = 32; // queries are resolved to multiples of 256 bytes
const CALIBRATE_EVERY = 200; // steps

/**
 * The query slots of a step. `place` counts slots since the start, so that a step whose slots were taken by a later one
 * can be told.
 *
 * @typedef {object} Slots
 * @property {Timestamps} timestamps
 * @property {number} place
 */

/** @typedef {"forward" | "backward" | "optimizer"} Piece */

/**
 * Hands timestamps to a step and turns them into milliseconds by phase.
 *
 * Where the device has no timestamps, `calibrating` says which steps the session runs in three pieces, waiting for each;
 * the steps between repeat the last figures.
 */
export class StepTimer {
  /** @type {GPUQuerySet | null} */
  #queries = null;
  /** @type {GPUBuffer | null} */
  #resolved = null;
  #used = 0;
  /** @type {Readonly<StepTimes>} */
  #calibration = NOT_TIMED;
  /** @type {Record<Piece, number>} milliseconds so far */
  #pieces = { forward: 0, backward: 0, optimizer: 0 };

  /**
   * @param {Executor} executor
   * @param {number} interval steps between two readbacks, for which slots must last
   * @param {() => number} clock seconds
   */
  constructor(executor, interval, clock) {
    this.executor = executor;
    this.interval = interval;
    this.clock = clock;
    if (executor.device.hasTimestamps) {
      this.#queries = executor.device.device.createQuerySet({ type: "timestamp", count: QUERY_SLOTS });
      this.#resolved = executor.queryBuffer(QUERY_SLOTS * QUERY_BYTES);
    }
  }

  /** What a readback adds to the ring's bytes. */
  get bytes() {
    return this.#queries ? QUERY_SLOTS * QUERY_BYTES : 0;
  }

  /**
   * Slots for a step of at most `passes` compute passes; null without timestamps, or when so many would not fit.
   *
   * @param {number} passes
   * @returns {Slots | null}
   */
  begin(passes) {
    const slots = Math.ceil((2 * passes) / SLOT_ALIGNMENT) * SLOT_ALIGNMENT;
    if (!this.#queries || slots * (this.interval + 1) > QUERY_SLOTS) return null;
    let first = this.#used % QUERY_SLOTS;
    if (first + slots > QUERY_SLOTS) {
      this.#used += QUERY_SLOTS - first;
      first = 0;
    }
    const place = this.#used;
    this.#used += slots;
    return { timestamps: new Timestamps(this.#queries, first, slots), place };
  }

  /**
   * Copy a step's timestamps into a readback buffer, behind the ring's rows. False when it has none that count.
   *
   * @param {GPUCommandEncoder} encoder
   * @param {Slots} slots
   * @param {GPUBuffer} buffer
   * @param {number} offset
   */
  copy(encoder, { timestamps, place }, buffer, offset) {
    const count = timestamps.next - timestamps.first;
    // A step that waited so long for a free buffer that a later one took its slots has no times.
    if (timestamps.overflowed || !count || this.#used - place > QUERY_SLOTS) return false;
    const at = timestamps.first * QUERY_BYTES;
    const resolved = /** @type {GPUBuffer} */ (this.#resolved);
    // Only what was written: some drivers wait for ever for a query that never was.
    encoder.resolveQuerySet(timestamps.querySet, timestamps.first, count, resolved, at);
    encoder.copyBufferToBuffer(resolved, at, buffer, offset + at, count * QUERY_BYTES);
    return true;
  }

  /**
   * The times of a step from a mapped readback, or the last calibration where it has no timestamps.
   *
   * @param {Slots | null} slots
   * @param {ArrayBuffer} data
   * @param {number} offset
   * @returns {Readonly<StepTimes>}
   */
  times(slots, data, offset) {
    if (!slots) return this.#calibration;
    const { first, next, phases } = slots.timestamps;
    return stepTimes(phases, new BigUint64Array(data, offset + first * QUERY_BYTES, next - first));
  }

  // Without timestamps

  /**
   * Whether this step is run in pieces that `piece` times. Not the first one, which may still compile.
   *
   * @param {number} dataStep
   */
  calibrating(dataStep) {
    if (this.#queries) return false;
    return dataStep % CALIBRATE_EVERY === 0 || (this.#calibration === NOT_TIMED && dataStep > 1);
  }

  /**
   * Run and time a piece of a calibration step; "optimizer" ends the step.
   *
   * @param {Piece} name
   * @param {() => void} run
   */
  async piece(name, run) {
    await this.executor.fence();
    const begin = this.clock();
    run();
    await this.executor.fence();
    this.#pieces[name] += (this.clock() - begin) * 1000;
    if (name !== "optimizer") return;
    const { forward, backward, optimizer } = this.#pieces;
    this.#pieces = { forward: 0, backward: 0, optimizer: 0 };
    this.#calibration = {
      stepTimeMs: forward + backward + optimizer,
      forwardMs: forward,
      backwardMs: backward,
      optimizerMs: optimizer,
      timingSource: "calibration",
    };
  }

  close() {
    this.#resolved?.destroy();
    this.#queries?.destroy();
  }
}
