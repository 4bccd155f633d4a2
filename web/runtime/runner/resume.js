/**
 * @file May this run go on, and from where? Which checkpoint it starts from, whether that one promises the same
 * trajectory, and whether a run can have come to its state at all.
 *
 * Messages are those of Python's `training/saved_run.py` and `checkpoint/resume.py`. May import: errors, contracts,
 * data, checkpoint.
 */

import { readManifest } from "../checkpoint/loading.js";
import { CONFIG_FILE, MANIFEST_NAME } from "../checkpoint/manifest.js";
import { differences, requireAgreement } from "../contracts/fingerprint.js";
import { repr } from "../contracts/names.js";
import { stableJson } from "../contracts/stable_json.js";
import { isInteger, isObject, isoTime, objectOrEmpty } from "../contracts/values.js";
import { BatchPlan } from "../data/loader.js";
import { CheckpointCorrupt, CheckpointNotFound, HybridError } from "../errors.js";

/** @import { Manifest } from "../checkpoint/manifest.js" */
/** @import { Folder } from "../folders/folder.js" */
/** @import { Fingerprints, Job, Settings } from "./job.js" */
/** @import { Force } from "./options.js" */
/** @import { RunPlace } from "./place.js" */

/**
 * The checkpoint that a run goes on from.
 *
 * @typedef {object} Start
 * @property {string} name of its folder
 * @property {Folder} folder
 * @property {Manifest} manifest
 */

/**
 * Where the run starts; null at step 0.
 *
 * @param {RunPlace} place
 * @param {string | null} [name] of a checkpoint, instead of the newest
 * @returns {Promise<Start | null>}
 * @throws {CheckpointNotFound} for a named checkpoint that is not there
 * @throws {CheckpointCorrupt} for one that cannot be read, or contradicts itself
 */
export async function findStart(place, name) {
  const found = name ?? (await place.checkpoints.latest())?.name;
  if (found === undefined) return null;
  const folder = await named(place, found, name === found);
  const manifest = await readManifest(folder);
  checkPlace(folder.name, manifest);
  return { name: found, folder, manifest };
}

/**
 * @param {RunPlace} place
 * @param {string} name
 * @param {boolean} asked whether somebody named it
 */
async function named(place, name, asked) {
  try {
    return await place.checkpoints.open(name);
  } catch (error) {
    if (asked && error instanceof HybridError && !(error instanceof CheckpointCorrupt)) {
      throw new CheckpointNotFound(`TrainingRunner: resume checkpoint not found or invalid: ${name}`, { cause: error });
    }
    throw error;
  }
}

/**
 * The audit records of a run that goes on from `saved`: those of the checkpoint, of the changes that the job has accepted,
 * and of those that `force` accepts.
 *
 * @param {Pick<Manifest, "fingerprints" | "resumeAudits">} saved
 * @param {Job} job
 * @param {Force | null} force
 * @param {() => number} now milliseconds since 1970
 * @returns {Record<string, unknown>[]}
 * @throws {ContractMismatch} with a table of what differs and is not accepted
 */
export function agree(saved, job, force, now) {
  const before = documents(saved.fingerprints);
  const current = documents(job.fingerprints);
  const found = differences(before, current);
  /** @param {readonly unknown[]} values */
  const text = (values) => stableJson(values);
  const known = new Set(job.resumeAudits.map((audit) => text([audit.field, audit.saved, audit.current])));
  const settled = found.filter((difference) => known.has(text(difference))).map(([field]) => field);
  const forced = force ? found.filter(([field]) => !settled.includes(field)) : [];
  requireAgreement(before, current, [...settled, ...forced.map(([field]) => field)]);
  const audits = [...saved.resumeAudits, ...job.resumeAudits];
  const timestamp = isoTime(now());
  for (const [field, old, value] of forced) audits.push({ field, saved: old, current: value, timestamp, ...force });
  return [...new Map(audits.map((audit) => [stableJson(audit), audit])).values()];
}

/** @param {Fingerprints} fingerprints @returns {Record<string, unknown>} */
function documents({ dataset, tokenizer, contract: agreed }) {
  return { dataset, tokenizer, contract: agreed };
}

/**
 * Hashes prove that nothing changed since the checkpoint was made; they hold for any content. So cursor, totals, seed and
 * optimizer step must be those of a run that did so many steps.
 *
 * @param {string} folder for messages
 * @param {Manifest} manifest
 * @throws {CheckpointCorrupt}
 */
export function checkPlace(folder, manifest) {
  /** @param {string} name @param {unknown} value @param {string} expected */
  const wrong = (name, value, expected) =>
    new CheckpointCorrupt(`${folder}/${MANIFEST_NAME}: ${name} is ${repr(value, 200)}: ${expected}`);
  const config = savedSettings(manifest, wrong);
  const { progress, dataCursor, lossScaler } = manifest;
  const { run, data } = config;
  const { samples } = manifest.fingerprints.dataset;
  if (!isInteger(samples) || samples < 1) {
    throw wrong("fingerprints.dataset.samples", samples, "expected a whole number of at least 1");
  }
  const limit = run.steps === null ? run.epochs * samples : null;
  const plan = new BatchPlan({ size: samples, globalBatch: data.batchSize, seed: run.seed, limit });
  const place = plan.cursor(progress.step);
  if (stableJson(dataCursor) !== stableJson(place)) {
    throw wrong("dataCursor", dataCursor, `after step ${progress.step} the data stands at ${repr({ ...place })}`);
  }
  const expected = {
    epoch: place.epoch,
    batch: Math.floor(place.position / data.batchSize),
    samples: place.samples,
    tokens: place.samples * data.sequenceLength,
  };
  for (const [name, value] of Object.entries(expected)) {
    const saved = /** @type {Record<string, number>} */ (/** @type {unknown} */ (progress))[name];
    if (saved !== value) throw wrong(`progress.${name}`, saved, `after step ${progress.step} it is ${value}`);
  }
  if (progress.targetTokens > progress.tokens && !manifest.resumeAudits.length) {
    throw wrong("progress.targetTokens", progress.targetTokens, `there were ${progress.tokens} tokens`);
  }
  if (manifest.optimizerStep > progress.step) {
    throw wrong("optimizerStep", manifest.optimizerStep, `expected at most the step, ${progress.step}`);
  }
  if (manifest.seed !== run.seed) throw wrong("seed", manifest.seed, `config.run.seed is ${run.seed}`);
  const counter = lossScaler.growthCounter;
  if (isInteger(counter) && counter > progress.step) {
    throw wrong("lossScaler.growthCounter", counter, `expected at most the step, ${progress.step}`);
  }
  if (config.lossScaling.enabled && !Object.keys(lossScaler).length) {
    throw wrong("lossScaler", lossScaler, "loss scaling is on, and its scale would start anew");
  }
}

/**
 * The settings of a manifest, as far as this page reads them: of the right kinds, and in agreement with the contract.
 *
 * @param {Manifest} manifest
 * @param {(name: string, value: unknown, expected: string) => CheckpointCorrupt} wrong
 * @returns {Settings}
 */
function savedSettings({ config, fingerprints }, wrong) {
  /** @type {[section: string, key: string, least: number][]} */
  const counts = [
    ["data", "batchSize", 1],
    ["data", "sequenceLength", 1],
    ["run", "seed", 0],
    ["run", "epochs", 1],
  ];
  for (const [section, key, least] of counts) {
    const value = objectOrEmpty(config[section])[key];
    if (!isInteger(value) || value < least) {
      throw wrong(`config.${section}.${key}`, value, `expected a whole number of at least ${least}`);
    }
  }
  if (!isObject(config.lossScaling)) throw wrong("config.lossScaling", config.lossScaling, "expected an object");
  const own = new Map(leaves(config));
  for (const [path, value] of leaves(fingerprints.contract)) {
    if (own.has(path) && stableJson(own.get(path)) !== stableJson(value)) {
      throw wrong(`config.${path}`, own.get(path), `fingerprints.contract has ${repr(value, 80)}`);
    }
  }
  return /** @type {Settings} */ (config);
}

/**
 * CheckpointCorrupt unless config.json, which other programs read, describes the model of the job.
 *
 * @param {string} folder for messages
 * @param {string} theirs the checkpoint's config.json
 * @param {string} ours the job's
 */
export function checkModel(folder, theirs, ours) {
  const expected = objectOrEmpty(JSON.parse(ours).hybrid);
  const found = objectOrEmpty(objectOrEmpty(JSON.parse(theirs)).hybrid);
  for (const name of new Set([...Object.keys(found), ...Object.keys(expected)])) {
    if (stableJson(found[name]) === stableJson(expected[name])) continue;
    throw new CheckpointCorrupt(
      `${folder}/${CONFIG_FILE}: hybrid.${name} is ${repr(found[name], 80)}, but the settings of the run in ` +
        `${MANIFEST_NAME} have ${repr(expected[name], 80)}`,
    );
  }
}

/**
 * @param {Record<string, unknown>} settings
 * @param {string} [prefix]
 * @returns {Generator<[path: string, value: unknown], void, void>}
 */
function* leaves(settings, prefix = "") {
  for (const [key, value] of Object.entries(settings)) {
    if (isObject(value)) yield* leaves(value, `${prefix}${key}.`);
    else yield [prefix + key, value];
  }
}
