/**
 * @file What a run says about itself when it begins, or goes on: for its record, and for whoever watches.
 *
 * May import: nothing.
 */

/** @import { TrainingSession } from "./training_runner.js" */
/** @import { Job } from "./job.js" */
/** @import { Facts } from "./place.js" */

/** The checkpoint that a run goes on from. @typedef {{path: string, checkpointHash: string, step: number}} ResumedFrom */

/**
 * @param {Job} job
 * @param {ResumedFrom | null} resumedFrom
 * @returns {Facts}
 */
export function runRecord({ config, runId, steps, fingerprints, hashes, parameters, provenance }, resumedFrom) {
  const { configHash, datasetHash, tokenizerHash } = hashes;
  return {
    ...{ status: "running", message: "", runId, name: config.run.name, steps, resumedFrom, config, fingerprints },
    ...{ hashes: { configHash, datasetHash, tokenizerHash }, parameters, provenance },
  };
}

/**
 * The `run` event.
 *
 * @param {Job} job
 * @param {ResumedFrom | null} resumedFrom
 * @param {TrainingSession} session
 * @param {{runDir: string, step: number, trainTokens: number}} where
 * @returns {Facts}
 */
export function runFacts({ config, runId, steps, parameters }, resumedFrom, session, where) {
  const { backend, gpuAdapter } = session.describe();
  return {
    ...{ name: config.run.name, runId, steps, backend, adapter: gpuAdapter?.name ?? null },
    ...{ precision: config.precision.type, parameters, memory: session.memory(), resumedFrom },
    tokensPerStep: config.data.batchSize * config.data.sequenceLength,
    ...where,
  };
}
