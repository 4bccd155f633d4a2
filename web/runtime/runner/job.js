/**
 * @file The job: one run, prepared for the runner. `bridge/schemas/job.schema.json` is its schema.
 *
 * May import: errors, contracts.
 */

import { identityHashes } from "../contracts/fingerprint.js";
import { repr } from "../contracts/names.js";
import { isObject } from "../contracts/values.js";
import { ConfigError } from "../errors.js";

export const FORMAT = "hybrid.job";
export const VERSION = 1;
const MOST_STEPS_BETWEEN_READBACKS = 128; // half of the rows in a session's metrics ring

/** Sections of settings, by their names in a configuration file. @typedef {Record<string, any>} Settings */

/**
 * A checkpoint among those of a run.
 *
 * @typedef {object} CheckpointRef
 * @property {string} name of its folder
 * @property {number} step
 * @property {number} sequence
 * @property {string} checkpointHash
 */

/**
 * @typedef {object} Fingerprints
 * @property {Record<string, any>} dataset
 * @property {Record<string, any>} tokenizer
 * @property {Record<string, any>} contract
 */

/**
 * @typedef {object} Hashes
 * @property {string | null} configHash
 * @property {string | null} datasetHash
 * @property {string | null} tokenizerHash
 * @property {string | null} optimizerHash
 */

/**
 * config: resolved settings. steps: the run ends with this one. limit: samples after which it ends, null for a run
 * measured in steps. trainSamples: of one epoch. resume, lastSequence: the checkpoint to go on from, and the newest
 * sequence, where the place of the run does not know them. parameters: elements of all distinct tensors.
 *
 * @typedef {object} Job
 * @property {string} format
 * @property {number} version
 * @property {Settings} config
 * @property {number} steps
 * @property {number | null} limit
 * @property {number} trainSamples
 * @property {Fingerprints} fingerprints
 * @property {Hashes} hashes
 * @property {string} runId
 * @property {readonly Record<string, unknown>[]} resumeAudits
 * @property {Record<string, any> | null} provenance
 * @property {Record<string, string>} checkpointFiles texts of the small files of a checkpoint, by name
 * @property {CheckpointRef | null} resume
 * @property {number} lastSequence
 * @property {number} parameters
 * @property {string} [runDir] where the run lies, for messages
 * @property {number} [lastValidation] the newest step with a validation row
 */

const HASH = /^[0-9a-f]{64}$/;
/** @typedef {(value: any) => boolean} Check */
/** @type {Record<string, [expected: string, check: Check]>} */
const KINDS = {
  count: ["a whole number of at least 0", (value) => Number.isSafeInteger(value) && value >= 0],
  positive: ["a whole number of at least 1", (value) => Number.isSafeInteger(value) && value >= 1],
  number: ["a number", Number.isFinite],
  flag: ["true or false", (value) => typeof value === "boolean"],
  text: ["a text", (value) => typeof value === "string"],
  hash: ["64 hexadecimal digits", (value) => HASH.test(value)],
  object: ["an object", isObject],
  list: ["a list of objects", (value) => Array.isArray(value) && value.every(isObject)],
};
// What the loop relies on, by kind; a question mark: or null. The configuration itself was checked by who made the job.
const MEMBERS = {
  positive:
    "steps limit? trainSamples parameters config.run.steps? config.run.epochs config.run.logEvery resume.sequence " +
    "config.data.sequenceLength config.data.batchSize config.data.microbatchSize?",
  count:
    "lastSequence config.run.seed config.checkpoint.every config.checkpoint.keepLast config.checkpoint.keepEvery " +
    "config.evaluation.every config.sampling.every config.backend.maxRecoveries resume.step",
  number: "config.run.maxHours? config.objective.zLoss",
  flag: "config.telemetry.alerts.failOnAlert",
  text:
    "runId config.run.name config.objective.type config.backend.deviceProfile config.precision.type resume.name " +
    "checkpointFiles.config.json checkpointFiles.generation_config.json",
  object:
    "config.optimizer config.schedule config.lossScaling fingerprints.dataset fingerprints.tokenizer " +
    "fingerprints.contract fingerprints.contract.data fingerprints.contract.run hashes provenance?",
  hash:
    "fingerprints.dataset.fingerprint hashes.configHash? hashes.datasetHash? hashes.tokenizerHash? " +
    "hashes.optimizerHash? resume.checkpointHash",
  list: "resumeAudits",
};

/**
 * @param {unknown} document
 * @returns {Job}
 * @throws {ConfigError} for a document that is no job of this version, naming what is wrong
 */
export function readJob(document) {
  const { format, version, resume } = isObject(document) ? document : {};
  if (format !== FORMAT || version !== VERSION) {
    throw new ConfigError(
      `job: format ${repr(format)} version ${repr(version)}; this program reads ${repr(FORMAT)} version ${VERSION}`,
    );
  }
  for (const [kind, names] of Object.entries(MEMBERS)) {
    const [expected, check] = KINDS[kind];
    for (const name of names.split(" ")) {
      const path = name.replace("?", "");
      if (path.startsWith("resume.") && resume === null) continue;
      const value = member(document, path);
      if (check(value) || (value === null && path !== name)) continue;
      throw new ConfigError(
        `job: ${path} is ${repr(value, 80)}: expected ${expected}${path === name ? "" : ", or null"}`,
      );
    }
  }
  return /** @type {Job} */ (/** @type {unknown} */ (document));
}

/** @param {any} value @param {string} path of its members; the names of files have points of their own */
function member(value, path) {
  const [first, ...rest] = path.split(".");
  const names = first === "checkpointFiles" ? [first, rest.join(".")] : [first, ...rest];
  return names.reduce(
    (inner, name) => (isObject(inner) && Object.hasOwn(inner, name) ? inner[name] : undefined),
    value,
  );
}

/**
 * The job with another batch size, seed or length, and the fingerprint and hashes that follow.
 *
 * @param {Job} job
 * @param {Settings} config the job's, with other values there
 * @returns {Job}
 */
export function withConfig(job, config) {
  const { dataset, tokenizer, contract: agreed } = job.fingerprints;
  const { epochs: _, ...run } = { ...agreed.run, seed: config.run.seed };
  // The last step of a run in epochs may be partly empty, so going on with more of them is another trajectory.
  if (config.run.steps === null) Object.assign(run, { epochs: config.run.epochs });
  const contract = { ...agreed, data: { ...agreed.data, batchSize: config.data.batchSize }, run };
  const fingerprints = { dataset, tokenizer, contract };
  return { ...job, config, fingerprints, hashes: { ...job.hashes, ...identityHashes(fingerprints) } };
}

/**
 * Steps between two readbacks of metrics. Runs that judge every step read every step anyway.
 *
 * @param {Settings} config
 */
export function metricsInterval({ run, telemetry }) {
  return telemetry.alerts.failOnAlert ? 1 : Math.min(run.logEvery, MOST_STEPS_BETWEEN_READBACKS);
}
