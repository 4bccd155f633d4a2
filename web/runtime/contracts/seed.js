/** @file Which seed a run has. */

import { objectOrEmpty, toNumber } from "./values.js";

export const DEFAULT_SEED = 1337;

/**
 * The first number among options.seed, training.seed, training.distill.seed, training.ul.seed, floored; else 1337.
 *
 * Text that spells a number counts; null and blank text do not (a seed that was left empty is not the seed 0). A bigint
 * stays one: it keeps digits beyond 2^53.
 *
 * @param {Record<string, unknown>} options
 * @param {Record<string, unknown>} training
 * @returns {number | bigint}
 */
export function resolveSeed(options, training) {
  const candidates = [
    options.seed,
    training.seed,
    objectOrEmpty(training.distill).seed,
    objectOrEmpty(training.ul).seed,
  ];
  for (const candidate of candidates) {
    if (typeof candidate === "bigint") return candidate;
    const number = toNumber(candidate);
    if (Number.isFinite(number)) return Math.floor(number);
  }
  return DEFAULT_SEED;
}
