/**
 * @file The optimizer's table: everything about a step that depends on its number, computed in float64 on the host.
 *
 * Devices hold a window of rows as float32 and pick one by their own step counter, which does not advance on a skipped
 * step.
 */

import { ConfigError } from "../errors.js";
import { power } from "./arithmetic.js";
import { learningRate } from "./schedules.js";

/** @import { OptimizerSettings } from "./settings.js" */

export const COLUMNS = [
  "bias_correction1",
  "bias_correction2",
  "lr_decay",
  "weight_decay_decay",
  "lr_no_decay",
  "weight_decay_no_decay",
];

/**
 * Rows of the optimizer steps first .. first + count - 1 (first >= 1), each [bc1, bc2, lr 0, wd 0, lr 1, wd 1].
 *
 * bc1 = 1 - beta1^t and bc2 = 1 - beta2^t. Group 0 ("decay") has the settings' weight decay, group 1 ("no_decay") has 0.
 *
 * @param {OptimizerSettings} optimizer from `optimizerSettings`
 * @param {number} first
 * @param {number} count
 * @returns {number[][]}
 */
export function rows(optimizer, first, count) {
  if (!(first >= 1)) throw new ConfigError(`optimizer step ${first} has no table row: steps count from 1`);
  return Array.from({ length: count }, (_, index) => {
    const t = first + index;
    const [rate] = learningRate(optimizer, t);
    const corrections = [1 - power(optimizer.beta1, t), 1 - power(optimizer.beta2, t)];
    return [...corrections, rate, optimizer.weightDecay, rate, 0];
  });
}
