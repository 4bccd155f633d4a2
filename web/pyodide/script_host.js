/**
 * @file What a script can reach: this device, sessions on it, and the page's eyes. The other side of the border is
 * `bridge/pyodide/hybrid_tab/session.py`. One object for each script; `close` frees what it left open.
 */

import { Batch } from "../runtime/batch.js";
import { StopRequested } from "../runtime/errors.js";
import { loadPlan } from "../runtime/plan.js";
import { PlanSession } from "../runtime/session.js";
import { deviceProfile } from "../runtime/subgroups.js";

/** @import { Device } from "../runtime/device.js" */
/** @import { Progress } from "../runtime/executor.js" */
/** @import { Storage } from "../runtime/storage.js" */

/** A buffer of Python's, for the time of a call. @typedef {{getBuffer: (type?: string) => {data: any, release: () => void}}} PyBuffer */
/** A list of Python's, for the time of a call. @typedef {{toJs: () => any[]}} PyList */
/** Numbers and texts under their names, for the page. @typedef {Record<string, number | string | null>} Report */

/**
 * openDevice: asked once, when the script first needs it. variants: see SessionOptions.
 *
 * @typedef {object} HostOptions
 * @property {() => Promise<Device>} openDevice
 * @property {(values: Report) => void} [report]
 * @property {Progress} [progress]
 * @property {Record<string, string>} [variants]
 * @property {Storage} [storage]
 */

/** A copy of what Python holds, since its memory may move. @param {PyBuffer} buffer @param {"u8" | "u32"} type */
function copyOf(buffer, type) {
  const view = buffer.getBuffer(type);
  try {
    return view.data.slice();
  } finally {
    view.release();
  }
}

export class ScriptHost {
  /** @type {Promise<Device> | null} */
  #device = null;
  /** @type {Map<string, Uint8Array<ArrayBuffer>>} the plan that is opened next */
  #files = new Map();
  /** @type {SessionHandle[]} */
  #sessions = [];
  #options;

  /** @type {string | null} why the script is to stop */
  stopping = null;

  /** @param {HostOptions} options */
  constructor(options) {
    this.#options = options;
  }

  /** Once somebody wants the script stopped, everything it asks for says so. */
  check() {
    if (this.stopping) throw new StopRequested(this.stopping);
  }

  #open() {
    this.#device ??= this.#options.openDevice();
    return this.#device;
  }

  /** What the compiler may rely on, as JSON. */
  async deviceProfile() {
    this.check();
    return JSON.stringify(await deviceProfile(await this.#open()));
  }

  /** A file of the plan that is opened next. @param {string} name @param {PyBuffer} content */
  file(name, content) {
    this.#files.set(name, copyOf(content, "u8"));
  }

  /** @param {number} seed @param {number} metricsInterval */
  async openSession(seed, metricsInterval) {
    this.check();
    const files = this.#files;
    this.#files = new Map();
    const plan = await loadPlan(async (name) => files.get(name) ?? new Uint8Array());
    const device = await this.#open();
    const { progress, variants, storage } = this.#options;
    const session = await PlanSession.create(plan, { device, seed, metricsInterval, progress, variants, storage });
    const handle = new SessionHandle(this, session);
    this.#sessions.push(handle);
    return handle;
  }

  /** @param {PyList} names @param {PyList} values */
  report(names, values) {
    const numbers = values.toJs();
    this.#options.report?.(Object.fromEntries(names.toJs().map((name, i) => [name, numbers[i] ?? null])));
  }

  /** Frees the sessions and the device. */
  async close() {
    for (const session of this.#sessions) session.close();
    this.#sessions = [];
    const device = await this.#device?.catch(() => null);
    this.#device = null;
    device?.destroy();
  }
}

/** A session as Python drives it: plain arguments, one call for each program. */
class SessionHandle {
  #host;
  #session;
  #open = true;

  /** @param {ScriptHost} host @param {PlanSession} session */
  constructor(host, session) {
    this.#host = host;
    this.#session = session;
  }

  /** @param {number} dataStep @param {number} targetTokens @param {number} microbatches @param {number} zLoss */
  begin(dataStep, targetTokens, microbatches, zLoss) {
    return this.#live().begin({ dataStep, targetTokens, microbatches, zLoss });
  }

  /** @param {PyBuffer} words */
  accumulate(words) {
    return this.#live().accumulate(this.#batch(words));
  }

  apply() {
    return this.#live().apply();
  }

  /** @param {boolean} wait */
  results(wait) {
    return this.#live().pollMetrics({ wait });
  }

  /** @param {PyBuffer} words */
  evaluate(words) {
    return this.#live().evaluate(this.#batch(words));
  }

  /** @param {PyList} prompt @param {number} tokens @param {number} temperature @param {number} topK @param {number} seed */
  async generate(prompt, tokens, temperature, topK, seed) {
    const ids = [];
    const options = { tokens, temperature, topK, seed };
    for await (const id of this.#live().generate(prompt.toJs(), options)) {
      this.#host.check();
      ids.push(id);
    }
    return ids;
  }

  close() {
    if (this.#open) this.#session.close();
    this.#open = false;
  }

  /** The words of `Batch.words` in hybrid_tab/batches.py. @param {PyBuffer} buffer */
  #batch(buffer) {
    const words = copyOf(buffer, "u32");
    const { B, T } = this.#session.plan.shape;
    const [ids, targets, positions, segmentIds] = [0, 1, 2, 3].map((i) => words.subarray(i * B * T, (i + 1) * B * T));
    const sampleIds = words.subarray(4 * B * T);
    return new Batch([B, T], { ids, targets, positions, segmentIds, sampleIds });
  }

  #live() {
    this.#host.check();
    if (!this.#open) throw new Error("this session is closed");
    return this.#session;
  }
}
