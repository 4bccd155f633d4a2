/** @file Python in the tab as a page uses it, for tests in a browser: the worker of a built bundle, with the client's source. */

import { PythonWorker } from "../../pyodide/client.js";

/** @import { Report } from "../../pyodide/script_host.js" */
/** @import { PlanRequest, Profile } from "../../pyodide/tab_python.js" */

const WORKER = "/bundle/worker.js";

/** @type {PythonWorker | null} */
let python = null;

async function open() {
  if (!python || python.ended) python = await PythonWorker.open(() => new Worker(WORKER, { type: "module" }));
  return python;
}

/** @param {Uint8Array<ArrayBuffer>} bytes */
async function sha256(bytes) {
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return [...digest].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * The sha256 of each file of a plan, its estimate, and how long the plan took from nothing, and again.
 *
 * @param {PlanRequest} request
 * @param {Profile} profile
 */
export async function compilePlan(request, profile) {
  const begun = performance.now();
  const worker = await open();
  const folder = await worker.compilePlan(request, profile);
  const first = performance.now();
  await worker.compilePlan(request, profile);
  const again = performance.now();
  /** @type {Record<string, string>} */
  const files = {};
  for (const name of await folder.list()) files[name] = await sha256(await folder.read(name));
  const estimate = await worker.estimate(request, profile);
  return { files, ...estimate, seconds: { first: (first - begun) / 1000, again: (again - first) / 1000 } };
}

/** Everything that a script says, and how it ends. @param {string} source @param {{seconds?: number, stopAfter?: number}} [options] */
export async function runScript(source, { seconds, stopAfter } = {}) {
  const worker = await open();
  /** @type {string[]} */
  const printed = [];
  /** @type {Report[]} */
  const reported = [];
  const listeners = {
    print: (/** @type {string[]} */ lines) => printed.push(...lines),
    report: (/** @type {Report} */ values) => reported.push(values),
  };
  if (stopAfter !== undefined) setTimeout(() => worker.stop("enough"), stopAfter * 1000);
  try {
    await worker.runScript(source, { seconds, ...listeners });
    return { printed, reported, error: null, ended: worker.ended };
  } catch (error) {
    const { name, message, line = null } = /** @type {Error & {line?: number}} */ (error);
    return { printed, reported, error: { name, message, line }, ended: worker.ended };
  }
}
