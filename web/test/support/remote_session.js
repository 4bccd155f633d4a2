/**
 * @file Plan sessions on a page for a caller elsewhere: one call a step, tensors as base64.
 *
 * `tests/parity/browser_runtime.py` drives them through Playwright, so that the parity contract is checked on the very
 * session that trains in a tab.
 */

import { Batch } from "../../runtime/batch.js";
import { openDevice } from "../../runtime/device.js";
import { loadPlan } from "../../runtime/plan.js";
import { PlanSession } from "../../runtime/session.js";
import { deviceProfile } from "../../runtime/subgroups.js";

/** @import {Device} from "../../runtime/device.js" */
/** @import {StepInfo} from "../../runtime/session.js" */
/** @import {SessionState, StateTensor} from "../../runtime/state.js" */

/**
 * Tensors in order: their shapes, and their values one after the other.
 *
 * @typedef {{shapes: Record<string, number[]>, data: string}} PackedTensors
 */

/** @type {Promise<Device> | null} */
let device = null;
/** @type {Map<number, PlanSession>} */
const sessions = new Map();
let opened = 0;

/** The device that all sessions of the page share. */
function shared() {
  device ??= openDevice();
  return device;
}

/** What a plan has to be compiled for. */
export async function profile() {
  return deviceProfile(await shared());
}

/**
 * @param {string} folder URL of a plan
 * @param {number} seed
 * @returns {Promise<number>} names the session in the other calls
 */
export async function open(folder, seed) {
  const plan = await loadPlan(async (file) => new Uint8Array(await (await fetch(`${folder}/${file}`)).arrayBuffer()));
  const session = await PlanSession.create(plan, { device: await shared(), seed });
  sessions.set(++opened, session);
  return opened;
}

/** @param {number} id */
function find(id) {
  const session = sessions.get(id);
  if (!session) throw new Error(`there is no session ${id}`);
  return session;
}

/**
 * A whole step.
 *
 * @param {number} id
 * @param {StepInfo} info
 * @param {Record<string, string>[]} batches
 */
export async function step(id, info, batches) {
  const session = find(id);
  await session.begin(info);
  for (const batch of batches) await session.accumulate(batchOf(session, batch));
  await session.apply();
}

/**
 * Steps `first` .. `last` on one batch, and what became of them: only the last loss, so that nothing piles up here.
 *
 * @param {number} id
 * @param {number} first
 * @param {number} last
 * @param {Record<string, string>} arrays
 */
export async function run(id, first, last, arrays) {
  const session = find(id);
  const batch = batchOf(session, arrays);
  let loss = null;
  for (let dataStep = first; dataStep <= last; dataStep++) {
    await session.begin({ dataStep, targetTokens: batch.targetTokens, microbatches: 1 });
    await session.accumulate(batch);
    await session.apply();
    for (const result of await session.pollMetrics({ wait: dataStep === last })) loss = result.loss;
  }
  return { loss, memory: session.memory(), counters: session.counters() };
}

/**
 * @param {number} id
 * @param {boolean} wait
 */
export function poll(id, wait) {
  return find(id).pollMetrics({ wait });
}

/**
 * @param {number} id
 * @param {Record<string, string>} batch
 */
export function evaluate(id, batch) {
  return find(id).evaluate(batchOf(find(id), batch));
}

/** @param {number} id */
export async function exportState(id) {
  const { model, optimizer, optimizerStep, scaler } = await find(id).exportState();
  return { model: pack(model), optimizer: pack(optimizer), optimizerStep, scaler };
}

/**
 * @param {number} id
 * @param {{model: PackedTensors, optimizer: PackedTensors, optimizerStep: number, scaler: SessionState["scaler"]}} state
 */
export async function importState(id, { model, optimizer, optimizerStep, scaler }) {
  await find(id).importState({ model: unpack(model), optimizer: unpack(optimizer), optimizerStep, scaler });
}

/** @param {number} id */
export function describe(id) {
  return find(id).describe();
}

/** @param {number} id */
export function close(id) {
  find(id).close();
  sessions.delete(id);
}

/**
 * @param {PlanSession} session
 * @param {Record<string, string>} arrays base64 of little-endian words
 */
function batchOf(session, arrays) {
  const words = (/** @type {string} */ name) => new Uint32Array(fromBase64(arrays[name]).buffer);
  return new Batch([session.plan.shape.B, session.plan.shape.T], {
    ids: words("ids"),
    targets: words("targets"),
    positions: words("positions"),
    segmentIds: words("segmentIds"),
    sampleIds: words("sampleIds"),
  });
}

/**
 * @param {Record<string, StateTensor>} tensors
 * @returns {PackedTensors}
 */
function pack(tensors) {
  const list = Object.entries(tensors);
  const bytes = new Uint8Array(list.reduce((total, [, { data }]) => total + data.byteLength, 0));
  let at = 0;
  for (const [, { data }] of list) {
    bytes.set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength), at);
    at += data.byteLength;
  }
  return { shapes: Object.fromEntries(list.map(([name, { shape }]) => [name, [...shape]])), data: toBase64(bytes) };
}

/** @param {PackedTensors} packed */
function unpack({ shapes, data }) {
  const floats = new Float32Array(fromBase64(data).buffer);
  /** @type {Record<string, StateTensor>} */
  const tensors = {};
  let at = 0;
  for (const [name, shape] of Object.entries(shapes)) {
    const count = shape.reduce((product, size) => product * size, 1);
    tensors[name] = { shape, data: floats.slice(at, at + count) };
    at += count;
  }
  return tensors;
}

/** @param {Uint8Array} bytes */
function toBase64(bytes) {
  let text = "";
  for (let i = 0; i < bytes.length; i += 0x8000) text += String.fromCharCode(...bytes.subarray(i, i + 0x8000));
  return btoa(text);
}

/** @param {string} text */
function fromBase64(text) {
  return Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
}
