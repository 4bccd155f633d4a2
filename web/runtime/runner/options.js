/**
 * @file The options of `TrainingRunner.run`: those of the runner that hybrid mirrors, with their meaning here.
 *
 * May import: errors, contracts.
 */

import { forceResumeSource } from "../contracts/identity.js";
import { repr, unknownName } from "../contracts/names.js";
import { isInteger } from "../contracts/values.js";
import { ConfigError } from "../errors.js";
import { withConfig } from "./job.js";

/** @import { Batch } from "../batch.js" */
/** @import { Entry } from "../contracts/metrics.js" */
/** @import { Job } from "./job.js" */

/** What happened in one pass over the data. @typedef {{epoch: number, steps: number, loss: number}} EpochFacts */

/** @typedef {{key: string, step: number, epoch: number, batch: number, checkpointHash: string}} SavedFacts */

/**
 * What is absent or null is as the job says. The others replace its settings, and count in its contract where they
 * change the trajectory.
 *
 * @typedef {object} RunOptions
 * @property {number | null} [epochs] the run is measured in passes over the data: this many
 * @property {number | null} [maxSteps] the run ends with this step; in a run measured in epochs, with this step at the
 *   latest
 * @property {number | null} [batchSize] samples of one step; a multiple of the job's microbatch
 * @property {boolean | null} [shuffle] true; the order of the data is that of the seed, on every runtime
 * @property {number | null} [seed] of initial weights, order and dropout
 * @property {string | null} [modelId] what the metrics call the model
 * @property {string | null} [trainingObjective] the job's own
 * @property {number | null} [logEvery] steps between two calls of `onStep`; 0 or less: each step
 * @property {number | null} [checkpointEvery] steps between two saves; 0: only at the end, and when stopped
 * @property {string | null} [resumeFrom] the name of a checkpoint of this run to go on from, instead of the newest
 * @property {boolean | null} [forceResume] go on although the contract differs; each difference is recorded for good
 * @property {string | null} [forceResumeReason]
 * @property {string | null} [forceResumeSource]
 * @property {string | null} [checkpointOperator] who forces
 * @property {string | null} [command] with `surface` the source of a forced resume that names none
 * @property {string | null} [surface]
 * @property {((batch: Batch) => Batch | Promise<Batch>) | null} [prepareBatch] changes each microbatch before it is used. No
 *   fingerprint knows of it: who resumes the run must give the same one
 * @property {((entry: Entry) => unknown) | null} [onStep] awaited, like the others; steps may be in flight by then
 * @property {((facts: EpochFacts) => unknown) | null} [onEpoch] at the end of each pass, and of the run
 * @property {((facts: SavedFacts) => unknown) | null} [onCheckpoint] once a checkpoint is stored
 */

/**
 * @typedef {object} Hooks
 * @property {NonNullable<RunOptions["prepareBatch"]> | null} prepareBatch
 * @property {NonNullable<RunOptions["onStep"]>} onStep
 * @property {NonNullable<RunOptions["onEpoch"]>} onEpoch
 * @property {NonNullable<RunOptions["onCheckpoint"]>} onCheckpoint
 */

/** Who forces a resume, and why. @typedef {{reason: string, source: string, operator: string | null}} Force */

/** @typedef {{job: Job, hooks: Hooks, resumeFrom: string | null, force: Force | null}} Applied */

const CALLS = ["prepareBatch", "onStep", "onEpoch", "onCheckpoint"];
const COUNTS = /** @type {Record<string, number>} */ ({
  epochs: 1,
  maxSteps: 1,
  batchSize: 1,
  checkpointEvery: 0,
  seed: 0,
});
const FORCED = ["forceResumeReason", "forceResumeSource", "checkpointOperator"];
const TEXTS = ["modelId", "trainingObjective", "resumeFrom", ...FORCED, "command", "surface"];
const KNOWN = [...Object.keys(COUNTS), "shuffle", "logEvery", "forceResume", ...TEXTS, ...CALLS];
// Options of the mirrored runner for objectives that a job of this version cannot have.
const FOREIGN = /^(distill|ul[A-Z]|stage[1A]|trainingStage|teacher|student|strictPair)/;

/**
 * @param {Job} job
 * @param {RunOptions} options
 * @returns {Applied}
 * @throws {ConfigError} for an option that is unknown, of another type, or makes no sense for this job
 */
export function applyOptions(job, options) {
  /** @type {Record<string, any>} */
  const given = Object.fromEntries(
    Object.entries(options).filter(([, value]) => value !== null && value !== undefined),
  );
  for (const [name, value] of Object.entries(given)) checkOption(job, name, value);
  for (const name of FORCED) {
    if (name in given && given.forceResume !== true) {
      throw new ConfigError(`TrainingRunner: ${name} is only for a forced resume: set forceResume to true`);
    }
  }
  const { prepareBatch = null, onStep = nothing, onEpoch = nothing, onCheckpoint = nothing } = given;
  const reason = given.forceResumeReason ?? "forced resume flag provided";
  const source = forceResumeSource(given) ?? "";
  return {
    job: applied(job, given),
    hooks: { prepareBatch, onStep, onEpoch, onCheckpoint },
    resumeFrom: given.resumeFrom ?? null,
    force: given.forceResume ? { reason, source, operator: given.checkpointOperator ?? null } : null,
  };
}

/**
 * @param {Job} job
 * @param {string} name
 * @param {unknown} value neither null nor undefined
 */
function checkOption(job, name, value) {
  /** @param {string} expected */
  const wrong = (expected) => new ConfigError(`TrainingRunner: ${name} is ${repr(value, 80)}: expected ${expected}`);
  if (FOREIGN.test(name)) {
    throw new ConfigError(
      `TrainingRunner: ${name} makes no sense for the objective ${repr(job.config.objective.type)}`,
    );
  }
  if (!KNOWN.includes(name)) throw new ConfigError(unknownName("TrainingRunner option", name, KNOWN));
  if (name in COUNTS && !(Number.isSafeInteger(value) && /** @type {number} */ (value) >= COUNTS[name])) {
    throw wrong(`a whole number of at least ${COUNTS[name]}`);
  }
  if (name === "logEvery" && !isInteger(value)) throw wrong("a whole number");
  if (name === "forceResume" && typeof value !== "boolean") throw wrong("true or false");
  if (TEXTS.includes(name) && !(typeof value === "string" && value.trim())) throw wrong("a text that is not empty");
  if (CALLS.includes(name) && typeof value !== "function") throw wrong("a function");
  if (name === "shuffle" && value !== true) {
    throw wrong("true, for the order of the data is that of the seed on every runtime");
  }
  if (name === "trainingObjective" && value !== job.config.objective.type) {
    throw wrong(`the objective of the job, ${repr(job.config.objective.type)}`);
  }
}

/**
 * @param {Job} job
 * @param {Record<string, any>} given
 * @returns {Job}
 */
function applied(job, given) {
  const { checkpoint, data, run, ...others } = job.config;
  const inEpochs = given.epochs !== undefined || run.steps === null;
  const config = {
    ...others,
    checkpoint: { ...checkpoint, every: given.checkpointEvery ?? checkpoint.every },
    data: { ...data, batchSize: given.batchSize ?? data.batchSize },
    run: {
      ...run,
      name: given.modelId ?? run.name,
      seed: given.seed ?? run.seed,
      steps: inEpochs ? null : (given.maxSteps ?? run.steps),
      epochs: given.epochs ?? run.epochs,
      logEvery: Math.max(1, given.logEvery ?? run.logEvery),
    },
  };
  const limit = inEpochs ? config.run.epochs * job.trainSamples : null;
  const steps = limit === null ? config.run.steps : Math.ceil(limit / config.data.batchSize);
  return { ...withConfig(job, config), limit, steps: inEpochs ? Math.min(steps, given.maxSteps ?? steps) : steps };
}

function nothing() {}
