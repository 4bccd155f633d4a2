/**
 * @file How fast training is: time of steps only, without evaluation, samples and saving.
 *
 * May import: nothing.
 */

/** Counts steps, tokens and seconds of this process. */
export class Meter {
  #clock;
  #window;
  #began;
  #pausedSeconds = 0;
  #pauses = 0;
  /** @type {{seconds: number, tokens: number}[]} training seconds and tokens after each of the recent steps */
  #marks = [{ seconds: 0, tokens: 0 }];

  /**
   * @param {() => number} clock monotonic seconds
   * @param {number} [window] recent steps that the rate is of
   */
  constructor(clock, window = 50) {
    this.#clock = clock;
    this.#window = window;
    this.#began = clock();
    this.steps = 0;
    this.tokens = 0;
  }

  /**
   * Time of this work is not training time; works may nest.
   *
   * @template T
   * @param {() => Promise<T>} work
   * @returns {Promise<T>}
   */
  async paused(work) {
    const began = this.#clock();
    this.#pauses++;
    try {
      return await work();
    } finally {
      this.#pauses--;
      if (!this.#pauses) this.#pausedSeconds += this.#clock() - began;
    }
  }

  /**
   * Time of this work does not exist: neither the rate nor the remaining time know of it.
   *
   * @template T
   * @param {() => Promise<T>} work
   * @returns {Promise<T>}
   */
  async stopped(work) {
    const began = this.#clock();
    try {
      return await work();
    } finally {
      this.#began += this.#clock() - began;
    }
  }

  /**
   * A step has been handed to the session.
   *
   * @param {number} tokens its targets
   */
  step(tokens) {
    this.steps++;
    this.tokens += tokens;
    this.#marks.push({ seconds: this.trainingSeconds, tokens: this.tokens });
    if (this.#marks.length > this.#window + 1) this.#marks.shift();
  }

  /** Wall-clock seconds since the loop began. */
  get seconds() {
    return this.#clock() - this.#began;
  }

  /** The same without pauses. */
  get trainingSeconds() {
    return this.seconds - this.#pausedSeconds;
  }

  /** Target tokens a second over the recent steps; 0 before the first. */
  get tokensPerSecond() {
    const { first, last } = this.#ends();
    const elapsed = last.seconds - first.seconds;
    return elapsed > 0 ? (last.tokens - first.tokens) / elapsed : 0;
  }

  /** Mean time of the recent steps; 0 before the first. */
  get stepMilliseconds() {
    const { first, last, count } = this.#ends();
    return count ? (1000 * (last.seconds - first.seconds)) / count : 0;
  }

  /**
   * Seconds that the remaining steps will take, evaluation and saving included, judged by the steps of this process.
   *
   * @param {number} remainingSteps
   * @returns {number | null}
   */
  etaSeconds(remainingSteps) {
    return this.steps ? (remainingSteps * this.seconds) / this.steps : null;
  }

  #ends() {
    const count = this.#marks.length - 1;
    return { first: this.#marks[0], last: this.#marks[count], count };
  }
}
