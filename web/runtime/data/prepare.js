/**
 * @file From a token store and the `data` section of a configuration to samples: the second half of Python's
 * `data/prepare.py`. May import: errors, contracts, folders, tokenizers.
 */

import { PackedDataset } from "./packing.js";
import { splitRule } from "./split.js";
import { TokenStore } from "./store.js";
import { WindowDataset } from "./windows.js";

/** @import { Folder } from "../folders/folder.js" */
/** @import { Tokenizer } from "../tokenizers/tokenizer.js" */
/** @import { SampleSet } from "./samples.js" */
/** @import { TokenView } from "./split.js" */
/** @import { Watched } from "./store.js" */

/**
 * @typedef {object} DataSettings what is read of `config.data`
 * @property {number} sequenceLength
 * @property {{by: "document" | "share", validationShare: number}} split
 * @property {{mode: "windows" | "packed", stride: number | null, isolateDocuments: boolean}} samples
 */

/**
 * What a run trains on.
 *
 * @typedef {object} PreparedData
 * @property {TokenStore} store
 * @property {Tokenizer} tokenizer
 * @property {SampleSet} train
 * @property {SampleSet | null} validation null when nothing is held out
 * @property {string} fingerprint of the training samples, wherever they came from
 */

/**
 * @param {Folder | null} folder of the token store
 * @param {DataSettings} data
 * @param {Watched & {verify?: boolean}} [options] verify: hash the whole store first
 * @returns {Promise<PreparedData>}
 * @throws {DataContractError} for the data
 * @throws {ConfigError} for the settings
 * @throws {StopRequested}
 */
export async function prepareData(folder, data, { verify = true, ...watched } = {}) {
  const store = await TokenStore.open(folder);
  if (verify) await store.verify(watched);
  const tokenizer = await store.tokenizer();
  // The split does not depend on the run's seed: runs with different seeds share their validation.
  const { by, validationShare } = data.split;
  const rule = splitRule({ by, validationShare });
  // Without a stride, whatever training has: each target of the validation text counts once.
  const validation = validationShare > 0 ? makeSamples(store.split("validation", rule), data, null) : null;
  const train = makeSamples(store.split("train", rule), data, data.samples.stride);
  return { store, tokenizer, train, validation, fingerprint: train.fingerprint };
}

/**
 * @param {TokenView} view
 * @param {DataSettings} data
 * @param {number | null} stride
 * @returns {SampleSet}
 */
function makeSamples(view, { sequenceLength, samples }, stride) {
  if (samples.mode === "packed") return new PackedDataset(view, sequenceLength);
  return new WindowDataset(view, sequenceLength, { stride, isolateDocuments: samples.isolateDocuments });
}
