/**
 * @file Rolling averages and alerts of a run.
 *
 * Modes: `step` puts the rolling averages into every entry; `window` only into the entry that completes a window (every
 * windowSize-th); `epoch` into every entry, over windows that begin anew with each epoch.
 */

import { AlertRaised, CheckpointCorrupt } from "../errors.js";
import { repr } from "./names.js";
import { isFiniteNumber, isInteger, objectOrEmpty, toNumber } from "./values.js";

export const MODES = /** @type {const} */ (["step", "window", "epoch"]);

/**
 * [threshold, entry field, alert, on which side of the threshold it is raised], in the order alerts are reported.
 */
export const RULES = /** @type {const} */ ([
  ["maxStepTimeMs", "step_time_ms", "max_step_time_ms_exceeded", "above"],
  ["maxGradientNorm", "gradient_norm_unclipped", "max_gradient_norm_exceeded", "above"],
  ["maxNaNCount", "nan_count", "max_nan_count_exceeded", "above"],
  ["maxInfCount", "inf_count", "max_inf_count_exceeded", "above"],
  ["maxSaturationCount", "saturation_count", "max_saturation_count_exceeded", "above"],
  ["minEffectiveLr", "effective_lr", "min_effective_lr_below_threshold", "below"],
]);

/**
 * What is counted and judged. A threshold of null never raises an alert.
 *
 * @typedef {object} TelemetrySettings
 * @property {"step" | "window" | "epoch"} mode
 * @property {number} windowSize
 * @property {boolean} emitNaNInfCounters
 * @property {boolean} alertsEnabled
 * @property {boolean} failOnAlert
 * @property {Record<string, number | null>} thresholds
 */

/**
 * From the configuration's keys. Text that spells a number counts; what is unusable becomes the default. (A
 * configuration file never gets that far with an unusable value: the typed configuration refuses it by name.)
 *
 * @param {Record<string, unknown>} [telemetry]
 * @returns {TelemetrySettings}
 */
export function resolveTelemetry(telemetry = {}) {
  const judged = objectOrEmpty(telemetry.alerts);
  const limits = objectOrEmpty(judged.thresholds);
  const size = toNumber(telemetry.windowSize);
  /** @type {Record<string, number | null>} */
  const thresholds = {};
  for (const [threshold] of RULES) {
    const limit = toNumber(limits[threshold]);
    thresholds[threshold] = Number.isFinite(limit) ? limit : null;
  }
  return {
    mode: MODES.find((mode) => mode === telemetry.mode) ?? "step",
    windowSize: Number.isFinite(size) ? Math.max(1, Math.floor(size)) : 1,
    emitNaNInfCounters: telemetry.emitNaNInfCounters !== false,
    alertsEnabled: judged.enabled === true,
    failOnAlert: judged.failOnAlert === true,
    thresholds,
  };
}

/**
 * Names of the alerts that an entry raises: strictly beyond the threshold. Missing values raise none.
 *
 * @param {TelemetrySettings} settings
 * @param {Record<string, unknown>} entry
 * @returns {string[]}
 */
export function alerts(settings, entry) {
  /** @type {string[]} */
  const raised = [];
  if (!settings.alertsEnabled) return raised;
  for (const [threshold, name, alert, side] of RULES) {
    const limit = settings.thresholds[threshold];
    const value = entry[name];
    if (limit === null || !isFiniteNumber(value)) continue;
    if (side === "above" ? value > limit : value < limit) raised.push(alert);
  }
  return raised;
}

/** The mean of the last `size` values. */
export class RollingWindow {
  /** @param {number} size */
  constructor(size) {
    this.size = size;
    /** @type {number[]} */
    this.values = [];
  }

  /**
   * Add a value; the mean with it.
   *
   * @param {number} value
   * @returns {number}
   */
  push(value) {
    this.values.push(value);
    if (this.values.length > this.size) this.values.shift();
    return /** @type {number} */ (this.mean());
  }

  /**
   * null while empty. Added one by one from the oldest on: means are compared exactly between runtimes.
   *
   * @returns {number | null}
   */
  mean() {
    if (!this.values.length) return null;
    let total = 0;
    for (const value of this.values) total += value;
    return total / this.values.length;
  }

  clear() {
    this.values = [];
  }

  /** @returns {number[]} */
  state() {
    return [...this.values];
  }

  /** @param {readonly number[]} values */
  restore(values) {
    this.values = values.slice(-this.size);
  }
}

/** The rolling windows of a run, and the judgement of its entries. */
export class Telemetry {
  /** @param {TelemetrySettings} settings */
  constructor(settings) {
    this.settings = settings;
    this.loss = new RollingWindow(settings.windowSize);
    this.time = new RollingWindow(settings.windowSize);
    this.observed = 0;
    this.epoch = 0;
  }

  /**
   * Take in one step; the averages of loss and step time that its entry carries (see the modes).
   *
   * @param {number | null} loss null when it overflowed: such a value would drown all others, so it stays out
   * @param {number} stepTimeMs
   * @param {number} epoch
   * @returns {[loss: number | null, stepTimeMs: number | null]}
   */
  observe(loss, stepTimeMs, epoch) {
    if (this.settings.mode === "epoch" && epoch !== this.epoch) {
      this.loss.clear();
      this.time.clear();
    }
    this.epoch = epoch;
    this.observed += 1;
    if (loss !== null) this.loss.push(loss);
    this.time.push(stepTimeMs);
    if (this.settings.mode === "window" && this.observed % this.settings.windowSize) return [null, null];
    return [this.loss.mean(), this.time.mean()];
  }

  /**
   * Call it after the entry is written.
   *
   * @param {Record<string, unknown>} entry
   * @throws {AlertRaised} when `failOnAlert` is set and the entry carries alerts
   */
  check(entry) {
    const raised = /** @type {string[]} */ (entry.telemetry_alerts ?? []);
    if (raised.length && this.settings.failOnAlert) {
      throw new AlertRaised([...raised], /** @type {number} */ (entry.step));
    }
  }

  /** @returns {{loss: number[], stepTimeMs: number[], observed: number, epoch: number}} what a checkpoint keeps */
  state() {
    return {
      loss: this.loss.state(),
      stepTimeMs: this.time.state(),
      observed: this.observed,
      epoch: this.epoch,
    };
  }

  /**
   * Continue from `state()`.
   *
   * @param {Record<string, unknown>} state
   * @throws {CheckpointCorrupt} when a field is missing or of another kind
   */
  restore(state) {
    for (const name of ["loss", "stepTimeMs"]) {
      const values = state[name];
      if (!Array.isArray(values) || !values.every(isFiniteNumber)) {
        throw new CheckpointCorrupt(`telemetry state: ${name} is ${repr(values)}, expected a list of numbers`);
      }
    }
    for (const name of ["observed", "epoch"]) {
      if (!isInteger(state[name])) {
        throw new CheckpointCorrupt(`telemetry state: ${name} is ${repr(state[name])}, expected an integer`);
      }
    }
    this.loss.restore(/** @type {number[]} */ (state.loss));
    this.time.restore(/** @type {number[]} */ (state.stepTimeMs));
    this.observed = /** @type {number} */ (state.observed);
    this.epoch = /** @type {number} */ (state.epoch);
  }
}
