/**
 * @file Reads the device's ring of result rows without ever waiting for it.
 *
 * Every few steps the ring is copied, on the device, into one of two buffers, which is then mapped; the rows in it are
 * taken once the map has come through. Browsers that map on a slow poll (Firefox: ten times a second) only deliver
 * later. May import: errors, executor, plan, step_result.
 */

import { Timestamps } from "./command_stream.js";
import { HybridError } from "./errors.js";
import { decodeRow, NOT_TIMED, stepTimes } from "./step_result.js";

/** @import {CommandStream} from "./command_stream.js" */
/** @import {Executor} from "./executor.js" */
/** @import {StepResult} from "./step_result.js" */

const QUERY_SLOTS = 4096; // what one query set may hold
const QUERY_BYTES = 8;
const SLOT_ALIGNMENT = 32; // queries are resolved to multiples of 256 bytes
const BUFFERS = 2;

/**
 * A step whose row nobody has read. `place` counts query slots since the start.
 *
 * @typedef {object} Unread
 * @property {number} step
 * @property {Timestamps | null} timestamps
 * @property {number} place
 */

/**
 * Rows on their way to the host.
 *
 * @typedef {object} Readback
 * @property {GPUBuffer} buffer
 * @property {readonly Unread[]} steps
 * @property {boolean} arrived
 * @property {unknown} error
 * @property {Promise<void>} done settles when `arrived` or `error` is set
 */

export class MetricsRing {
  /** @type {GPUBuffer[]} */
  #buffers;
  /** @type {GPUBuffer[]} */
  #free;
  /** @type {Readback[]} oldest first */
  #readbacks = [];
  /** @type {Unread[]} */
  #unread = [];
  /** @type {Unread | null} the step under way */
  #current = null;
  /** @type {GPUQuerySet | null} */
  #queries = null;
  /** @type {GPUBuffer | null} */
  #resolved = null;
  #slotsUsed = 0;

  /**
   * @param {Executor} executor
   * @param {number} interval steps between two readbacks
   */
  constructor(executor, interval) {
    this.executor = executor;
    this.interval = interval;
    this.ring = executor.plan.tensor("ring");
    this.rows = executor.plan.settings.ringRows;
    if (executor.device.hasTimestamps) {
      this.#queries = executor.device.device.createQuerySet({ type: "timestamp", count: QUERY_SLOTS });
      this.#resolved = executor.queryBuffer(QUERY_SLOTS * QUERY_BYTES);
    }
    const times = this.#queries ? QUERY_SLOTS * QUERY_BYTES : 0;
    this.#buffers = Array.from({ length: BUFFERS }, () => executor.readbackBuffer(this.ring.bytes + times));
    this.#free = [...this.#buffers];
  }

  /**
   * Query slots for a step that will make at most `passes` compute passes; null when they cannot be timed.
   *
   * @param {number} step
   * @param {number} passes
   * @returns {Timestamps | null}
   */
  begin(step, passes) {
    const slots = Math.ceil((2 * passes) / SLOT_ALIGNMENT) * SLOT_ALIGNMENT;
    this.#current = { step, timestamps: null, place: 0 };
    if (!this.#queries || slots * (this.interval + 1) > QUERY_SLOTS) return null;
    let first = this.#slotsUsed % QUERY_SLOTS;
    if (first + slots > QUERY_SLOTS) {
      this.#slotsUsed += QUERY_SLOTS - first;
      first = 0;
    }
    this.#current.place = this.#slotsUsed;
    this.#current.timestamps = new Timestamps(this.#queries, first, slots);
    this.#slotsUsed += slots;
    return this.#current.timestamps;
  }

  /**
   * Close the step that `begin` opened, after its programs were recorded. When rows are due, records the copy too; what
   * is returned is to be called once the stream is submitted.
   *
   * @param {CommandStream} stream
   * @returns {(() => void) | null}
   */
  end(stream) {
    if (this.#current) this.#unread.push(this.#current);
    this.#current = null;
    return this.#unread.length >= this.interval && this.#free.length ? this.#copy(stream) : null;
  }

  /**
   * Results that have arrived, in step order; with `wait`, of all the steps so far.
   *
   * @param {boolean} wait
   * @returns {Promise<StepResult[]>}
   */
  async take(wait) {
    /** @type {StepResult[]} */
    const results = [];
    while (this.#readbacks.length && (wait || this.#readbacks[0].arrived || this.#readbacks[0].error)) {
      await this.#collect(results);
    }
    if (wait && this.#unread.length) {
      const stream = this.executor.stream();
      const submitted = this.#copy(stream);
      stream.finish();
      submitted();
      await this.#collect(results);
    }
    return results;
  }

  /**
   * @param {CommandStream} stream
   * @returns {() => void}
   */
  #copy(stream) {
    const buffer = /** @type {GPUBuffer} */ (this.#free.pop());
    const { encoder } = stream;
    encoder.copyBufferToBuffer(this.executor.page(this.ring), this.ring.offset, buffer, 0, this.ring.bytes);
    const steps = this.#unread;
    this.#unread = [];
    for (const unread of steps) {
      const { timestamps, place } = unread;
      if (!timestamps) continue;
      const count = timestamps.next - timestamps.first;
      // A step that waited so long for a free buffer that a later one took its slots has no times.
      if (timestamps.overflowed || !count || this.#slotsUsed - place > QUERY_SLOTS) {
        unread.timestamps = null;
        continue;
      }
      const offset = timestamps.first * QUERY_BYTES;
      const resolved = /** @type {GPUBuffer} */ (this.#resolved);
      encoder.resolveQuerySet(timestamps.querySet, timestamps.first, count, resolved, offset);
      encoder.copyBufferToBuffer(resolved, offset, buffer, this.ring.bytes + offset, count * QUERY_BYTES);
    }
    return () => this.#map(buffer, steps);
  }

  /**
   * @param {GPUBuffer} buffer
   * @param {readonly Unread[]} steps
   */
  #map(buffer, steps) {
    /** @type {Readback} */
    const readback = { buffer, steps, arrived: false, error: null, done: Promise.resolve() };
    readback.done = this.executor.map(buffer).then(
      () => {
        readback.arrived = true;
      },
      (error) => {
        readback.error = error;
      },
    );
    this.#readbacks.push(readback);
  }

  /** @param {StepResult[]} results */
  async #collect(results) {
    const readback = this.#readbacks[0];
    await readback.done;
    this.#readbacks.shift();
    if (readback.error) throw readback.error;
    const { buffer, steps } = readback;
    const data = buffer.getMappedRange();
    const words = new Uint32Array(data, 0, this.ring.bytes / 4);
    const rowWords = words.length / this.rows;
    for (const { step, timestamps } of steps) {
      const at = step % this.rows;
      let times = NOT_TIMED;
      if (timestamps) {
        const begin = this.ring.bytes + timestamps.first * QUERY_BYTES;
        times = stepTimes(timestamps.phases, new BigUint64Array(data, begin, timestamps.next - timestamps.first));
      }
      const result = decodeRow(words.subarray(at * rowWords, (at + 1) * rowWords), times);
      if (result.dataStep !== step) {
        throw new HybridError(`metrics ring: expected the row of step ${step}, found step ${result.dataStep}`);
      }
      results.push(result);
    }
    buffer.unmap();
    this.#free.push(buffer);
  }

  /** Forget steps whose rows were not read: their state was replaced. Waits for what is on its way. */
  async reset() {
    this.#current = null;
    this.#unread = [];
    await this.take(true);
  }

  close() {
    for (const buffer of this.#buffers) buffer.destroy();
    this.#resolved?.destroy();
    this.#queries?.destroy();
  }
}
