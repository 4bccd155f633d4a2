/**
 * @file How far the host runs ahead of the device: two steps, or as many as fit a quarter of a second.
 *
 * This bounds the latency of stopping and of results, and lets the device never wait for the host. May import: nothing.
 */

const MAX_STEPS = 2;
const MAX_SECONDS = 0.25;
const SMOOTHING = 0.2;

/**
 * A step that was submitted.
 *
 * @typedef {object} Step
 * @property {Promise<void>} done settles when it has run, or failed
 * @property {unknown} error why it failed
 * @property {number} submitted the clock then
 */

export class Flight {
  /** @type {Step[]} oldest first */
  #steps = [];
  /** @type {number | null} when the last step finished */
  #last = null;

  /**
   * @param {() => Promise<void>} fence resolves when everything submitted so far has run
   * @param {() => number} clock seconds
   */
  constructor(fence, clock) {
    this.fence = fence;
    this.clock = clock;
    /** Seconds of a step on the device, smoothed; 0 before the first has finished. */
    this.stepSeconds = 0;
  }

  /** Counts a step whose work is submitted. */
  add() {
    /** @type {Step} */
    const step = { done: Promise.resolve(), error: null, submitted: this.clock() };
    step.done = this.fence().then(
      () => this.#finished(step),
      (error) => {
        step.error = error;
      },
    );
    this.#steps.push(step);
  }

  /** Waits while more steps are under way than may be. */
  async bound() {
    while (this.#steps.length > this.#allowed()) await this.#pass();
  }

  /** Waits for all of them. */
  async drain() {
    while (this.#steps.length) await this.#pass();
  }

  #allowed() {
    return Math.max(MAX_STEPS, this.stepSeconds > 0 ? Math.floor(MAX_SECONDS / this.stepSeconds) : 0);
  }

  async #pass() {
    const step = this.#steps[0];
    await step.done;
    if (!step.error) return;
    this.#steps.shift();
    throw step.error;
  }

  /**
   * Browsers that look at the device now and then (Firefox: ten times a second) report several steps at once: the first
   * of them seems long and the others instant, and smoothing makes the mean of it.
   *
   * @param {Step} step
   */
  #finished(step) {
    const now = this.clock();
    const seconds = now - Math.max(this.#last ?? step.submitted, step.submitted);
    this.stepSeconds += (this.stepSeconds ? SMOOTHING : 1) * (seconds - this.stepSeconds);
    this.#last = now;
    if (this.#steps[0] === step) this.#steps.shift();
  }
}
