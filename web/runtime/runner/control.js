/**
 * @file What others ask of a running loop: to stop, to save, to pause, to go on.
 *
 * May import: errors.
 */

import { StopRequested } from "../errors.js";

const PAUSE_POLL_MS = 50;

/** Asked between two steps, and wherever work takes long. The first reason to stop is kept. */
export class Control {
  #asked;
  #clock;
  #maxHours;
  #deadline;
  /** @type {string | null} */
  #reason = null;
  #save;

  /**
   * @param {() => string | null} asked why somebody outside wants a stop, or null
   * @param {number | null} maxHours after which a stop is due, counted from here; null: never
   * @param {() => number} clock seconds
   */
  constructor(asked, maxHours, clock) {
    this.#asked = asked;
    this.#clock = clock;
    this.#maxHours = maxHours;
    this.#deadline = maxHours === null ? Number.POSITIVE_INFINITY : clock() + maxHours * 3600;
    this.paused = false;
    this.#save = false;
  }

  /** Save before the next step. */
  requestSave() {
    this.#save = true;
  }

  /** Whether a save was asked for since the last call. */
  takeSave() {
    const asked = this.#save;
    this.#save = false;
    return asked;
  }

  /** Why a stop is due; null while none is. */
  get reason() {
    this.#reason ??= this.#asked();
    if (this.#reason === null && this.#clock() >= this.#deadline) {
      this.#reason = `run.maxHours = ${this.#maxHours} is over`;
    }
    return this.#reason;
  }

  /** @param {string} reason */
  request(reason) {
    this.#reason ??= reason;
  }

  /** Throws StopRequested if a stop is due: for work that has nothing to save. */
  check() {
    if (this.reason !== null) throw new StopRequested(`stopped before the first step: ${this.reason}`);
  }

  /** Resolves when nobody wants a pause any more, or a stop is due. */
  async untilResumed() {
    while (this.paused && this.reason === null) await new Promise((done) => setTimeout(done, PAUSE_POLL_MS));
  }
}
