/**
 * @file Which variant of each product class runs fastest here: timed once per adapter, then remembered.
 *
 * All variants of a class compute the same sums in the same order, so the choice changes speed and nothing else. May
 * import: contracts, device, executor, plan, sha256, storage.
 */

import { isObject } from "./contracts/values.js";
import { choiceOf } from "./plan.js";
import { sha256 } from "./sha256.js";

/** @import {Device} from "./device.js" */
/** @import {Encoded} from "./command_stream.js" */
/** @import {Executor, Progress} from "./executor.js" */
/** @import {Dispatch} from "./plan.js" */
/** @import {Storage} from "./storage.js" */

const ROUNDS = 3; // fewer than where nobody waits for a page
const FORMAT = 3;
// A wait for the device takes a millisecond by itself, and browsers blur clocks: time at least this much work at once.
const LEAST_SECONDS = 0.01;
const MOST_REPEATS = 32;
const LEAST_CLOCK = 1e-6; // where a blurred clock has not moved
const HOPELESS = 3; // times the best of the first round
const MARGIN = 0.95; // a winner stays for good, so another variant than the first must take at most this part of its time

/**
 * Product class -> name of the fastest variant. Classes that `known` has no usable answer for are timed, on the plan's
 * own (still empty) arenas. Kernels that `programs` use in any case are compiled beside the candidates, which keeps all
 * of the browser's compiler threads busy.
 *
 * @param {Executor} executor
 * @param {Record<string, string>} known
 * @param {object} [options]
 * @param {readonly string[]} [options.programs]
 * @param {Progress} [options.progress]
 * @param {() => number} [options.clock] seconds
 * @returns {Promise<Record<string, string>>}
 */
export async function chooseVariants(executor, known, { programs = [], progress, clock = seconds } = {}) {
  /** @type {Record<string, string>} */
  const chosen = {};
  /** @type {[string, Dispatch][]} */
  const missing = [];
  for (const [name, dispatch] of representatives(executor)) {
    if (dispatch.choices.some(({ variant }) => variant === known[name])) chosen[name] = known[name];
    else missing.push([name, dispatch]);
  }
  const untimed = new Set(missing.map(([name]) => name));
  const certain = programs
    .flatMap((name) => executor.plan.dispatches(name))
    .filter(({ productClass }) => !untimed.has(productClass))
    .map((dispatch) => choiceOf(dispatch, chosen).kernel);
  const candidates = missing.flatMap(([, dispatch]) => dispatch.choices.map(({ kernel }) => kernel));
  await executor.compile([...candidates, ...certain], progress);
  for (const [done, [name, dispatch]] of missing.entries()) {
    progress?.("timing kernel variants", done, missing.length);
    chosen[name] = dispatch.choices[winner(await timeRounds(executor, dispatch, clock))].variant;
  }
  return chosen;
}

/**
 * For each product class with alternatives, the dispatch that touches most bytes.
 *
 * @param {Executor} executor
 * @returns {Map<string, Dispatch>}
 */
export function representatives(executor) {
  /** @type {Map<string, Dispatch>} */
  const found = new Map();
  for (const program of Object.keys(executor.plan.programs)) {
    for (const dispatch of executor.plan.dispatches(program)) {
      const { productClass } = dispatch;
      if (!productClass || dispatch.choices.length < 2) continue;
      const largest = found.get(productClass);
      if (!largest || bytes(dispatch) > bytes(largest)) found.set(productClass, dispatch);
    }
  }
  return found;
}

/**
 * The index of the fastest choice by the median over the rounds of its time beside the first one's in that round.
 *
 * The variants of a round ran right after one another: what slows a whole round down does not count, and what falls on
 * single measurements is not the median. The first choice is the best guess and wins what is too close to call.
 *
 * @param {readonly (readonly number[])[]} rounds seconds of each choice
 */
export function winner(rounds) {
  const ratios = rounds[0].map((_, index) => median(rounds.map((times) => times[index] / times[0])));
  const best = ratios.indexOf(Math.min(...ratios));
  return ratios[best] < MARGIN ? best : 0;
}

/**
 * Seconds of one dispatch of each choice, in each of a few rounds. The first dispatch of each is not timed, for drivers
 * compile there. One that is far behind the others is measured once only.
 *
 * @param {Executor} executor
 * @param {Dispatch} dispatch
 * @param {() => number} clock
 * @returns {Promise<number[][]>}
 */
export async function timeRounds(executor, dispatch, clock) {
  const encoded = await executor.device.scoped(() =>
    dispatch.choices.map((choice) => executor.encoded(dispatch, choice)),
  );
  /** @param {Encoded} item @param {number} repeats */
  const time = async (item, repeats) => {
    const begin = clock();
    const stream = executor.stream();
    stream.program(Array(repeats).fill(item));
    stream.finish();
    await executor.fence();
    return Math.max(clock() - begin, LEAST_CLOCK) / repeats;
  };
  for (const item of encoded) await time(item, 1);
  /** @type {number[]} */
  const once = [];
  for (const item of encoded) once.push(await time(item, 1));
  const quickest = Math.min(...once);
  const repeats = Math.min(MOST_REPEATS, Math.max(1, Math.ceil(LEAST_SECONDS / quickest)));
  const rounds = [];
  for (let round = 0; round < ROUNDS; round++) {
    const times = [];
    for (const [index, item] of encoded.entries()) {
      const hopeless = once[index] > HOPELESS * quickest && repeats === 1;
      times.push(hopeless ? once[index] : await time(item, repeats));
    }
    rounds.push(times);
  }
  return rounds;
}

/** @param {number[]} values */
function median(values) {
  const sorted = values.toSorted((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/** The remembered winners of one adapter and precision. */
export class VariantCache {
  #storage;
  #name;

  /**
   * @param {Storage} storage
   * @param {Device} device
   * @param {string} precision
   */
  constructor(storage, device, precision) {
    const { vendor, architecture, device: model, description } = device.info;
    const identity = [vendor, architecture, model, description, precision].join("\n");
    this.#storage = storage;
    this.#name = `variants-${sha256(new TextEncoder().encode(identity)).slice(0, 16)}.json`;
  }

  /**
   * Winners by product class; a text that cannot be understood is only a reason to time again.
   *
   * @returns {Promise<Record<string, string>>}
   */
  async read() {
    try {
      /** @type {unknown} */
      const document = JSON.parse((await this.#storage.read(this.#name)) ?? "null");
      if (!isObject(document) || document.format !== FORMAT || !isObject(document.variants)) return {};
      return Object.fromEntries(Object.entries(document.variants).map(([name, variant]) => [name, String(variant)]));
    } catch {
      return {};
    }
  }

  /**
   * Remember these too.
   *
   * @param {Record<string, string>} variants
   */
  async add(variants) {
    const merged = { ...(await this.read()), ...variants };
    await this.#storage.write(this.#name, JSON.stringify({ format: FORMAT, variants: merged }, null, 1));
  }
}

/** @param {Dispatch} dispatch */
function bytes(dispatch) {
  return dispatch.bindings.reduce((sum, bound) => sum + bound.size, 0);
}

/** @returns {number} */
function seconds() {
  return performance.now() / 1000;
}
