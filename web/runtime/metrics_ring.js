/**
 * @file Reads the device's ring of result rows without ever waiting for it.
 *
 * Every few steps the ring is copied, on the device, into one of two buffers, which is then mapped; the rows in it are
 * taken once the map has come through. Browsers that map on a slow poll (Firefox: ten times a second) only deliver
 * later. May import: errors, executor, plan, step_result, timing.
 */

import { ConfigError, HybridError } from "./errors.js";
import { decodeRow } from "./step_result.js";

/** @import {CommandStream} from "./command_stream.js" */
/** @import {Executor} from "./executor.js" */
/** @import {StepResult} from "./step_result.js" */
/** @import {Slots, StepTimer} from "./timing.js" */

const BUFFERS = 2;

/**
 * A step whose row nobody has read.
 *
 * @typedef {object} Unread
 * @property {number} step
 * @property {Slots | null} slots
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

  /**
   * @param {Executor} executor
   * @param {StepTimer} timer
   * @param {number} interval steps between two readbacks
   */
  constructor(executor, timer, interval) {
    this.executor = executor;
    this.timer = timer;
    this.interval = interval;
    this.ring = executor.plan.tensor("ring");
    this.rows = executor.plan.settings.ringRows;
    this.rowBytes = this.ring.bytes / this.rows;
    if (!Number.isInteger(interval) || interval < 1 || interval > this.rows / 2) {
      throw new ConfigError(`metrics interval ${interval}: expected 1 to ${Math.floor(this.rows / 2)} steps`);
    }
    this.#buffers = Array.from({ length: BUFFERS }, () => executor.readbackBuffer(this.ring.bytes + timer.bytes));
    this.#free = [...this.#buffers];
  }

  /**
   * The row of one step, now: waits for the device.
   *
   * @param {number} step
   * @returns {Promise<Uint32Array<ArrayBuffer>>}
   */
  async readRow(step) {
    const { arena, page, offset } = this.ring;
    const at = offset + (step % this.rows) * this.rowBytes;
    return new Uint32Array((await this.executor.readBytes(arena, page, at, this.rowBytes)).buffer);
  }

  /**
   * A step is recorded. When rows are due, records the copy too; what is returned is to be called once the stream is
   * submitted.
   *
   * @param {number} step
   * @param {Slots | null} slots
   * @param {CommandStream} stream
   * @returns {(() => void) | null}
   */
  add(step, slots, stream) {
    this.#unread.push({ step, slots });
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
      if (unread.slots && !this.timer.copy(encoder, unread.slots, buffer, this.ring.bytes)) unread.slots = null;
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
    const rowWords = this.rowBytes / 4;
    for (const { step, slots } of steps) {
      const row = new Uint32Array(data, (step % this.rows) * this.rowBytes, rowWords);
      const result = decodeRow(row, this.timer.times(slots, data, this.ring.bytes));
      if (result.dataStep !== step) {
        throw new HybridError(`metrics ring: expected the row of step ${step}, found step ${result.dataStep}`);
      }
      results.push(result);
    }
    buffer.unmap();
    this.#free.push(buffer);
  }

  close() {
    for (const buffer of this.#buffers) buffer.destroy();
  }
}
