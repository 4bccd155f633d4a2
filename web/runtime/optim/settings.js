/** @file Settings of the optimizer and its schedule: the configuration's keys, checked and filled with defaults. */

import { repr, unknownName } from "../contracts/names.js";
import { isFiniteNumber } from "../contracts/values.js";
import { ConfigError } from "../errors.js";
import { DEFAULT_DECAY_SHARE, DEFAULT_LR, SHAPES, TYPES } from "./schedules.js";

export const OPTIMIZERS = ["adam", "adamw"];

/**
 * See `schedules`. Steps are optimizer steps; totalSteps counts those after the warm-up.
 *
 * @typedef {object} SchedulerSettings
 * @property {boolean} enabled
 * @property {string} type
 * @property {number} warmupSteps
 * @property {number} stepSize
 * @property {number} gamma
 * @property {number} totalSteps
 * @property {number} minLr
 * @property {number} decayShare
 * @property {string} decayShape
 */

/**
 * Adam or AdamW: two names of one rule with decoupled weight decay, which is 0 unless it is set.
 *
 * @typedef {object} OptimizerSettings
 * @property {string} type
 * @property {number} lr
 * @property {number} beta1
 * @property {number} beta2
 * @property {number} eps
 * @property {number} weightDecay
 * @property {SchedulerSettings} scheduler
 */

/** @type {Readonly<SchedulerSettings>} */
const SCHEDULER_DEFAULTS = Object.freeze({
  enabled: false,
  type: "constant",
  warmupSteps: 0,
  stepSize: 1000,
  gamma: 0.95,
  totalSteps: 10000,
  minLr: 0,
  decayShare: DEFAULT_DECAY_SHARE,
  decayShape: "linear",
});

/** @type {Readonly<OptimizerSettings>} */
export const DEFAULTS = Object.freeze({
  type: "adam",
  lr: DEFAULT_LR,
  beta1: 0.9,
  beta2: 0.999,
  eps: 1e-8,
  weightDecay: 0,
  scheduler: SCHEDULER_DEFAULTS,
});

/**
 * The whole settings from the configuration's keys; absent and null mean the default.
 *
 * @param {Record<string, unknown>} [document]
 * @returns {OptimizerSettings}
 * @throws {ConfigError} for unknown keys (with the nearest known one) and for impossible values
 */
export function optimizerSettings(document = {}) {
  const given = fill(DEFAULTS, document, "optimizer");
  const scheduler = fill(
    SCHEDULER_DEFAULTS,
    /** @type {Record<string, unknown>} */ (document.scheduler ?? {}),
    "optimizer.scheduler",
  );
  const settings = { ...given, scheduler };
  validate(settings);
  return settings;
}

/** @param {OptimizerSettings} settings @throws {ConfigError} naming the first setting that cannot be used */
function validate(settings) {
  const { type, lr, beta1, beta2, eps, weightDecay, scheduler } = settings;
  if (!OPTIMIZERS.includes(type)) throw new ConfigError(unknownName("optimizer type", String(type), OPTIMIZERS));
  if (!TYPES.includes(scheduler.type)) {
    throw new ConfigError(unknownName("scheduler type", String(scheduler.type), TYPES));
  }
  if (!SHAPES.includes(scheduler.decayShape)) {
    throw new ConfigError(unknownName("scheduler decayShape", String(scheduler.decayShape), SHAPES));
  }
  require("lr", lr, "at least 0", lr >= 0);
  require("beta1", beta1, "at least 0 and below 1", 0 <= beta1 && beta1 < 1);
  require("beta2", beta2, "at least 0 and below 1", 0 <= beta2 && beta2 < 1);
  require("eps", eps, "above 0", eps > 0);
  require("weightDecay", weightDecay, "at least 0", weightDecay >= 0);
  const { warmupSteps, stepSize, gamma, totalSteps, minLr, decayShare } = scheduler;
  require("scheduler.warmupSteps", warmupSteps, "at least 0", warmupSteps >= 0);
  require("scheduler.stepSize", stepSize, "at least 1", stepSize >= 1);
  require("scheduler.gamma", gamma, "above 0 and at most 1", 0 < gamma && gamma <= 1);
  require("scheduler.totalSteps", totalSteps, "at least 1", totalSteps >= 1);
  require("scheduler.minLr", minLr, "at least 0", minLr >= 0);
  require("scheduler.decayShare", decayShare, "0 to 1", 0 <= decayShare && decayShare <= 1);
  if (scheduler.enabled && ["cosine_to_min", "wsd"].includes(scheduler.type) && minLr > lr) {
    throw new ConfigError(`optimizer.scheduler.minLr is ${repr(minLr)}, above lr ${repr(lr)}: the rate would rise`);
  }
}

/** @param {string} name @param {unknown} value @param {string} expected @param {boolean} holds */
function require(name, value, expected, holds) {
  if (!holds || !isFiniteNumber(value)) {
    throw new ConfigError(`optimizer.${name} is ${repr(value)}: expected a number ${expected}`);
  }
}

/**
 * @template {object} T
 * @param {T} defaults
 * @param {Record<string, unknown>} document
 * @param {string} path
 * @returns {T}
 */
function fill(defaults, document, path) {
  const known = Object.keys(defaults);
  for (const key of Object.keys(document)) {
    if (!known.includes(key)) throw new ConfigError(unknownName(`${path} field`, key, known));
  }
  const entries = Object.entries(defaults).map(([key, standard]) => [key, document[key] ?? standard]);
  return /** @type {T} */ (Object.fromEntries(entries));
}
