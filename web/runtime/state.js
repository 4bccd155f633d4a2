/**
 * @file Everything that continues a run, on the host, and whether it fits a plan.
 *
 * Messages are those of Python's `backends/state_check.py`. May import: errors, contracts.
 */

import { repr } from "./contracts/names.js";
import { CheckpointCorrupt } from "./errors.js";

export const SLOTS = Object.freeze(["moment1", "moment2"]);

/**
 * @typedef {object} StateTensor
 * @property {readonly number[]} shape
 * @property {Float32Array<ArrayBuffer>} data row-major
 */

/**
 * model: float32 master weights by parameter name. optimizer: `<slot>/<name>` (slots `moment1`, `moment2`). scaler: the
 * fields of the loss scaler (`scale`, `growthCounter`, ...).
 *
 * @typedef {object} SessionState
 * @property {Record<string, StateTensor>} model
 * @property {Record<string, StateTensor>} optimizer
 * @property {number} optimizerStep
 * @property {Record<string, unknown>} scaler
 */

/**
 * CheckpointCorrupt, naming the tensor, unless weights and moments are exactly the float32 tensors that `shapes` says.
 * Scaler fields are judged by the scaler when it restores them.
 *
 * @param {SessionState} state
 * @param {Record<string, readonly number[]>} shapes by parameter name
 */
export function checkState(state, shapes) {
  checkTensors("weight", state.model, shapes);
  const moments = SLOTS.flatMap((slot) => Object.entries(shapes).map(([name, shape]) => [`${slot}/${name}`, shape]));
  checkTensors("moment", state.optimizer, Object.fromEntries(moments));
  checkOptimizerStep(state.optimizerStep);
}

/** @param {unknown} step */
export function checkOptimizerStep(step) {
  if (!Number.isSafeInteger(step) || /** @type {number} */ (step) < 0) {
    throw new CheckpointCorrupt(`optimizer step is ${repr(step)}: expected a whole number of at least 0`);
  }
}

/**
 * @param {string} kind
 * @param {Record<string, StateTensor>} tensors
 * @param {Record<string, readonly number[]>} shapes
 */
function checkTensors(kind, tensors, shapes) {
  checkNames(kind, tensors, shapes);
  for (const [name, wanted] of Object.entries(shapes)) {
    const { shape, data } = tensors[name];
    const float32 = data instanceof Float32Array;
    checkShape(kind, name, shape, wanted, float32 ? "float32" : (Object(data).constructor?.name ?? typeof data));
    checkShape(kind, name, [data.length], [wanted.reduce((product, extent) => product * extent, 1)]);
    checkFinite(kind, name, data);
  }
}

/**
 * CheckpointCorrupt unless these are all tensors that there should be, and no others.
 *
 * @param {string} kind
 * @param {Record<string, unknown>} tensors
 * @param {Record<string, unknown>} expected
 */
export function checkNames(kind, tensors, expected) {
  const names = Object.keys(expected);
  const missing = names.filter((name) => !Object.hasOwn(tensors, name));
  if (missing.length) {
    throw new CheckpointCorrupt(
      `${kind} tensor ${repr(missing[0])} is missing (${missing.length} of ${names.length} are)`,
    );
  }
  const extra = Object.keys(tensors).filter((name) => !Object.hasOwn(expected, name));
  if (extra.length) {
    throw new CheckpointCorrupt(
      `${kind} tensor ${repr(extra[0])} belongs to no parameter of this model (${extra.length} do not)`,
    );
  }
}

/**
 * CheckpointCorrupt for another shape or type.
 *
 * @param {string} kind
 * @param {string} name
 * @param {readonly number[]} shape
 * @param {readonly number[]} wanted
 * @param {string} [dtype]
 */
export function checkShape(kind, name, shape, wanted, dtype = "float32") {
  if (dtype === "float32" && shape.length === wanted.length && shape.every((extent, axis) => extent === wanted[axis])) {
    return;
  }
  throw new CheckpointCorrupt(
    `${kind} tensor ${repr(name)} is ${dtype} ${repr([...shape])}: expected float32 ${repr([...wanted])}`,
  );
}

/**
 * CheckpointCorrupt if a value is NaN or infinite.
 *
 * @param {string} kind
 * @param {string} name
 * @param {Float32Array} values
 */
export function checkFinite(kind, name, values) {
  let bad = 0;
  for (const value of values) if (!Number.isFinite(value)) bad++;
  if (bad) throw new CheckpointCorrupt(`${kind} tensor ${repr(name)} holds ${bad} non-finite value(s)`);
}
