/**
 * @file What a run does beside its steps: validation and samples. Neither touches the training state.
 *
 * May import: errors, data, step_result.
 */

import { evaluationBatches } from "../data/loader.js";
import { DataContractError } from "../errors.js";
import { FLOAT32_MAX } from "../step_result.js";

/** @import { SampleSet } from "../data/samples.js" */
/** @import { Tokenizer } from "../tokenizers/tokenizer.js" */
/** @import { TrainingSession } from "./training_runner.js" */

const LARGEST_EXPONENT = 20; // a perplexity beyond exp(20) says nothing

/**
 * Loss summed over all targets and divided once, in nats a token. With `overflow` where a value did not fit its number
 * format: then the loss is not that of the model (and the largest float32 in place of one that is not finite).
 *
 * @param {TrainingSession} session
 * @param {SampleSet} samples
 * @param {number} batchSize
 * @param {number} batches spread over the samples; 0 for all of them
 * @param {() => unknown} stopRequested
 * @returns {Promise<{loss: number, perplexity: number, targetTokens: number, overflow?: true} | null>} null when a stop
 *   was requested meanwhile
 */
export async function evaluate(session, samples, batchSize, batches, stopRequested) {
  let loss = 0;
  let targetTokens = 0;
  let overflow = false;
  for await (const batch of evaluationBatches(samples, batchSize, batches || null)) {
    if (stopRequested()) return null;
    if (!batch.targetTokens) continue;
    const result = await session.evaluate(batch);
    loss += result.lossSum;
    targetTokens += result.targetTokens;
    overflow ||= result.overflow;
  }
  if (!targetTokens) {
    throw new DataContractError(
      "the validation batches have no target at all: raise evaluation.batches, or hold out more text",
    );
  }
  let mean = loss / targetTokens;
  if (!Number.isFinite(mean)) {
    mean = FLOAT32_MAX;
    overflow = true;
  }
  const row = { loss: mean, perplexity: Math.exp(Math.min(mean, LARGEST_EXPONENT)), targetTokens };
  return overflow ? { ...row, overflow } : row;
}

/**
 * The ids of a prompt. An empty one is the end of a text, or a line, where the tokenizer has no such id.
 *
 * @param {Tokenizer} tokenizer
 * @param {string} prompt
 * @returns {number[]}
 * @throws {DataContractError} for a character that the tokenizer does not know
 */
export function promptIds(tokenizer, prompt) {
  const ids = [...tokenizer.encode(prompt)];
  return ids.length ? ids : [tokenizer.endOfText ?? tokenizer.encode("\n")[0]];
}

/**
 * The text that continues `settings.prompt`.
 *
 * @param {TrainingSession} session
 * @param {Tokenizer} tokenizer
 * @param {Record<string, any>} settings the section `sampling` of the configuration
 * @param {() => unknown} stopRequested
 * @returns {Promise<string | null>} null when a stop is requested before its end: a part of it would look like all that the
 *   model has to say
 */
export async function sample(session, tokenizer, settings, stopRequested) {
  const { prompt, tokens, temperature, topK, topP, seed } = settings;
  const stopIds = tokenizer.endOfText === null ? [] : [tokenizer.endOfText];
  /** @type {number[]} */
  const ids = [];
  const options = { tokens, temperature, topK, topP, seed, stopIds };
  for await (const id of session.generate(promptIds(tokenizer, prompt), options)) {
    if (stopRequested()) return null;
    ids.push(id);
  }
  return tokenizer.decode(ids);
}
