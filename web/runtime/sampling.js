/**
 * @file From logits to token ids: the same choice on every backend, given the logits, the seed and the index of the
 * token.
 *
 * May import: errors, random, validate.
 */

import { ConfigError, NonFiniteError } from "./errors.js";
import { philox4x32 } from "./random/philox.js";
import { streamKey } from "./random/streams.js";
import { validatePrompt } from "./validate.js";

/**
 * Sampling settings. temperature 0 is greedy; topK 0 and topP 1 mean off.
 *
 * @typedef {object} GenerateOptions
 * @property {number} [tokens] 200
 * @property {number} [temperature] 0.8
 * @property {number} [topK] 0
 * @property {number} [topP] 1
 * @property {number} [seed] 1337
 * @property {readonly number[]} [stopIds] none
 */

/** @typedef {Required<GenerateOptions>} Settings */

/** @type {Readonly<Settings>} */
export const SAMPLING_DEFAULTS = Object.freeze({
  tokens: 200,
  temperature: 0.8,
  topK: 0,
  topP: 1,
  seed: 1337,
  stopIds: [],
});

/**
 * A float64 in [0, 1) with 53 random bits: stream "sample" of the seed, block `index`.
 *
 * @param {number} seed
 * @param {number} index
 */
export function uniform(seed, index) {
  const words = philox4x32([index >>> 0, Math.floor(index / 2 ** 32), 0, 0], streamKey(seed, "sample"));
  return ((words[0] >>> 5) * 2 ** 26 + (words[1] >>> 6)) / 2 ** 53;
}

/**
 * Ids and their probabilities after temperature, top-k and top-p, most likely first; equal logits in order of id.
 *
 * topK keeps the k most likely ids. topP then keeps the fewest of the most likely whose probabilities reach p (Holtzman
 * et al. 2019, "The Curious Case of Neural Text Degeneration", arXiv:1904.09751). What is left is normalised.
 * Temperature must be above 0 here.
 *
 * @param {Float32Array} logits
 * @param {Settings} settings
 * @returns {{ids: Uint32Array, weights: Float64Array}}
 */
export function probabilities(logits, settings) {
  let ids = Uint32Array.from(logits, (_, id) => id).sort((a, b) => logits[b] - logits[a] || a - b);
  if (settings.topK > 0) ids = ids.subarray(0, settings.topK);
  const highest = logits[ids[0]] / settings.temperature;
  let weights = Float64Array.from(ids, (id) => Math.exp(logits[id] / settings.temperature - highest));
  normalise(weights);
  if (settings.topP < 1) {
    const count = firstReaching(weights, (sum) => sum >= settings.topP) + 1;
    ids = ids.subarray(0, count);
    weights = weights.subarray(0, count);
    normalise(weights);
  }
  return { ids, weights };
}

/**
 * The id of generated token number `index` (from 0). temperature 0 takes the largest logit, the lowest id among equals.
 *
 * @param {Float32Array} logits
 * @param {Settings} settings
 * @param {number} index
 * @returns {number}
 */
export function sampleToken(logits, settings, index) {
  if (!logits.every(Number.isFinite)) {
    throw new NonFiniteError("the model's logits are not finite: it has diverged, and cannot be sampled from");
  }
  if (settings.temperature === 0) {
    let best = 0;
    for (let id = 1; id < logits.length; id++) if (logits[id] > logits[best]) best = id;
    return best;
  }
  const { ids, weights } = probabilities(logits, settings);
  const drawn = uniform(settings.seed, index);
  return ids[
    Math.min(
      firstReaching(weights, (sum) => sum > drawn),
      ids.length - 1,
    )
  ];
}

/**
 * Yield up to `tokens` ids that continue `prompt`, ending before one of `stopIds`.
 *
 * prefill(ids) fills the key/value caches from row 0 and gives the logits after the last id; decode(id, position)
 * appends one. A prompt longer than the context keeps its end; when the context is full, the last half of it is
 * prefilled again and generation goes on. Errors: DataContractError for an empty prompt or an id outside the
 * vocabulary; NonFiniteError for logits that are not finite; ConfigError for settings out of range.
 *
 * @param {object} model
 * @param {(ids: readonly number[]) => Promise<Float32Array>} model.prefill
 * @param {(id: number, position: number) => Promise<Float32Array>} model.decode
 * @param {number} model.vocabularySize
 * @param {number} model.contextLength
 * @param {readonly number[]} prompt
 * @param {GenerateOptions} options
 * @returns {AsyncGenerator<number, void, void>}
 */
export async function* generate({ prefill, decode, vocabularySize, contextLength }, prompt, options) {
  const settings = { ...SAMPLING_DEFAULTS, ...options };
  validatePrompt(prompt, vocabularySize);
  check(settings);
  let known = prompt.slice(-contextLength);
  let logits = await prefill(known);
  for (let index = 0; index < settings.tokens; index++) {
    const token = sampleToken(logits, settings, index);
    if (settings.stopIds.includes(token)) return;
    yield token;
    if (index + 1 === settings.tokens) return;
    if (known.length === contextLength) {
      known = [...known, token].slice(-Math.max(1, Math.floor(contextLength / 2)));
      logits = await prefill(known);
    } else {
      logits = await decode(token, known.length);
      known.push(token);
    }
  }
}

/** @param {Float64Array} weights */
function normalise(weights) {
  let sum = 0;
  for (const weight of weights) sum += weight;
  for (let i = 0; i < weights.length; i++) weights[i] /= sum;
}

/**
 * The first place where the sum of the weights so far is enough, or their number.
 *
 * @param {Float64Array} weights
 * @param {(sum: number) => boolean} enough
 */
function firstReaching(weights, enough) {
  let sum = 0;
  for (let i = 0; i < weights.length; i++) {
    sum += weights[i];
    if (enough(sum)) return i;
  }
  return weights.length;
}

/** @param {Settings} settings */
function check({ tokens, temperature, topK, topP }) {
  if (!(temperature >= 0 && topK >= 0 && topP > 0 && topP <= 1 && tokens >= 0)) {
    throw new ConfigError(
      `sampling with tokens ${tokens}, temperature ${temperature}, top_k ${topK}, top_p ${topP}: expected the first three ` +
        "to be at least 0, and top_p above 0 and at most 1",
    );
  }
}
