/**
 * @file Whole runs on WebGPU, as functions that go anywhere: in Node, in Deno, in a worker. `tests/browser/
 * runner_fixtures.py` writes what they begin with; what they return is plain JSON for the caller to judge.
 */

import { prepareData } from "../../runtime/data/prepare.js";
import { openDevice } from "../../runtime/device.js";
import { writeAll } from "../../runtime/folders/folder.js";
import { MemoryDirectory } from "../../runtime/folders/memory.js";
import { loadPlan } from "../../runtime/plan.js";
import { metricsInterval, readJob } from "../../runtime/runner/job.js";
import { FolderRunPlace } from "../../runtime/runner/place_folder.js";
import { TrainingRunner } from "../../runtime/runner/training_runner.js";
import { PlanSession } from "../../runtime/session.js";

/** @import { Directory } from "../../runtime/folders/folder.js" */
/** @import { Facts } from "../../runtime/runner/place.js" */
/** @import { RunOptions } from "../../runtime/runner/options.js" */
/** @import { Host } from "./scenarios.js" */

const STORE_FILES = ["manifest.json", "tokens.bin", "documents.bin", "tokenizer.json"];

/** @param {Host} host @param {string} name @returns {Promise<any>} */
async function readJson(host, name) {
  return JSON.parse(new TextDecoder().decode(await host.read(name)));
}

/**
 * One start of the run in `folder`, up to a step.
 *
 * @param {Host} host
 * @param {Directory} folder
 * @param {object} [how]
 * @param {RunOptions} [how.options]
 * @param {(kind: string, facts: Facts, session: PlanSession, runner: TrainingRunner) => void} [how.watch]
 */
async function start(host, folder, { options, watch } = {}) {
  const job = readJob(await readJson(host, "job.json"));
  const store = new MemoryDirectory("data");
  for (const file of STORE_FILES) await writeAll(store, file, await host.read(`data/${file}`));
  const data = await prepareData(store, job.config.data);
  /** @type {PlanSession[]} */
  const sessions = [];
  /** @type {[string, Facts][]} */
  const events = [];
  const place = await FolderRunPlace.open(folder, job.config, {
    watch: (kind, facts) => {
      events.push([kind, facts]);
      watch?.(kind, facts, sessions[sessions.length - 1], runner);
    },
  });
  const runner = new TrainingRunner({
    job,
    place,
    data,
    openSession: async ({ config }, progress) => {
      const device = await openDevice({ gpu: host.gpu });
      const plan = await loadPlan((file) => host.read(`plan/${file}`));
      const { seed } = config.run;
      const session = await PlanSession.create(plan, {
        ...{ device, seed, variants: {}, progress, metricsInterval: metricsInterval(config) },
      });
      sessions.push(session);
      return session;
    },
  });
  const outcome = await runner.run(options);
  await place.close();
  const stateHash = (await place.checkpoints.latest())?.stateHash;
  return { outcome, stateHash, events, counters: sessions.at(-1)?.counters() };
}

/** @param {Directory} folder @param {string} file */
async function rows(folder, file) {
  const text = new TextDecoder().decode(await folder.read(file));
  return text
    .split("\n")
    .filter(Boolean)
    .map((line) => JSON.parse(line));
}

/**
 * The run in one piece, or stopped and started again at steps of it.
 *
 * @param {Host} host
 * @param {number[]} parts the last step of each
 * @param {Directory} [folder]
 */
export async function trainInParts(host, parts, folder = new MemoryDirectory("run")) {
  /** @type {Awaited<ReturnType<typeof start>> | null} */
  let last = null;
  for (const maxSteps of parts) last = await start(host, folder, { options: { maxSteps } });
  return {
    ...last,
    samples: last?.events.filter(([kind]) => kind === "sample").map(([, facts]) => facts),
    entries: await rows(folder, "metrics.jsonl"),
    validation: await rows(folder, "validation.jsonl"),
    reference: await readJson(host, "reference.json"),
  };
}

/**
 * The run with its device taken away, once while steps are in flight and once while nothing is.
 *
 * @param {Host} host
 */
export async function trainWithLosses(host) {
  const at = [8, 16];
  const folder = new MemoryDirectory("run");
  const report = await start(host, folder, {
    watch: (kind, facts, session) => {
      if (kind !== "step" || facts.step !== at[0]) return;
      at.shift();
      session.device.destroy();
    },
  });
  const notes = report.events.filter(([kind]) => kind === "note").map(([, { text }]) => text);
  return { ...report, notes, entries: await rows(folder, "metrics.jsonl") };
}

/**
 * The run paused once, and stopped once.
 *
 * @param {Host} host
 */
export async function trainWithPause(host) {
  const folder = new MemoryDirectory("run");
  const first = await start(host, folder, {
    watch: (kind, facts, _, runner) => {
      if (kind === "step" && facts.step === 4) runner.pause();
      if (kind === "step" && facts.step === 12) runner.stop("a test");
      if (kind === "note" && String(facts.text).startsWith("paused")) setTimeout(() => runner.resume(), 50);
    },
  });
  return { first: first.outcome, ...(await start(host, folder)) };
}
