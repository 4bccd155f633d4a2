/**
 * @file The runs that lie in this browser's private file system: `runs/NAME` with what `FolderRunPlace` keeps, `job.json`,
 * and the token store of its text in `data`.
 */

import { isObject } from "../runtime/contracts/values.js";
import { ConfigError } from "../runtime/errors.js";
import { nameProblem, readAll, writeAll } from "../runtime/folders/folder.js";
import { openOpfs } from "../runtime/folders/opfs.js";
import { readJob } from "../runtime/runner/job.js";

/** @import { Directory } from "../runtime/folders/folder.js" */
/** @import { Job } from "../runtime/runner/job.js" */

export const JOB_FILE = "job.json";
export const DATA_FOLDER = "data";
const MOST_BYTES = 2 ** 26;
const MOST_POINTS = 1000;
const NAME_LENGTH = 80; // a number, and the step of a checkpoint, come behind it

/**
 * A run as the page lists it. step: the last one that its record knows.
 *
 * @typedef {object} RunSummary
 * @property {string} name
 * @property {number} step
 * @property {number} steps
 * @property {string} status
 * @property {string} updatedAt
 * @property {number} parameters
 * @property {boolean} busy another tab has it
 * @property {boolean} damaged what it is for cannot be read, so it cannot go on here; its checkpoint may be good
 */

/** @returns {Promise<Directory>} */
export function openRuns() {
  return openOpfs(["runs"]);
}

/** @param {Directory} runs @returns {Promise<RunSummary[]>} the newest first */
export async function listRuns(runs) {
  const held = (await globalThis.navigator?.locks?.query())?.held ?? [];
  /** @type {RunSummary[]} */
  const found = [];
  for (const name of await runs.folders()) {
    const folder = await runs.open(name);
    if (!folder) continue;
    if (!(await hasCheckpoint(folder))) continue;
    const job = await readJson(folder, JOB_FILE);
    // Somebody may have been ended by force while one of the two was written.
    const facts = (await readJson(folder, "run.json")) ?? (await readJson(folder, "run.next.json")) ?? {};
    found.push({
      name,
      step: Number(facts.step ?? 0),
      steps: Number(job?.steps ?? 0),
      status: String(facts.status),
      updatedAt: String(facts.updatedAt ?? facts.createdAt ?? ""),
      parameters: Number(job?.parameters ?? 0),
      damaged: job === null,
      busy: held.some((lock) => lock.name === `hybrid/run/${name}`),
    });
  }
  return found.sort((a, b) => (a.updatedAt < b.updatedAt ? 1 : -1));
}

/** Remove what runs left that ended before their first checkpoint, and that no tab has. @param {Directory} runs */
export async function sweep(runs) {
  for (const name of await runs.folders()) {
    const clear = async () => {
      const folder = await runs.open(name);
      if (folder && !(await hasCheckpoint(folder))) await runs.remove(name);
    };
    const locks = globalThis.navigator?.locks;
    if (locks) {
      const own = (/** @type {Lock | null} */ lock) => lock && clear();
      await locks.request(`hybrid/run/${name}`, { ifAvailable: true }, own);
    } else await clear();
  }
}

/** @param {Directory} folder */
async function hasCheckpoint(folder) {
  const checkpoints = await folder.open("checkpoints");
  return checkpoints !== null && (await checkpoints.folders()).length > 0;
}

/**
 * A name that no run has: the wished one, or that with a number.
 *
 * @param {Directory} runs
 * @param {string} wish
 */
export async function freeName(runs, wish) {
  const letters = wish.replaceAll(/[^A-Za-z0-9._-]+/g, "-").replace(/^[^A-Za-z0-9]+/, "");
  const short = letters.slice(0, NAME_LENGTH).replace(/[.-]+$/, "");
  const plain = nameProblem(short) ? "run" : short;
  const taken = new Set(await runs.folders());
  for (let number = 1; ; number++) {
    const name = number === 1 ? plain : `${plain}-${number}`;
    if (!taken.has(name)) return name;
  }
}

/** @param {Directory} folder @param {Job} job */
export function writeJob(folder, job) {
  return writeAll(folder, JOB_FILE, `${JSON.stringify(job)}\n`);
}

/**
 * @param {Directory} folder
 * @returns {Promise<Job>}
 * @throws {ConfigError}
 */
export async function openJob(folder) {
  const job = await readJson(folder, JOB_FILE);
  if (!job)
    throw new ConfigError(`${folder.name}: what this run is for cannot be read; remove it, and begin a new one`);
  return readJob(job);
}

/** @param {Directory} folder @param {string} file @returns {Promise<any>} null for what is not there, or is no object in JSON */
async function readJson(folder, file) {
  if ((await folder.size(file)) === null) return null;
  try {
    const value = JSON.parse(new TextDecoder().decode(await readAll(folder, file, MOST_BYTES)));
    return isObject(value) ? value : null;
  } catch (error) {
    if (error instanceof SyntaxError) return null;
    throw error;
  }
}

/**
 * What the charts show of the steps before this tab came: the rows up to a step, thinned out.
 *
 * @param {Directory} folder
 * @param {number} last
 */
export async function history(folder, last) {
  const rows = await readRows(folder, "metrics.jsonl", last);
  const every = Math.max(1, Math.ceil(rows.length / MOST_POINTS));
  const points = rows.filter((_, i) => i % every === every - 1 || i === rows.length - 1);
  return {
    steps: points.map((row) => ({
      step: row.step,
      loss: row.total_loss,
      lr: row.lr,
      gradNorm: row.gradient_norm_unclipped,
    })),
    validation: (await readRows(folder, "validation.jsonl", last)).map(({ step, loss }) => ({ step, loss })),
  };
}

/** @param {Directory} folder @param {string} file @param {number} last @returns {Promise<any[]>} */
async function readRows(folder, file, last) {
  if ((await folder.size(file)) === null) return [];
  const text = new TextDecoder().decode(await readAll(folder, file, 2 ** 30));
  const rows = [];
  for (const line of text.split("\n")) {
    try {
      if (line) rows.push(JSON.parse(line));
    } catch {
      break; // the line that was being written when the tab was closed
    }
  }
  return rows.filter(({ step }) => step <= last);
}
