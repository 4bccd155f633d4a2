/** @file What `answer.js` can be asked about batches, sampling, states and plans: the host's part of a session. */

import { Buffer } from "node:buffer";

import { Batch } from "../../runtime/batch.js";
import { Plan } from "../../runtime/plan.js";
import { accessConflict, checkPlan } from "../../runtime/plan_check.js";
import { RowIndexer } from "../../runtime/row_index.js";
import { generate, SAMPLING_DEFAULTS, sampleToken, uniform } from "../../runtime/sampling.js";
import { checkState } from "../../runtime/state.js";
import { validateBatch } from "../../runtime/validate.js";

/** @type {Record<string, (one: any) => unknown>} */
export const SESSION_TASKS = {
  row_index: (values) => {
    const { order, starts, ids, count } = new RowIndexer(values.length).of(Uint32Array.from(values));
    return [[...order], [...starts], [...ids], count[0]];
  },
  validate_batch: ({ batch, vocabulary, context, shape }) => {
    const [ids, targets, positions, segmentIds, sampleIds] = [
      batch.ids,
      batch.targets,
      batch.positions,
      batch.segment_ids,
      batch.sample_ids,
    ].map((/** @type {number[]} */ values) => Uint32Array.from(values));
    const made = new Batch(batch.shape, { ids, targets, positions, segmentIds, sampleIds });
    validateBatch(made, vocabulary, context, shape);
    return made.targetTokens;
  },
  uniform: ({ seed, index }) => uniform(seed, index),
  sample_token: ({ logits, options, index }) =>
    sampleToken(Float32Array.from(logits), { ...SAMPLING_DEFAULTS, ...options }, index),
  generate: async ({ prompt, options, vocabulary, context }) => {
    // A model whose logits follow from the last id and its place: any mistake in what is fed to it shows.
    /** @param {number} id @param {number} position */
    const logits = (id, position) =>
      Float32Array.from({ length: vocabulary }, (_, next) => ((id * 7 + position * 5 + next * 3) % vocabulary) / 8);
    /** @type {unknown[]} */
    const calls = [];
    const model = {
      vocabularySize: vocabulary,
      contextLength: context,
      prefill: async (/** @type {readonly number[]} */ ids) => {
        calls.push([...ids]);
        return logits(ids[ids.length - 1], ids.length - 1);
      },
      decode: async (/** @type {number} */ id, /** @type {number} */ position) => {
        calls.push([id, position]);
        return logits(id, position);
      },
    };
    const tokens = [];
    for await (const token of generate(model, prompt, options)) tokens.push(token);
    return [tokens, calls];
  },
  check_state: ({ model, optimizer, step, shapes }) => {
    /** @param {Record<string, {shape: number[], values: (number | null)[]}>} tensors */
    const read = (tensors) =>
      Object.fromEntries(
        Object.entries(tensors).map(([name, { shape, values }]) => {
          const data = Float32Array.from(values, (value) => value ?? Number.NaN);
          return [name, { shape, data }];
        }),
      );
    checkState({ model: read(model), optimizer: read(optimizer), optimizerStep: step, scaler: {} }, shapes);
    return "fits";
  },
  access_conflict: ({ accesses, bindings }) => {
    const slices = bindings.map((/** @type {any[]} */ [arena, page, offset, size]) => ({ arena, page, offset, size }));
    return accessConflict(accesses, slices);
  },
  check_plan: async ({ document, constants, profile }) => {
    /** @type {[string, string][]} */
    const entries = Object.entries(constants);
    const data = entries.map(
      ([sha, text]) => /** @type {const} */ ([sha, new Uint8Array(Buffer.from(text, "base64"))]),
    );
    const plan = await Plan.from(document, data);
    checkPlan(plan, profile);
    return plan.hash;
  },
};
