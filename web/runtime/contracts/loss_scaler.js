/**
 * @file The dynamic loss scaler: what the scale is at each step, and how overflows move it.
 *
 * Devices keep the scale themselves; this class replays their overflow flags on the host and must agree.
 */

import { CheckpointCorrupt, ConfigError } from "../errors.js";
import { repr, unknownName } from "./names.js";
import { isFiniteNumber, isInteger, isSet } from "./values.js";

/**
 * @typedef {object} LossScalerSettings
 * @property {boolean} enabled
 * @property {number} initialScale
 * @property {number} minScale
 * @property {number} maxScale
 * @property {number} scaleFactor
 * @property {number} backoffFactor
 * @property {number} growthInterval
 * @property {boolean} overflowCheck
 */

/** @type {Readonly<LossScalerSettings>} */
export const DEFAULTS = Object.freeze({
  enabled: false,
  initialScale: 1024,
  minScale: 1,
  maxScale: 65536,
  scaleFactor: 2,
  backoffFactor: 0.5,
  growthInterval: 2000,
  overflowCheck: true,
});

/**
 * Scale and growth counter of a run.
 *
 * A step: take `stepScale()`, scale the loss gradient by it, unscale the gradients, look for non-finite elements, call
 * `update(overflow)`. On overflow neither clipping nor the optimizer runs.
 */
export class DynamicLossScaler {
  /**
   * @param {Record<string, unknown> | null} [config] fields of DEFAULTS; absent and null mean the default
   * @throws {ConfigError} for an unknown field, and for a number that is not finite and above 0
   */
  constructor(config) {
    const given = config ?? {};
    const known = Object.keys(DEFAULTS);
    for (const name of Object.keys(given)) {
      if (!known.includes(name)) throw new ConfigError(unknownName("lossScaling field", name, known));
    }
    /** @type {Record<string, unknown>} */
    const settings = {};
    for (const [name, standard] of Object.entries(DEFAULTS)) {
      settings[name] = given[name] ?? standard;
      if (typeof standard !== "boolean" && !isPositive(settings[name])) {
        throw new ConfigError(`lossScaling.${name} is ${repr(settings[name])}: expected a finite number above 0`);
      }
    }
    const numbers = /** @type {LossScalerSettings} */ (/** @type {unknown} */ (settings));
    this.enabled = isSet(settings.enabled);
    this.overflowCheck = isSet(settings.overflowCheck);
    this.scale = numbers.initialScale;
    this.minScale = numbers.minScale;
    this.maxScale = numbers.maxScale;
    this.scaleFactor = numbers.scaleFactor;
    this.backoffFactor = numbers.backoffFactor;
    this.growthInterval = numbers.growthInterval;
    this.growthCounter = 0;
  }

  /** @returns {number} the scale that the next step's loss gradient carries: 1 when scaling is off */
  stepScale() {
    return this.enabled ? this.scale : 1;
  }

  /**
   * Account for one finished step. Does nothing when scaling is off.
   *
   * @param {boolean} overflow
   */
  update(overflow) {
    if (!this.enabled) return;
    if (overflow) {
      this.scale = Math.max(this.minScale, this.scale * this.backoffFactor);
      this.growthCounter = 0;
      return;
    }
    this.growthCounter += 1;
    if (this.growthCounter >= this.growthInterval) {
      this.scale = Math.min(this.maxScale, this.scale * this.scaleFactor);
      this.growthCounter = 0;
    }
  }

  /**
   * Whether every scale the run can reach is a power of two: then scaling is exact, and a device can do it.
   *
   * @returns {boolean}
   */
  powersOfTwo() {
    return [this.scale, this.minScale, this.maxScale, this.scaleFactor, this.backoffFactor].every(isPowerOfTwo);
  }

  /** @returns {{scale: number, growthCounter: number}} what a checkpoint keeps; the settings are in its configuration */
  state() {
    return { scale: this.scale, growthCounter: this.growthCounter };
  }

  /**
   * Continue from `state()`, ignoring other fields.
   *
   * @param {Record<string, unknown>} state
   * @throws {CheckpointCorrupt} for a missing or impossible value
   */
  restore(state) {
    const { scale, growthCounter: counter } = state;
    if (!isPositive(scale)) {
      throw new CheckpointCorrupt(`loss scaler state: scale is ${repr(scale)}, expected a finite number above 0`);
    }
    if (!isInteger(counter) || counter < 0) {
      throw new CheckpointCorrupt(
        `loss scaler state: growthCounter is ${repr(counter)}, expected an integer of at least 0`,
      );
    }
    this.scale = scale;
    this.growthCounter = counter;
  }
}

/** @param {unknown} value @returns {value is number} */
function isPositive(value) {
  return isFiniteNumber(value) && value > 0;
}

/** @param {number} value above 0 @returns {boolean} */
function isPowerOfTwo(value) {
  let rest = value;
  while (rest > 1) rest /= 2;
  while (rest < 1) rest *= 2;
  return rest === 1; // only numbers above 1 are halved, so each step is exact
}
