/**
 * @file `stateHash`: one number for everything that continues a run, however it is laid out in files.
 *
 * It covers the tensors of model and optimizer (name, stored dtype, shape, sha256 of the raw little-endian bytes), the
 * optimizer's step count, progress, loss scaler and data cursor; not when, where or by what the checkpoint was made. May
 * import: errors, contracts.
 */

import { repr } from "../contracts/names.js";
import { stableHash } from "../contracts/stable_json.js";
import { plain } from "./document.js";

/** @import { Document } from "./document.js" */
/** @import { Progress } from "./manifest.js" */

/** @typedef {{dtype: string, shape: readonly number[], sha256: string}} TensorDigest */

/**
 * What the hash covers: `model` and `optimizer` by tensor name, the rest as the manifest has it.
 *
 * @typedef {object} HashedState
 * @property {Record<string, TensorDigest>} model
 * @property {Record<string, TensorDigest>} optimizer
 * @property {number} optimizerStep
 * @property {Progress} progress
 * @property {Document} lossScaler
 * @property {Document} dataCursor
 */

/**
 * @param {HashedState} state
 * @returns {string} 64 hex digits
 */
export function stateHash({ model, optimizer, optimizerStep, progress, lossScaler, dataCursor }) {
  return stableHash(plain({ model, optimizer, optimizerStep, progress, lossScaler, dataCursor }, "state"));
}

/**
 * @param {string} source the checkpoint in messages
 * @param {Iterable<{name: string, shape: readonly number[]}>} tensors of a model file
 * @param {Record<string, readonly number[]>} expected the model's shapes by name
 * @returns {string | null} what is wrong with them
 */
export function modelProblem(source, tensors, expected) {
  const found = new Map([...tensors].map(({ name, shape }) => [name, shape]));
  for (const [name, shape] of Object.entries(expected)) {
    if (!found.has(name)) return `${source} lacks the tensor ${repr(name)} of shape ${tuple(shape)}`;
  }
  for (const [name, shape] of found) {
    if (!Object.hasOwn(expected, name)) return `${source} has the tensor ${repr(name)}, which the model does not have`;
    if (tuple(shape) !== tuple(expected[name])) {
      return `${source}: tensor ${repr(name)} has shape ${tuple(shape)}, but the model needs ${tuple(expected[name])}`;
    }
  }
  return null;
}

/**
 * @param {string} source the checkpoint in messages
 * @param {Iterable<{name: string, shape: readonly number[]}>} tensors of an optimizer file
 * @param {Record<string, readonly number[]>} expected the model's shapes by name
 * @returns {string | null} what is wrong with them
 */
export function optimizerProblem(source, tensors, expected) {
  for (const { name, shape } of tensors) {
    const at = name.indexOf("/");
    const parameter = name.slice(at + 1);
    if (at < 1 || !Object.hasOwn(expected, parameter)) {
      return `${source} has the optimizer tensor ${repr(name)}: expected <slot>/<parameter of the model>`;
    }
    if (tuple(shape) !== tuple(expected[parameter])) {
      const needs = tuple(expected[parameter]);
      return `${source}: optimizer tensor ${repr(name)} has shape ${tuple(shape)}, but the model needs ${needs}`;
    }
  }
  return null;
}

/** @param {readonly number[]} shape as Python writes it */
function tuple(shape) {
  return shape.length === 1 ? `(${shape[0]},)` : `(${shape.join(", ")})`;
}
