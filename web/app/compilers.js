/** @file Planners that have a plan compiled: by whoever serves the page, or by Python in the tab; and plans kept in OPFS. */

import { stableJson } from "../runtime/contracts/stable_json.js";
import { errorNamed, HybridError } from "../runtime/errors.js";
import { readAll, writeAll } from "../runtime/folders/folder.js";
import { fetchFiles } from "../runtime/plan.js";
import { forRun, planKey } from "./planner.js";

/** @import { PythonWorker } from "../pyodide/client.js" */
/** @import { Directory, Folder } from "../runtime/folders/folder.js" */
/** @import { Settings } from "../runtime/runner/job.js" */
/** @import { Planner, Profile } from "./planner.js" */

const PLAN = "plan.json";
const MOST_BYTES = 2 ** 28;
const MOST_PLANS = 8;

/**
 * Plans of a server that has this page: POST {config, profile} gives {plan: address}.
 *
 * @param {URL} address
 * @param {URL} base what the answer is relative to
 * @returns {Planner}
 */
export function serverPlanner(address, base) {
  return async (settings, profile) => {
    const body = JSON.stringify({ config: settings, profile });
    const headers = { "content-type": "application/json" };
    const response = await fetch(address, { method: "POST", headers, body });
    const answer = await response.json().catch(() => ({}));
    if (!response.ok) {
      const { name = "HybridError", message = `the server answered with status ${response.status}` } =
        answer.error ?? {};
      throw errorNamed(name, message);
    }
    const folder = new URL(answer.plan, base);
    return { folder: { name: answer.plan, read: fetchFiles(folder) } };
  };
}

/**
 * Plans of Python in the tab.
 *
 * @param {() => Promise<PythonWorker>} open loads it where it is not loaded yet
 * @returns {Planner}
 */
export function pythonPlanner(open) {
  return async (settings, profile) => {
    const [python, { planRequest }] = await Promise.all([open(), import("../pyodide/plan_request.js")]);
    return { folder: await python.compilePlan(planRequest(settings), profile) };
  };
}

/**
 * The plans of another planner, kept in this browser by what they are compiled for: the second time nothing is compiled,
 * and no compiler loaded. The newest few stay.
 *
 * @param {Planner} planner whose folders are `Folder`s, with a list
 * @param {Directory} kept
 * @param {string} version of the compiler
 * @returns {Planner}
 */
export function keptPlanner(planner, kept, version) {
  return async (settings, profile) => {
    const name = await planName(settings, profile, version);
    const old = await kept.open(name);
    if (old && (await isWhole(old))) return { folder: forRun(old, settings) };
    const found = await planner(settings, profile);
    if (found) await keep(kept, name, /** @type {Folder} */ (found.folder)).catch(() => {}); // no room: it is compiled again
    return found;
  };
}

/** @param {Folder} plan */
async function isWhole(plan) {
  if ((await plan.size(PLAN)) === null) return false;
  return needs(plan).then(
    () => true,
    () => false,
  );
}

/**
 * @param {Settings} settings
 * @param {Profile} profile
 * @param {string} version
 */
async function planName(settings, profile, version) {
  const text = new TextEncoder().encode(stableJson([planKey(settings), { ...profile }, version]));
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", text));
  return Array.from(digest.subarray(0, 16), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** @param {Directory} kept @param {string} name @param {Folder} plan */
async function keep(kept, name, plan) {
  const order = await readOrder(kept);
  const names = [...order.filter((other) => other !== name), name];
  for (const old of await kept.folders()) if (!names.slice(-MOST_PLANS).includes(old)) await kept.remove(old);
  const folder = await kept.directory(name);
  // The document last: what has one is whole.
  for (const file of [...(await plan.list()).filter((file) => file !== PLAN), PLAN]) {
    await writeAll(folder, file, await plan.read(file));
  }
  await writeAll(kept, "order.json", JSON.stringify(names.slice(-MOST_PLANS)));
}

/** @param {Directory} kept @returns {Promise<string[]>} names, the oldest first */
async function readOrder(kept) {
  if ((await kept.size("order.json")) === null) return [];
  try {
    return JSON.parse(new TextDecoder().decode(await readAll(kept, "order.json", 2 ** 16)));
  } catch {
    return []; // written half
  }
}

/**
 * What a plan would need, as `plans` of site.json say it of theirs.
 *
 * @param {{read: (file: string) => Promise<Uint8Array>}} folder
 * @returns {Promise<{requires: {features: string[], limits: Record<string, number>}, memoryBytes: number}>}
 * @throws {HybridError}
 */
export async function needs(folder) {
  const bytes = await folder.read(PLAN);
  if (bytes.length > MOST_BYTES) throw new HybridError("the plan of this model is too large for a page");
  const { arenas, requires } = JSON.parse(new TextDecoder().decode(bytes));
  const pages = /** @type {{pages: number[]}[]} */ (Object.values(arenas)).flatMap((arena) => arena.pages);
  return { requires, memoryBytes: pages.reduce((sum, page) => sum + page, 0) };
}
