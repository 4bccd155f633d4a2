/**
 * @file How far a run is and when it will be done.
 *
 * A run of several shards counts on: shard s of S with n steps each has global steps (s - 1) * n + 1 .. s * n of S * n.
 */

import { ConfigError } from "../errors.js";
import { isInteger, isoTime, objectOrEmpty } from "./values.js";

/**
 * Which shard this is, of how many, and how many steps each has (null: unknown).
 *
 * @typedef {object} ProgressContext
 * @property {number} shardIndex
 * @property {number} shardCount
 * @property {number | null} stepsPerShard
 */

/**
 * Progress after one step; null where the number of steps is unknown. Times in milliseconds, `etaIso` in UTC.
 *
 * @typedef {object} Snapshot
 * @property {number} shardIndex
 * @property {number} shardCount
 * @property {number} stepInShard
 * @property {number | null} stepsPerShard
 * @property {number | null} globalStep
 * @property {number | null} globalSteps
 * @property {number | null} percentComplete
 * @property {number} elapsedMs
 * @property {number | null} etaMs
 * @property {string | null} etaIso
 */

/**
 * From options.maxSteps, distillShardIndex and distillShardCount.
 *
 * Where an option is unset, the distillation settings' shardIndex and shardCount count. Anything but a positive integer
 * counts as unset; without a count there is one shard, whatever the index says.
 *
 * @param {Record<string, unknown>} options
 * @param {Record<string, unknown> | null} [distill]
 * @returns {ProgressContext}
 * @throws {ConfigError} when the index is above the count
 */
export function progressContext(options, distill) {
  const settings = objectOrEmpty(distill);
  const count = positive(options.distillShardCount) ?? positive(settings.shardCount);
  const index = positive(options.distillShardIndex) ?? positive(settings.shardIndex) ?? 1;
  if (count !== null && index > count) {
    throw new ConfigError("TrainingRunner: distillShardIndex must be <= distillShardCount.");
  }
  return {
    shardIndex: count === null ? 1 : index,
    shardCount: count ?? 1,
    stepsPerShard: positive(options.maxSteps),
  };
}

/**
 * The `progress_*` fields of a metrics entry.
 *
 * @param {Snapshot} progress
 * @returns {Record<string, string | number | null>}
 */
export function progressMetrics(progress) {
  return {
    progress_shard_index: progress.shardIndex,
    progress_shard_count: progress.shardCount,
    progress_step_in_shard: progress.stepInShard,
    progress_steps_in_shard: progress.stepsPerShard,
    progress_global_step: progress.globalStep,
    progress_global_steps: progress.globalSteps,
    progress_percent_complete: progress.percentComplete,
    progress_elapsed_ms: progress.elapsedMs,
    progress_eta_ms: progress.etaMs,
    progress_eta_iso: progress.etaIso,
  };
}

/**
 * Progress after `step` (1-based, within the shard).
 *
 * @param {ProgressContext} context
 * @param {number} step
 * @param {object} times in milliseconds
 * @param {number} times.elapsedMs time the run has taken, with earlier processes
 * @param {number} times.executed steps that this process has done...
 * @param {number} times.processMs ...and the time it took for them: the ETA is the remaining steps at that rate
 * @param {number} times.nowMs epoch milliseconds, for `etaIso`
 * @returns {Snapshot}
 */
export function snapshot(context, step, { elapsedMs, executed, processMs, nowMs }) {
  const { shardIndex, shardCount, stepsPerShard } = context;
  const elapsed = Math.max(0, elapsedMs);
  if (stepsPerShard === null) {
    return {
      shardIndex,
      shardCount,
      stepInShard: step,
      stepsPerShard,
      globalStep: null,
      globalSteps: null,
      percentComplete: null,
      elapsedMs: elapsed,
      etaMs: null,
      etaIso: null,
    };
  }
  const done = Math.min(step, stepsPerShard);
  const globalStep = (shardIndex - 1) * stepsPerShard + done;
  const globalSteps = stepsPerShard * shardCount;
  const eta = executed > 0 ? (globalSteps - globalStep) * (Math.max(0, processMs) / executed) : null;
  return {
    shardIndex,
    shardCount,
    stepInShard: done,
    stepsPerShard,
    globalStep,
    globalSteps,
    percentComplete: (globalStep / globalSteps) * 100,
    elapsedMs: elapsed,
    etaMs: eta,
    etaIso: eta === null ? null : isoTime(nowMs + eta),
  };
}

/** Progress of the steps of this process. It begins to count time when it is made. */
export class Progress {
  #clock;
  #now;
  #began;
  #elapsedBefore;

  /**
   * Both clocks give milliseconds.
   *
   * @param {ProgressContext} context
   * @param {() => number} clock may start anywhere: `() => performance.now()`
   * @param {number} [elapsedBeforeMs] what earlier processes of the run took
   * @param {() => number} [now] counts from 1970: `Date.now`; without it `clock` does
   */
  constructor(context, clock, elapsedBeforeMs = 0, now = clock) {
    this.context = context;
    this.executed = 0;
    this.#clock = clock;
    this.#now = now;
    this.#began = clock();
    this.#elapsedBefore = elapsedBeforeMs;
  }

  /** @returns {number} time of the whole run so far: what a checkpoint keeps */
  get elapsedMs() {
    return this.#elapsedBefore + Math.max(0, this.#clock() - this.#began);
  }

  /**
   * Count one executed step, which was step `step` of the shard, and tell the progress after it.
   *
   * @param {number} step
   * @returns {Snapshot}
   */
  finishStep(step) {
    this.executed += 1;
    const processMs = Math.max(0, this.#clock() - this.#began);
    return snapshot(this.context, step, {
      elapsedMs: this.#elapsedBefore + processMs,
      executed: this.executed,
      processMs,
      nowMs: this.#now(),
    });
  }
}

/** @param {unknown} value @returns {number | null} */
function positive(value) {
  return isInteger(value) && value > 0 ? value : null;
}
