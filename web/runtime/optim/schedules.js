/**
 * @file Learning-rate schedules: the rate of optimizer step t as a pure function, so that any step can be computed
 * alone.
 *
 * t counts optimizer steps from 1; a step skipped after an overflow does not count. W = floor(warmupSteps), n = t - W -
 * 1 is the number of finished steps after the warm-up, and totalSteps counts steps *after* the warm-up. During warm-up
 * (t <= W) every schedule gives max(minLr, lr * t / W), phase "warmup", index t - 1. After it:
 *
 * - constant: lr; phase "constant", index n. Without a warm-up minLr plays no part.
 * - step_decay: max(minLr, lr * gamma^k), k = floor(n / stepSize); phase "decay", index k.
 * - cosine: max(minLr, lr * c(n / totalSteps)), c(p) = (1 + cos(pi p)) / 2: cut off at minLr, not aimed at it.
 * - cosine_to_min: minLr + (lr - minLr) * c(n / totalSteps): the whole half wave, ending in minLr; phase "cosine".
 * - wsd: warm-up, stable, decay: lr for n < S (phase "stable"), then minLr + (lr - minLr) * shape((n - S) / D) (phase
 *   "decay"), D = max(1, floor(decayShare * totalSteps)), S = totalSteps - D; shapes linear 1 - p, cosine c(p), sqrt
 *   1 - sqrt(p).
 *
 * Progress stops at 1: a run longer than totalSteps stays at the last rate. `enabled: false`, or no scheduler at all, is
 * the base rate with phase "constant" and index t - 1.
 */

import { unknownName } from "../contracts/names.js";
import { ConfigError } from "../errors.js";
import { halfCosine, power } from "./arithmetic.js";

export const TYPES = ["constant", "step_decay", "cosine", "cosine_to_min", "wsd"];
export const SHAPES = ["linear", "cosine", "sqrt"];
export const DEFAULT_LR = 2e-4;
export const DEFAULT_DECAY_SHARE = 0.2;

/**
 * @typedef {object} SchedulerDocument the configuration's keys; absent and null mean the default of `learningRate`
 * @property {boolean | null} [enabled]
 * @property {string | null} [type]
 * @property {number | null} [warmupSteps]
 * @property {number | null} [stepSize]
 * @property {number | null} [gamma]
 * @property {number | null} [totalSteps]
 * @property {number | null} [minLr]
 * @property {number | null} [decayShare]
 * @property {string | null} [decayShape]
 */

/**
 * Rate, scheduler index and phase of optimizer step `t` >= 1.
 *
 * Defaults: lr 2e-4, enabled true, type constant, gamma 1, decayShare 0.2, decayShape linear, the others 0.
 *
 * @param {{lr?: number | null, scheduler?: SchedulerDocument | null}} optimizer
 * @param {number} t
 * @returns {[rate: number, index: number, phase: string]}
 * @throws {ConfigError} for an unknown type or shape (with the nearest known one) and for t < 1
 */
export function learningRate(optimizer, t) {
  if (!(t >= 1)) throw new ConfigError(`optimizer step ${t} has no learning rate: steps count from 1`);
  const rate = optimizer.lr ?? DEFAULT_LR;
  const scheduler = optimizer.scheduler ?? { enabled: false };
  if (scheduler.enabled === false) return [rate, t - 1, "constant"];
  const kind = scheduler.type ?? "constant";
  if (!TYPES.includes(kind)) throw new ConfigError(unknownName("scheduler type", String(kind), TYPES));
  const lowest = scheduler.minLr ?? 0;
  const warmup = Math.floor(scheduler.warmupSteps ?? 0);
  if (t <= warmup) return [Math.max(lowest, (rate * t) / warmup), t - 1, "warmup"];
  const n = t - Math.max(warmup, 0) - 1;
  const total = Math.max(1, scheduler.totalSteps ?? 0);
  if (kind === "step_decay") {
    const drops = Math.floor(n / Math.max(1, Math.floor(scheduler.stepSize ?? 1)));
    return [Math.max(lowest, rate * power(scheduler.gamma ?? 1, drops)), drops, "decay"];
  }
  if (kind === "cosine") return [Math.max(lowest, rate * halfCosine(Math.min(1, n / total))), n, "cosine"];
  if (kind === "cosine_to_min") {
    return [lowest + (rate - lowest) * halfCosine(Math.min(1, n / total)), n, "cosine"];
  }
  if (kind === "wsd") {
    const decay = Math.max(1, Math.floor((scheduler.decayShare ?? DEFAULT_DECAY_SHARE) * total));
    const stable = Math.floor(total) - decay;
    const share = shape(scheduler.decayShape ?? "linear", Math.min(1, Math.max(0, n - stable) / decay));
    return n < stable ? [rate, n, "stable"] : [lowest + (rate - lowest) * share, n, "decay"];
  }
  return [rate, n, "constant"];
}

/** @param {string} name @param {number} progress @returns {number} */
function shape(name, progress) {
  if (name === "linear") return 1 - progress;
  if (name === "cosine") return halfCosine(progress);
  if (name === "sqrt") return 1 - Math.sqrt(progress);
  throw new ConfigError(unknownName("scheduler decayShape", String(name), SHAPES));
}
