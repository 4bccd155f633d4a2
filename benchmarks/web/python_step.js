/** @file A training step that Python in the tab drives, beside the same step that JavaScript drives alone. */

import { PythonWorker } from "../../web/pyodide/client.js";
import { Batch } from "../../web/runtime/batch.js";
import { openDevice } from "../../web/runtime/device.js";
import { loadPlan } from "../../web/runtime/plan.js";
import { PlanSession } from "../../web/runtime/session.js";
import { deviceProfile } from "../../web/runtime/subgroups.js";

import { BATCH, batch, HEADS, LAYERS, TIME, VOCABULARY, WIDTH } from "./model.js";

const MODEL = {
  ...{ vocabulary_size: VOCABULARY, context_length: TIME, layers: LAYERS, width: WIDTH, heads: HEADS },
  ...{ feed_forward_width: 4 * WIDTH, activation: "gelu", positions: "learned", tied_embeddings: true },
};
const REQUEST = { model: MODEL, batchSize: BATCH, sequenceLength: TIME, optimizer: { type: "adamw", lr: 1e-3 } };
const WARM = 2;

/** @param {number} steps */
const script = (steps) => `
from time import perf_counter
import hybrid_tab as tab
from hybrid.models.config import ModelConfig
from hybrid.optim.settings import OptimizerSettings
from hybrid.plan.compiler import PlanSettings

model = ModelConfig.from_dict(${JSON.stringify(MODEL).replaceAll("true", "True")})
settings = PlanSettings(model, ${BATCH}, ${TIME}, optimizer=OptimizerSettings(type="adamw", lr=1e-3))
session = await tab.open(await tab.compile(settings))
text = bytes(i * i % 251 for i in range(20000))
for batch in tab.byte_batches(text, batch_size=${BATCH}, sequence_length=${TIME}, steps=${steps + WARM}):
    began = perf_counter()
    await session.step([batch])
    (result,) = await session.results(wait=True)
    tab.report(seconds=perf_counter() - began)
`;

const open = () => PythonWorker.open(() => new Worker("/bundle/worker.js", { type: "module" }));

/** Seconds from nothing to the first plan, and to the next one. */
export async function firstPlan() {
  const device = await openDevice();
  const profile = await deviceProfile(device);
  device.destroy();
  const began = performance.now();
  const python = await open();
  await python.compilePlan(REQUEST, profile);
  const first = performance.now();
  await python.compilePlan(REQUEST, profile);
  const next = performance.now();
  python.close();
  return { first_plan_s: (first - began) / 1e3, next_plan_s: (next - first) / 1e3 };
}

/**
 * Seconds of warm steps, in turns.
 *
 * @param {number} rounds
 * @param {number} steps
 */
export async function measure(rounds, steps) {
  const python = await open();
  const device = await openDevice();
  const folder = await python.compilePlan(REQUEST, await deviceProfile(device));
  const plan = await loadPlan((name) => folder.read(name));
  /** @type {Record<"javascript" | "python", number[]>} */
  const seconds = { javascript: [], python: [] };
  for (let round = 0; round < rounds; round++) {
    const alone = await byJavaScript(plan, device, steps + WARM);
    /** @type {number[]} */
    const driven = [];
    await python.runScript(script(steps), { report: (values) => driven.push(Number(values.seconds)) });
    seconds.javascript.push(...alone.slice(WARM));
    seconds.python.push(...driven.slice(WARM));
  }
  return seconds;
}

/** @param {import("../../web/runtime/plan.js").Plan} plan @param {import("../../web/runtime/device.js").Device} device @param {number} steps */
async function byJavaScript(plan, device, steps) {
  const session = await PlanSession.create(plan, { device });
  const { ids, targets } = batch();
  const input = new Batch([BATCH, TIME], {
    ids: new Uint32Array(ids),
    targets: new Uint32Array(targets),
    positions: Uint32Array.from(ids, (_, i) => i % TIME),
    segmentIds: new Uint32Array(BATCH * TIME).fill(1),
    sampleIds: Uint32Array.from({ length: BATCH }, (_, row) => row),
  });
  const seconds = [];
  for (let dataStep = 1; dataStep <= steps; dataStep++) {
    const began = performance.now();
    await session.begin({ dataStep, targetTokens: BATCH * TIME, microbatches: 1 });
    await session.accumulate(input);
    await session.apply();
    await session.pollMetrics({ wait: true });
    seconds.push((performance.now() - began) / 1e3);
  }
  session.close();
  return seconds;
}
