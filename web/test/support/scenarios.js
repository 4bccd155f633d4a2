/**
 * @file What a session must do, as functions that run anywhere: in Node, in Deno, on a page, in a worker.
 *
 * Each takes where WebGPU and the fixtures come from (`tests/browser/plan_fixtures.py` writes those) and returns plain
 * JSON for the caller to judge.
 */

import { Batch } from "../../runtime/batch.js";
import { openDevice } from "../../runtime/device.js";
import { describe } from "../../runtime/errors.js";
import { Executor } from "../../runtime/executor.js";
import { loadPlan } from "../../runtime/plan.js";
import { PlanSession } from "../../runtime/session.js";
import { Sha256 } from "../../runtime/sha256.js";
import { memoryStorage } from "../../runtime/storage.js";
import { deviceProfile, subgroupDirective } from "../../runtime/subgroups.js";
import { representatives } from "../../runtime/variants.js";

/** @import {Device} from "../../runtime/device.js" */
/** @import {Plan} from "../../runtime/plan.js" */
/** @import {SessionOptions} from "../../runtime/session.js" */
/** @import {SessionState} from "../../runtime/state.js" */

/**
 * @typedef {object} Host
 * @property {GPU | null} gpu null: `navigator.gpu`
 * @property {(name: string) => Promise<Uint8Array<ArrayBuffer>>} read a file of the fixtures
 */

/**
 * @typedef {object} Run
 * @property {number} seed
 * @property {string} precision
 * @property {{targetTokens: number, zLoss: number, batches: Record<string, number[]>[]}[]} steps
 * @property {Record<string, any>[]} results
 * @property {string} initialSha256
 * @property {Record<string, number[]>} model weights after the last step
 * @property {{lossSum: number, targetTokens: number}} [evaluation]
 * @property {number[]} [prompt]
 * @property {number[]} [greedy]
 * @property {number[]} [sampled]
 */

/**
 * A fixture on an open device.
 *
 * @typedef {object} Bench
 * @property {Device} device
 * @property {Plan} plan
 * @property {Run} run
 * @property {(options?: Partial<SessionOptions>) => Promise<PlanSession>} open
 */

/**
 * @template T
 * @param {Host} host
 * @param {string} name
 * @param {(bench: Bench) => Promise<T>} work
 * @param {readonly string[]} [features] to ask for, instead of the usual ones
 * @returns {Promise<T>}
 */
async function withFixture(host, name, work, features) {
  const device = await openDevice({ gpu: host.gpu, features });
  try {
    const plan = await loadPlan((file) => host.read(`${name}/${file}`));
    const run = /** @type {Run} */ (JSON.parse(new TextDecoder().decode(await host.read(`${name}/run.json`))));
    const open = (/** @type {Partial<SessionOptions>} */ options = {}) =>
      PlanSession.create(plan, { device, seed: run.seed, variants: {}, ...options });
    return await work({ device, plan, run, open });
  } finally {
    device.destroy();
  }
}

/**
 * The steps first .. last of the fixture (1-based; beyond its end, its steps again).
 *
 * @param {PlanSession} session
 * @param {Run} run
 * @param {number} first
 * @param {number} last
 */
async function train(session, run, first, last) {
  for (let dataStep = first; dataStep <= last; dataStep++) {
    const step = run.steps[(dataStep - 1) % run.steps.length];
    const { targetTokens, zLoss } = step;
    await session.begin({ dataStep, targetTokens, microbatches: step.batches.length, zLoss });
    for (const arrays of step.batches) await session.accumulate(batchOf(session, arrays));
    await session.apply();
  }
}

/**
 * @param {PlanSession} session
 * @param {Record<string, number[]>} arrays
 */
function batchOf(session, arrays) {
  const [ids, targets, positions, segmentIds, sampleIds] = [
    arrays.ids,
    arrays.targets,
    arrays.positions,
    arrays.segmentIds,
    arrays.sampleIds,
  ].map((list) => Uint32Array.from(list));
  return new Batch([session.plan.shape.B, session.plan.shape.T], { ids, targets, positions, segmentIds, sampleIds });
}

/** @param {Float32Array<ArrayBuffer>} data */
function bytesOf(data) {
  return new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
}

/**
 * One hash of everything in a state.
 *
 * @param {SessionState} state
 */
function hashOf(state) {
  const hash = new Sha256();
  for (const tensors of [state.model, state.optimizer]) {
    for (const name of Object.keys(tensors).sort()) hash.update(bytesOf(tensors[name].data));
  }
  hash.update(new TextEncoder().encode(JSON.stringify([state.optimizerStep, state.scaler])));
  return hash.hex();
}

/**
 * Ten steps of a fixture: results, the hash of the initial weights, and the weights after.
 *
 * @param {Host} host
 * @param {string} name
 * @param {Partial<SessionOptions>} [options]
 */
export function trainFixture(host, name, options) {
  return withFixture(host, name, async ({ run, open, plan }) => {
    const session = await open(options);
    const before = await session.exportState();
    const initial = new Sha256();
    for (const parameter of plan.parameterNames()) {
      initial.update(bytesOf(before.model[parameter].data));
    }
    await train(session, run, 1, run.steps.length);
    const results = await session.pollMetrics({ wait: true });
    const after = await session.exportState();
    const model = Object.fromEntries(Object.entries(after.model).map(([key, { data }]) => [key, Array.from(data)]));
    const start = Object.fromEntries(Object.entries(before.model).map(([key, { data }]) => [key, Array.from(data)]));
    const report = { results, initialSha256: initial.hex(), start, model, stateHash: hashOf(after) };
    const about = { describe: session.describe(), memory: session.memory(), counters: session.counters() };
    session.close();
    return { ...report, ...about, expected: run };
  });
}

/**
 * The same six steps in one piece, again, with a stop and an export in between, with results read seldom, and with work
 * submitted in the smallest pieces.
 *
 * @param {Host} host
 * @param {string} name
 */
export function repeatFixture(host, name) {
  return withFixture(host, name, async ({ run, open }) => {
    const first = await open();
    const second = await open({ metricsInterval: 4, submitSeconds: 0 });
    /** @param {PlanSession} session @param {number} from */
    const finish = async (session, from) => {
      await train(session, run, from, 6);
      return hashOf(await session.exportState());
    };
    const straight = await finish(first, 1);
    await first.reset();
    const again = await finish(first, 1);
    const otherSettings = await finish(second, 1);
    await first.reset();
    await train(first, run, 1, 2);
    await second.importState(await first.exportState());
    await train(second, run, 3, 5);
    await first.importState(await second.exportState());
    const relayed = await finish(first, 6);
    first.close();
    second.close();
    return { straight, again, otherSettings, relayed };
  });
}

/**
 * What many warm steps create, and how results arrive.
 *
 * @param {Host} host
 * @param {string} name
 * @param {number} steps
 */
export function countFixture(host, name, steps) {
  return withFixture(host, name, async ({ run, open }) => {
    const session = await open({ metricsInterval: 4 });
    const batches = run.steps.map((step) => batchOf(session, step.batches[0]));
    /** @param {number} dataStep */
    const step = async (dataStep) => {
      const batch = batches[dataStep % batches.length];
      await session.begin({ dataStep, targetTokens: batch.targetTokens, microbatches: 1 });
      await session.accumulate(batch);
      await session.apply();
    };
    for (let warm = 1; warm <= 8; warm++) await step(warm);
    await session.pollMetrics({ wait: true });
    const before = session.counters();
    let arrivedEarly = 0;
    for (let dataStep = 9; dataStep < 9 + steps; dataStep++) {
      await step(dataStep);
      arrivedEarly += (await session.pollMetrics()).length;
    }
    const rest = await session.pollMetrics({ wait: true });
    const after = session.counters();
    session.close();
    return { before, after, arrivedEarly, arrivedLate: rest.length };
  });
}

/**
 * Compile every kernel of every plan in every variant that the device has the features for: its WGSL, and the pipeline
 * too where that is asked for (a software driver takes minutes).
 *
 * @param {Host} host
 * @param {boolean} pipelines
 */
export async function compileKernels(host, pipelines) {
  const device = await openDevice({ gpu: host.gpu });
  /** @type {{name: string, needs: string[], wgsl: string, entry: string, constants: Record<string, number>}[]} */
  const kernels = JSON.parse(new TextDecoder().decode(await host.read("kernels.json")));
  const directive = (await subgroupDirective(device)) ?? "";
  const usable = kernels.filter(({ needs }) => needs.every((feature) => device.features.has(feature)));
  /** @type {string[]} */
  const refused = [];
  await Promise.all(
    usable.map(async ({ name, needs, wgsl, entry, constants }) => {
      const code = needs.includes("subgroups") ? directive + wgsl : wgsl;
      try {
        const module = await device.scoped(() => device.device.createShaderModule({ code }));
        if (!pipelines) return;
        const compute = { module, entryPoint: entry, constants };
        await device.wait(device.device.createComputePipelineAsync({ layout: "auto", compute }));
      } catch (error) {
        refused.push(`${name}: ${describe(error).message}`);
      }
    }),
  );
  device.destroy();
  const needed = new Set(usable.flatMap(({ needs }) => needs));
  return { kernels: kernels.length, compiled: usable.length - refused.length, refused, features: [...needed] };
}

/**
 * Compile and prepare all programs of a plan, and see the progress.
 *
 * @param {Host} host
 * @param {string} name
 */
export function prepareFixture(host, name) {
  return withFixture(host, name, async ({ device, plan }) => {
    const executor = await Executor.create(device, plan);
    /** @type {[string, number, number][]} */
    const progress = [];
    await executor.prepare(Object.keys(plan.programs), (...report) => progress.push(report));
    const { pipelinesCreated } = executor.counters;
    executor.close();
    return { pipelinesCreated, progress };
  });
}

/**
 * Every variant of every product class gives the same bits; the fastest are timed once and remembered.
 *
 * @param {Host} host
 * @param {string} name
 */
export function variantsFixture(host, name) {
  return withFixture(host, name, async ({ device, plan, run, open }) => {
    const executor = await Executor.create(device, plan);
    const classes = [...representatives(executor)];
    executor.close();
    const most = Math.max(1, ...classes.map(([, dispatch]) => dispatch.choices.length));
    const hashes = [];
    for (let number = 0; number < most; number++) {
      const variants = classes.map(([key, { choices }]) => [key, choices[number % choices.length].variant]);
      const session = await open({ variants: Object.fromEntries(variants) });
      await train(session, run, 1, 1);
      hashes.push(hashOf(await session.exportState()));
      session.close();
    }
    const storage = memoryStorage();
    /** @type {string[][]} */
    const said = [];
    const chosen = [];
    for (let attempt = 0; attempt < 2; attempt++) {
      /** @type {string[]} */
      const texts = [];
      said.push(texts);
      const session = await open({ variants: undefined, storage, progress: (text) => texts.push(text) });
      chosen.push(session.describe().variants);
      session.close();
    }
    return { classes: classes.length, hashes, said, chosen };
  });
}

/**
 * Evaluation between steps, which must not disturb training, and sampling.
 *
 * @param {Host} host
 * @param {string} name
 */
export function evaluateFixture(host, name) {
  return withFixture(host, name, async ({ run, open }) => {
    const session = await open();
    const half = run.steps.length / 2;
    await train(session, run, 1, run.steps.length);
    const undisturbed = hashOf(await session.exportState());
    await session.reset();
    await train(session, run, 1, half);
    const midway = await session.evaluate(batchOf(session, run.steps[0].batches[0]));
    await train(session, run, half + 1, run.steps.length);
    const evaluation = await session.evaluate(batchOf(session, run.steps[0].batches[0]));
    const stateHash = hashOf(await session.exportState());
    const greedy = [];
    const prompt = run.prompt ?? [];
    const tokens = run.greedy?.length ?? 0;
    for await (const id of session.generate(prompt, { tokens, temperature: 0 })) greedy.push(id);
    const sampled = [];
    const options = { tokens, temperature: 0.9, topK: 20, topP: 0.95, seed: 7 };
    for await (const id of session.generate(prompt, options)) sampled.push(id);
    session.close();
    return { midway, evaluation, greedy, sampled, stateHash, undisturbed, expected: run };
  });
}

/**
 * Training on a device without timestamps: the times come from a synchronised step, which changes nothing else.
 *
 * @param {Host} host
 * @param {string} name
 */
export async function calibrateFixture(host, name) {
  /** @param {readonly string[]} [features] */
  const five = (features) =>
    withFixture(
      host,
      name,
      async ({ run, open }) => {
        const session = await open();
        await train(session, run, 1, 5);
        const results = await session.pollMetrics({ wait: true });
        const stateHash = hashOf(await session.exportState());
        session.close();
        return { results, stateHash };
      },
      features,
    );
  const plain = await five([]);
  const usual = await five();
  return { results: plain.results, stateHash: plain.stateHash, usualHash: usual.stateHash };
}

/**
 * Evaluations in mixed precision: as it begins, with an activation that does not fit f16, as it was, and with such a weight.
 *
 * @param {Host} host
 */
export function overflowFixture(host) {
  return withFixture(host, "llama-mixed", async ({ run, open }) => {
    const session = await open();
    const { model, optimizer, ...progress } = await session.exportState();
    /** @param {Record<string, number>} changed @returns {Promise<boolean>} */
    const overflows = async (changed) => {
      await session.restore(progress, (write) => {
        for (const [name, { data }] of Object.entries({ ...model, ...optimizer })) {
          write(name, name in changed ? new Float32Array(data.length).fill(changed[name]) : data);
        }
      });
      return (await session.evaluate(batchOf(session, run.steps[0].batches[0]))).overflow;
    };
    const report = {
      plain: await overflows({}),
      activation: await overflows({ "model.layers.0.mlp.up_proj.weight": 3e4 }),
      again: await overflows({}),
      weight: await overflows({ "model.norm.weight": 1e5 }),
    };
    session.close();
    return report;
  });
}

/**
 * A plan without training programs, given the weights of another run.
 *
 * @param {Host} host
 */
export async function inferenceFixture(host) {
  const run = /** @type {Run} */ (JSON.parse(new TextDecoder().decode(await host.read("llama/run.json"))));
  const device = await openDevice({ gpu: host.gpu });
  try {
    const plan = await loadPlan((file) => host.read(`llama-inference/${file}`));
    const session = await PlanSession.create(plan, { device, variants: {} });
    await session.restore({ optimizerStep: 10, scaler: { scale: 1, growthCounter: 0 } }, (write) => {
      for (const [name, values] of Object.entries(run.model)) write(name, Float32Array.from(values));
    });
    const evaluation = await session.evaluate(batchOf(session, run.steps[0].batches[0]));
    const greedy = [];
    const options = { tokens: run.greedy?.length, temperature: 0 };
    for await (const id of session.generate(run.prompt ?? [], options)) greedy.push(id);
    /** @type {string[]} */
    const refused = [];
    for (const call of [
      () => session.begin({ dataStep: 1, targetTokens: 1, microbatches: 1 }),
      () => session.exportState(),
    ]) {
      await call().catch((error) => refused.push(error.message));
    }
    const memory = session.memory();
    session.close();
    return { evaluation, greedy, refused, memory, expected: run };
  } finally {
    device.destroy();
  }
}

/**
 * A kernel that does not compile is named, with the line.
 *
 * @param {Host} host
 * @param {string} name
 */
export function brokenFixture(host, name) {
  return withFixture(host, name, async ({ device, plan }) => {
    const kernel = plan.kernels.step_finalize;
    plan.sources[kernel.source] = `${plan.sources[kernel.source]}\nfn broken() -> u32 { return 1.5f; }\n`;
    try {
      await PlanSession.create(plan, { device, variants: {} });
      return { name: "none", message: "" };
    } catch (error) {
      return describe(error);
    }
  });
}

/**
 * What is said when a device is taken away in the middle of training, and when calls come in the wrong order.
 *
 * @param {Host} host
 * @param {string} name
 */
export function failFixture(host, name) {
  return withFixture(host, name, async ({ device, run, open }) => {
    const session = await open();
    /** @type {Record<string, {name: string, message: string}>} */
    const errors = {};
    /** @param {string} what @param {() => Promise<unknown>} work */
    const note = async (what, work) => {
      try {
        await work();
        errors[what] = { name: "none", message: "" };
      } catch (error) {
        errors[what] = describe(error);
      }
    };
    const info = { dataStep: 1, targetTokens: run.steps[0].targetTokens, microbatches: 2 };
    const batch = batchOf(session, run.steps[0].batches[0]);
    await note("noTargets", () => session.begin({ ...info, targetTokens: 0 }));
    await note("noBegin", () => session.accumulate(batch));
    await session.begin(info);
    await note("twice", () => session.begin(info));
    await session.accumulate(batch);
    await note("early", () => session.apply());
    await note("exportInStep", () => session.exportState());
    const ids = batch.ids.slice();
    ids[3] = 999_999;
    await note("vocabulary", () => session.accumulate(new Batch(batch.shape, { ...batch, ids })));
    await session.accumulate(batch);
    const inspected = await session.inspect();
    await session.apply();
    const [applied] = await session.pollMetrics({ wait: true });
    const state = await session.exportState();
    await note("foreign", () => session.importState({ ...state, model: {} }));
    const exporting = session.exportState();
    await note("whileExporting", () => session.begin({ ...info, dataStep: 2 }));
    await exporting;
    await train(session, run, 2, 4);
    device.destroy();
    await note("lost", async () => {
      await train(session, run, 5, 8);
      await session.pollMetrics({ wait: true });
    });
    await note("lostExport", () => session.exportState());
    session.close();
    return { errors, inspected, applied };
  });
}

/**
 * What the plan compiler is told about the adapter.
 *
 * @param {Host} host
 */
export async function profile(host) {
  const device = await openDevice({ gpu: host.gpu });
  const modest = await openDevice({ gpu: host.gpu, defaultLimits: true, features: [] });
  const report = { info: device.info, profile: await deviceProfile(device), modest: await deviceProfile(modest) };
  device.destroy();
  modest.destroy();
  return report;
}
