/**
 * @file Checkpoints of a run, stored while training goes on.
 *
 * May import: nothing.
 */

/** @import { Snapshot } from "../checkpoint/snapshot.js" */
/** @import { CheckpointRef } from "./job.js" */

const MOST_OUTSTANDING = 2; // each holds a copy of the state

/** Stores snapshots one after the other. The first error ends the run at the next call. */
export class Saver {
  #store;
  #saved;
  /** @type {Promise<void>[]} */
  #pending = [];
  /** @type {Promise<unknown>} */
  #last = Promise.resolve();
  /** @type {{error: unknown} | null} */
  #failure = null;
  /** @type {number | null} */
  #lastStep = null;
  /** @type {(() => unknown)[]} news of saves that finished */
  #news = [];

  /**
   * @param {(snapshot: Snapshot) => Promise<CheckpointRef>} store
   * @param {(ref: CheckpointRef, snapshot: Snapshot) => unknown} saved told of each finished save, by `report`; awaited
   */
  constructor(store, saved) {
    this.#store = store;
    this.#saved = saved;
    /** Whether a checkpoint of this process is stored. */
    this.saved = false;
  }

  /**
   * Hand a snapshot over, whose arrays nobody else changes. Waits while two saves are outstanding.
   *
   * @param {Snapshot} snapshot
   */
  async save(snapshot) {
    while (this.#pending.length >= MOST_OUTSTANDING) await this.#pending[0];
    await this.report();
    const save = this.#last.then(async () => {
      if (this.#failure) return;
      try {
        const ref = await this.#store(snapshot);
        this.saved = true;
        this.#news.push(() => this.#saved(ref, snapshot));
      } catch (error) {
        this.#failure = { error };
      } finally {
        this.#pending.shift();
      }
    });
    this.#last = save;
    this.#pending.push(save);
    this.#lastStep = snapshot.progress.step;
  }

  /** Whether the state after this step was handed over last: it need not be saved twice. @param {number} step */
  holds(step) {
    return this.#lastStep === step;
  }

  /** Tell of the saves that have finished. Throws the error of one that failed. */
  async report() {
    for (let news = this.#news.shift(); news; news = this.#news.shift()) await news();
    if (this.#failure) throw this.#failure.error;
  }

  /** Resolves when everything is stored. */
  async wait() {
    await this.#last;
    await this.report();
  }

  /** After going back to an older step: its successors are to be saved again. */
  forget() {
    this.#lastStep = null;
  }
}
