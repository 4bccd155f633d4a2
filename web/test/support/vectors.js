/** @file Reads the golden vectors of `bridge/vectors/`, and makes facts for metrics entries. */

import { readdirSync, readFileSync } from "node:fs";

import { resolveTelemetry, Telemetry } from "../../runtime/contracts/telemetry.js";

const FOLDER = new URL("../../../bridge/vectors/", import.meta.url);

/**
 * The parsed file `<name>.json`. Numbers beyond float64 (1e400) arrive as Infinity, as the vectors intend.
 *
 * @param {string} name
 * @returns {any}
 */
export function load(name) {
  return JSON.parse(readFileSync(new URL(`${name}.json`, FOLDER), "utf8"));
}

/** @returns {string[]} the names of all files of vectors */
export function names() {
  return readdirSync(FOLDER)
    .filter((name) => name.endsWith(".json"))
    .map((name) => name.slice(0, -".json".length));
}

/** @type {import("../../runtime/contracts/metrics.js").RunFacts} */
export const RUN = {
  objective: "cross_entropy",
  seed: 1337,
  modelId: "tiny",
  environmentMetadata: { runtime: "browser" },
  totalParamCount: 1000,
  trainableParamCount: 1000,
  trainableGroups: ["decay", "no_decay"],
  runtimePreset: "stdlib-tiny",
  kernelPath: "browser/f32",
  buildProvenance: { commitHash: null, buildId: null, buildTimestamp: null },
};

/** @type {import("../../runtime/contracts/metrics.js").StepFacts} a usual step: clipped to half its norm, not overflowed */
export const STEP = {
  step: 1,
  epoch: 0,
  batch: 1,
  totalLoss: 2.5,
  stepTimeMs: 12,
  forwardMs: 4,
  backwardMs: 6,
  optimizerMs: 1,
  timingSource: "device",
  lr: 1e-3,
  schedulerIndex: 0,
  schedulerPhase: "constant",
  gradNorm: 2,
  clipFactor: 0.5,
  lossScale: 1,
  overflow: false,
  nanCount: 0,
  infCount: 0,
  optimizerStep: 1,
  targetTokens: 250,
  ignoredTargets: 6,
};

/**
 * @param {Record<string, unknown>} [settings]
 * @returns {Telemetry}
 */
export function telemetry(settings = {}) {
  return new Telemetry(resolveTelemetry(settings));
}
