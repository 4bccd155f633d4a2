/**
 * @file Weights, moments and counters between the host and the device.
 *
 * May import: executor, optim, random, state, step_result.
 */

import { rows } from "./optim/table.js";
import { dropoutKey } from "./random/dropout.js";
import { normal } from "./random/initial.js";
import { GROWTH_COUNTER, LOSS_SCALE, OPTIMIZER_STEP, SCALER_ENABLED } from "./step_result.js";

/** @import {DynamicLossScaler} from "./contracts/loss_scaler.js" */
/** @import {Executor, HostArray} from "./executor.js" */
/** @import {OptimizerSettings} from "./optim/settings.js" */
/** @import {Plan} from "./plan.js" */
/** @import {StateTensor} from "./state.js" */

const STATE_WORDS = 64;
const SCHEDULE_HEADER = 8;
const INITIAL_CHUNK = 1 << 20; // elements of a new tensor made at a time

/**
 * Uploads a tensor's values, all of them or from element number `first` on.
 *
 * @typedef {(name: string, values: HostArray, first?: number) => void} WriteTensor
 */

/**
 * The part of a state that is not tensors.
 *
 * @typedef {object} StateProgress
 * @property {number} optimizerStep
 * @property {Record<string, unknown>} scaler
 */

/**
 * The weights of a seed, piece by piece: the same bits in every runtime.
 *
 * @param {Plan} plan
 * @param {number | bigint} seed
 * @param {WriteTensor} write
 */
export function writeInitial(plan, seed, write) {
  for (const [name, { init, std }] of Object.entries(plan.settings.initial)) {
    const { elements } = plan.tensor(name);
    for (let first = 0; first < elements; first += INITIAL_CHUNK) {
      const count = Math.min(INITIAL_CHUNK, elements - first);
      if (init === "normal") write(name, normal(seed, name, count, std, first), first);
      else write(name, new Float32Array(count).fill(init === "ones" ? 1 : 0), first);
    }
  }
}

/**
 * Host copies of the parameters, or of what lies beside them in a mirrored arena: one readback for each page, whose
 * bytes the tensors share.
 *
 * @param {Executor} executor
 * @param {string} arena
 * @param {string} prefix of the names there
 * @returns {Promise<Record<string, StateTensor>>}
 */
export async function readArena(executor, arena, prefix) {
  const { plan } = executor;
  /** @type {ArrayBuffer[]} */
  const pages = [];
  for (const [page, size] of plan.arenas[arena].entries()) {
    pages.push((await executor.readBytes(arena, page, 0, size)).buffer);
  }
  const tensors = plan.parameterNames().map((parameter) => {
    const { page, offset, elements, shape } = plan.tensor(prefix + parameter);
    return /** @type {const} */ ([
      prefix + parameter,
      { shape, data: new Float32Array(pages[page], offset, elements) },
    ]);
  });
  return Object.fromEntries(tensors);
}

/**
 * Counter and scaler as the device has them; the host's scaler knows what is not on the device.
 *
 * @param {Executor} executor
 * @param {DynamicLossScaler} scaler
 * @returns {Promise<StateProgress>}
 */
export async function readProgress(executor, scaler) {
  const words = new Uint32Array((await executor.readTensor("step_state")).buffer);
  /** @type {Record<string, unknown>} */
  const state = { ...scaler.state() };
  if (scaler.enabled) {
    state.scale = new Float32Array(words.buffer)[LOSS_SCALE];
    state.growthCounter = words[GROWTH_COUNTER];
  }
  return { optimizerStep: words[OPTIMIZER_STEP], scaler: state };
}

/**
 * @param {Executor} executor
 * @param {number} optimizerStep
 * @param {DynamicLossScaler} scaler
 */
export function writeProgress(executor, optimizerStep, scaler) {
  const words = new Uint32Array(STATE_WORDS);
  words[OPTIMIZER_STEP] = optimizerStep;
  new Float32Array(words.buffer)[LOSS_SCALE] = scaler.scale;
  words[GROWTH_COUNTER] = scaler.growthCounter;
  words[SCALER_ENABLED] = Number(scaler.enabled);
  executor.writeTensor("step_state", words);
}

/**
 * Replace the loss scale and nothing else.
 *
 * @param {Executor} executor
 * @param {number} scale
 */
export async function writeLossScale(executor, scale) {
  const words = new Uint32Array((await executor.readTensor("step_state")).buffer);
  new Float32Array(words.buffer)[LOSS_SCALE] = scale;
  executor.writeTensor("step_state", words);
}

/**
 * One Philox key for each dropout site.
 *
 * @param {Executor} executor
 * @param {number | bigint} seed
 */
export function writeDropoutKeys(executor, seed) {
  const sites = executor.plan.settings.dropoutSites;
  if (!sites.length) return;
  executor.writeTensor("dropout_keys", Uint32Array.from(sites.flatMap((site) => [...dropoutKey(seed, site)])));
}

/**
 * Rows of the schedule from optimizer step `first` on.
 *
 * @param {Executor} executor
 * @param {OptimizerSettings} optimizer
 * @param {number} first
 */
export function writeSchedule(executor, optimizer, first) {
  const table = new Float32Array(executor.plan.tensor("schedule").elements);
  new Uint32Array(table.buffer)[0] = first;
  table.set(rows(optimizer, first, executor.plan.settings.scheduleRows).flat(), SCHEDULE_HEADER);
  executor.writeTensor("schedule", table);
}
