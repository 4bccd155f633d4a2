/** @file A tiny model's state to save, and a state read from a checkpoint, as snapshots. */

import { loadCheckpoint } from "../../runtime/checkpoint/loading.js";

/** @import { Snapshot } from "../../runtime/checkpoint/snapshot.js" */
/** @import { Folder } from "../../runtime/folders/folder.js" */
/** @import { SessionState, StateTensor } from "../../runtime/state.js" */

const MODEL = {
  ...{ vocabulary_size: 5, context_length: 4, layers: 1, width: 2, heads: 1, feed_forward_width: 2 },
  tied_embeddings: true,
};
/** @type {Record<string, number[]>} */
export const SHAPES = {
  "model.embed_tokens.weight": [5, 2],
  "model.layers.0.input_layernorm.weight": [2],
  "model.layers.0.self_attn.q_proj.weight": [2, 2],
  "model.layers.0.self_attn.k_proj.weight": [2, 2],
  "model.layers.0.self_attn.v_proj.weight": [2, 2],
  "model.layers.0.self_attn.o_proj.weight": [2, 2],
  "model.layers.0.post_attention_layernorm.weight": [2],
  "model.layers.0.mlp.gate_proj.weight": [2, 2],
  "model.layers.0.mlp.up_proj.weight": [2, 2],
  "model.layers.0.mlp.down_proj.weight": [2, 2],
  "model.norm.weight": [2],
};

/**
 * The state of a run at a step; `seed` (by default the step) decides its numbers.
 *
 * @param {number} step
 * @param {number} [seed]
 * @param {Partial<Snapshot>} [changes]
 * @returns {Snapshot}
 */
export function snapshot(step, seed = step, changes = {}) {
  let count = 0;
  /** @param {string} prefix @returns {Record<string, StateTensor>} */
  const tensors = (prefix) =>
    Object.fromEntries(
      Object.entries(SHAPES).map(([name, shape]) => {
        const size = shape.reduce((product, extent) => product * extent, 1);
        return [
          prefix + name,
          { shape, data: Float32Array.from({ length: size }, () => Math.sin(seed * 97 + count++)) },
        ];
      }),
    );
  return {
    state: {
      model: tensors(""),
      optimizer: { ...tensors("moment1/"), ...tensors("moment2/") },
      optimizerStep: step,
      scaler: { scale: 1024, growthCounter: 3 },
    },
    progress: { step, epoch: 0, batch: step, samples: 4 * step, tokens: 32 * step, targetTokens: 31 * step },
    config: { model: { width: 2 } },
    seed: 1337,
    runId: "run-a",
    scaler: { scale: 1024, growthCounter: 3 },
    cursor: { sample: 4 * step },
    hashes: {
      configHash: "c".repeat(64),
      datasetHash: null,
      tokenizerHash: null,
      optimizerHash: null,
      runtimePresetId: null,
      kernelPathId: "wgsl-f32",
    },
    fingerprints: { dataset: { samples: 9 }, tokenizer: { kind: "bytes" }, contract: { seed: 1337 } },
    environment: { runtime: "browser" },
    provenance: null,
    session: { elapsedMs: 12.5 },
    resumeAudits: [],
    files: { "config.json": `${JSON.stringify({ hybrid: MODEL })}\n`, "generation_config.json": "{}\n" },
    ...changes,
  };
}

/**
 * What a runtime that goes on from a checkpoint would save at once.
 *
 * @param {Folder} folder
 * @returns {Promise<Snapshot>}
 */
export async function snapshotOf(folder) {
  const { manifest, state, files } = await loadCheckpoint(folder);
  const { progress, config, seed, hashes, fingerprints, environment, provenance, session, resumeAudits } = manifest;
  const same = { progress, config, seed, hashes, fingerprints, environment, provenance, session, resumeAudits };
  const { lineage, lossScaler: scaler, dataCursor: cursor } = manifest;
  return { ...same, state, runId: lineage.runId, scaler, cursor, files };
}

/**
 * A session that only holds a state, for tests of what is written into it.
 *
 * @param {Record<string, readonly number[]>} shapes
 * @param {boolean} [trains]
 */
export function holdingSession(shapes, trains = true) {
  /** @type {Record<string, Float32Array>} */
  const written = {};
  /** @type {unknown} */
  let progress = null;
  return {
    plan: { trains },
    shapes: () => shapes,
    written,
    progress: () => progress,
    /** @type {import("../../runtime/checkpoint/loading.js").Restorable["restore"]} */
    restore: async (given, fill) => {
      await fill((name, values) => {
        written[name] = Float32Array.from(/** @type {Float32Array} */ (values));
      });
      progress = given;
    },
  };
}

/** @param {SessionState} state @returns {Record<string, number[]>} */
export function numbers({ model, optimizer }) {
  return Object.fromEntries(Object.entries({ ...model, ...optimizer }).map(([name, { data }]) => [name, [...data]]));
}
