/** @file The job of a run that begins here, or of a checkpoint that was brought here. */

import { identityHashes } from "../runtime/contracts/fingerprint.js";
import { buildProvenance } from "../runtime/contracts/provenance.js";
import { stableHash, stableJson } from "../runtime/contracts/stable_json.js";
import { isObject } from "../runtime/contracts/values.js";
import { CheckpointCorrupt, ContractMismatch } from "../runtime/errors.js";
import { FORMAT, VERSION } from "../runtime/runner/job.js";

/** @import { Manifest } from "../runtime/checkpoint/manifest.js" */
/** @import { PreparedData } from "../runtime/data/prepare.js" */
/** @import { Fingerprints, Job, Settings } from "../runtime/runner/job.js" */
/** @import { SiteSize } from "./planner.js" */

/**
 * What somebody chose on the page.
 *
 * @typedef {object} Choice
 * @property {string} size
 * @property {string} precision
 * @property {number} steps
 * @property {string} name of the run
 * @property {string[]} sources names of the text files
 */

/**
 * The settings of a new run.
 *
 * @param {SiteSize} size
 * @param {Choice} choice
 * @returns {{config: Settings, contract: Record<string, any>}}
 */
export function chosenSettings(size, { precision, steps, name, sources }) {
  const { config, contract } = size.precisions[precision];
  const totalSteps = Math.max(1, steps - config.schedule.warmupSteps);
  const source = sources.length === 1 ? sources[0] : sources;
  return {
    config: {
      ...config,
      data: { ...config.data, source },
      schedule: { ...config.schedule, totalSteps },
      run: { ...config.run, name, steps },
    },
    contract: { ...contract, schedule: { ...contract.schedule, totalSteps } },
  };
}

/** What the data of a run is known by. @param {PreparedData} data */
export function dataFingerprint({ train, store }) {
  return { fingerprint: train.fingerprint, samples: train.size, tokens: store.manifest.tokens };
}

/**
 * @param {SiteSize} size
 * @param {Choice} choice
 * @param {PreparedData} data
 * @returns {Job}
 */
export function newJob(size, choice, data) {
  const { config, contract } = chosenSettings(size, choice);
  const fingerprints = { dataset: dataFingerprint(data), tokenizer: size.tokenizer, contract };
  return {
    ...common(config, fingerprints, choice.steps, data),
    runId: crypto.randomUUID(),
    checkpointFiles: size.checkpointFiles,
    parameters: size.parameters,
  };
}

const SECTIONS = ["run", "data", "model", "optimizer", "schedule", "checkpoint", "evaluation", "sampling", "backend"];

/**
 * That a checkpoint from elsewhere, whose bytes are right, also says what a page needs to know of its run.
 *
 * @param {string} archive its name
 * @param {Settings} config
 * @param {Record<string, string>} files its small files
 * @throws {CheckpointCorrupt}
 */
export function checkBrought(archive, config, files) {
  const { data } = config;
  const missing = [
    ...SECTIONS.filter((name) => !isObject(config[name])),
    ...["split", "samples"].filter((name) => isObject(data) && !isObject(data[name])).map((name) => `data.${name}`),
    ...(typeof config.run?.name === "string" ? [] : ["run.name"]),
  ];
  if (missing.length) throw new CheckpointCorrupt(`${archive}: its settings have no ${missing[0]}: it is no run's`);
  if (!files["tokenizer.json"]) throw new CheckpointCorrupt(`${archive}: has no tokenizer.json`);
}

/**
 * The job that goes on from a checkpoint; one that has done its steps gets `more`.
 *
 * @param {Manifest} manifest
 * @param {Record<string, string>} files its small files
 * @param {number} parameters
 * @param {PreparedData} data
 * @param {{more: number, name: string}} options
 * @returns {Job}
 * @throws {ContractMismatch} if the data is another
 */
export function jobOfCheckpoint(manifest, files, parameters, data, { more, name }) {
  const fingerprints = /** @type {Fingerprints} */ (manifest.fingerprints);
  const dataset = dataFingerprint(data);
  if (stableJson(fingerprints.dataset) !== stableJson(dataset)) {
    const { tokens } = fingerprints.dataset;
    throw new ContractMismatch(
      `this run was trained on another text, of ${tokens} tokens (the chosen one has ${dataset.tokens}): choose that text`,
    );
  }
  const config = /** @type {Settings} */ (manifest.config);
  const { step } = manifest.progress;
  // A run in epochs ends with its data; asking more of it would be another trajectory.
  const planned = config.run.steps ?? Math.ceil((config.run.epochs * data.train.size) / config.data.batchSize);
  const steps = config.run.steps !== null && step >= planned ? step + more : planned;
  const run = { ...config.run, name, steps: config.run.steps === null ? null : steps };
  return {
    ...common({ ...config, run }, fingerprints, steps, data),
    runId: manifest.lineage.runId,
    checkpointFiles: files,
    parameters,
  };
}

/**
 * @param {Settings} config
 * @param {Fingerprints} fingerprints
 * @param {number} steps
 * @param {PreparedData} data
 */
function common(config, fingerprints, steps, { train }) {
  const { optimizer, schedule } = fingerprints.contract;
  return {
    format: FORMAT,
    version: VERSION,
    config,
    steps,
    limit: config.run.steps === null ? config.run.epochs * train.size : null,
    trainSamples: train.size,
    fingerprints,
    hashes: { ...identityHashes(fingerprints), optimizerHash: stableHash({ optimizer, schedule }) },
    resumeAudits: [],
    provenance: buildProvenance({}),
    resume: null,
    lastSequence: 0,
  };
}

/**
 * The command that goes on with a downloaded run on the desktop, in a folder that holds it and its text.
 *
 * @param {string} file the archive
 * @param {Job} job
 * @param {number} step of the checkpoint
 */
export function desktopCommand(file, { config, steps }, step) {
  const { source } = config.data;
  const value = Array.isArray(source) ? JSON.stringify(source) : tomlText(source);
  const more = step >= steps && config.run.steps !== null ? ["--steps", String(2 * steps)] : [];
  return ["hybrid", "train", "--resume", file, "--set", `data.source=${value}`, ...more].map(shellWord).join(" ");
}

/** A text that `--set` takes as a text. @param {string} text */
function tomlText(text) {
  return /^[A-Za-z_][\w./ -]*$/.test(text) && !/^(true|false|null|inf|nan)$/.test(text) ? text : JSON.stringify(text);
}

/** @param {string} word */
function shellWord(word) {
  return /^[\w./=:,+-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
}
