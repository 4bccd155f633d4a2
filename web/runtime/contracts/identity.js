/** @file Identity hashes of the mirrored runner's checkpoints: what they cover, and which of them a resume compares. */

import { compareText } from "./names.js";
import { stableHash } from "./stable_json.js";
import { isInteger, isSet, objectOrEmpty, optionalText } from "./values.js";

export const COMPARED = [
  "configHash",
  "datasetHash",
  "tokenizerHash",
  "optimizerHash",
  "runtimePresetId",
  "kernelPathId",
];

/**
 * The six identity fields from run options and the `training` configuration; null for those that are not known.
 *
 * `optimizerHash` covers the optimizer's configuration and `optimizerStepCount`, as a resume expects it.
 *
 * @param {Record<string, unknown>} options
 * @param {Record<string, unknown>} training
 * @returns {Record<string, string | null>}
 */
export function checkpointIdentity(options, training) {
  const stages = [options.trainingStage, objectOrEmpty(training.distill).stage, objectOrEmpty(training.ul).stage];
  const dataset = {
    modelId: optionalText(options.modelId),
    modelUrl: optionalText(options.modelUrl),
    distillDatasetId: optionalText(options.distillDatasetId),
    distillDatasetPath: optionalText(options.distillDatasetPath),
    distillLanguagePair: optionalText(options.distillLanguagePair),
    distillSourceLangs: names(options.distillSourceLangs),
    distillTargetLangs: names(options.distillTargetLangs),
    distillPairAllowlist: names(options.distillPairAllowlist),
    strictPairContract: options.strictPairContract === true,
    distillShardIndex: integer(options.distillShardIndex),
    distillShardCount: integer(options.distillShardCount),
    trainingStage: optionalText(stages.find(isSet) ?? stages.at(-1)),
  };
  const optimizer = {
    optimizerConfig: isSet(training.optimizer) ? training.optimizer : null,
    stepCount: integer(options.optimizerStepCount),
  };
  return {
    configHash: stableHash(training),
    datasetHash: stableHash(dataset),
    tokenizerHash: optionalText(options.tokenizerHash),
    optimizerHash: stableHash(optimizer),
    runtimePresetId: optionalText(options.runtimePreset),
    kernelPathId: optionalText(options.kernelPathId),
  };
}

/**
 * The fields that a resume compares: those whose value is known.
 *
 * @param {Record<string, unknown>} identity
 * @returns {string[]}
 */
export function comparedFields(identity) {
  return COMPARED.filter((name) => identity[name] !== null && identity[name] !== undefined);
}

/**
 * Who asked for a forced resume: the given source, else command and surface, else the runner itself.
 *
 * @param {Record<string, unknown>} options
 * @returns {string | null}
 */
export function forceResumeSource(options) {
  const { command, surface } = options;
  const both = isSet(command) && isSet(surface) ? `${command}:${surface}` : null;
  return optionalText([options.forceResumeSource, both, command, "training_runner"].find(isSet));
}

/**
 * Trimmed and sorted; null when nothing is left.
 *
 * @param {unknown} value
 * @returns {string[] | null}
 */
function names(value) {
  if (!Array.isArray(value)) return null;
  const found = value.map(optionalText).filter((name) => name !== null);
  return found.length ? found.sort(dictionaryOrder) : null;
}

/**
 * As dictionaries sort language tags: punctuation, digits, letters; small before capital only to break ties.
 *
 * @param {string} first
 * @param {string} second
 * @returns {number}
 */
function dictionaryOrder(first, second) {
  const a = [...first];
  const b = [...second];
  for (let i = 0; i < Math.min(a.length, b.length); i++) {
    const difference = rank(a[i]) - rank(b[i]) || compareText(a[i].toLowerCase(), b[i].toLowerCase());
    if (difference) return difference;
  }
  return a.length - b.length || compareText(swapCase(first), swapCase(second));
}

/** @param {string} character @returns {number} */
function rank(character) {
  if (/\p{L}/u.test(character)) return 3;
  return /\p{Nd}/u.test(character) ? 2 : 1;
}

/** @param {string} text @returns {string} */
function swapCase(text) {
  return Array.from(text, (character) => {
    const upper = character.toUpperCase();
    return character === upper ? character.toLowerCase() : upper;
  }).join("");
}

/** @param {unknown} value @returns {number | null} */
function integer(value) {
  return isInteger(value) ? value : null;
}
