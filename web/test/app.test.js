/** @file What stands behind the page: plans that fit, jobs, commands, and numbers as people read them. */

import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { gzipSync } from "node:zlib";

import { ago, bytes, duration, parameters } from "../app/format.js";
import { chosenSettings, desktopCommand } from "../app/job.js";
import { bestPlan, lacks, planKey, sitePlanner } from "../app/planner.js";
import { bundleApp } from "../build.js";
import { DEFAULT_LIMITS } from "../runtime/device.js";

const config = {
  model: { layers: 1, width: 32 },
  data: { source: "stories.txt", sequenceLength: 32, batchSize: 4, microbatchSize: 4 },
  optimizer: { type: "adamw", lr: 0.005, beta1: 0.9, beta2: 0.95, eps: 1e-8, weightDecay: 0.1, maxNorm: 1 },
  schedule: { type: "cosine_to_min", warmupSteps: 5, totalSteps: 55 },
  precision: { type: "f32" },
  lossScaling: { enabled: false },
  backend: { recompute: false },
  run: { name: "micro", steps: 60 },
};
const limits = { maxBufferSize: 1024 };
const plain = { folder: "plain", subgroupSize: 0, requires: { features: [], limits }, memoryBytes: 1 };
const grouped = { ...plain, folder: "grouped", subgroupSize: 8, requires: { features: ["subgroups"], limits } };
const size = {
  name: "micro",
  title: "Micro",
  about: "",
  parameters: 1,
  tokenizer: {},
  checkpointFiles: {},
  precisions: { f32: { config, contract: { schedule: { ...config.schedule } }, plans: [plain, grouped] } },
};
const site = { text: { file: "", name: "", bytes: 0 }, sizes: [size] };
/** @param {number} subgroup_size @param {Record<string, number>} [more] */
const profile = (subgroup_size, more) => ({
  limits: { ...DEFAULT_LIMITS, ...more },
  features: subgroup_size ? ["subgroups"] : [],
  subgroup_size,
  cpu: null,
});

describe("the planner of a static export", () => {
  const planner = sitePlanner(site, new URL("http://localhost/plans/"));

  test("takes the plan that makes most of the device", async () => {
    assert.equal(bestPlan([plain, grouped], profile(0)), plain);
    assert.equal(bestPlan([plain, grouped], profile(4)), plain);
    assert.equal((await planner(config, profile(32))).folder.name, "grouped");
  });

  test("does not care for rate, schedule, text and length", () => {
    const optimizer = { ...config.optimizer, lr: 1, weightDecay: 0 };
    const data = { ...config.data, source: "other.txt" };
    const other = { ...config, optimizer, data, schedule: { type: "constant" }, run: { steps: 1 } };
    assert.equal(planKey(other), planKey(config));
    assert.notEqual(planKey({ ...config, model: { layers: 2, width: 32 } }), planKey(config));
    assert.notEqual(planKey({ ...config, optimizer: { ...optimizer, beta2: 0.99 } }), planKey(config));
  });

  test("says which models it has, and what a device lacks", async () => {
    await assert.rejects(planner({ ...config, model: { layers: 7, width: 64 } }, profile(0)), /7 layers.*Micro/);
    await assert.rejects(planner(config, profile(0, { maxBufferSize: 512 })), /maxBufferSize of 1024.*smaller model/);
    const half = { ...plain, requires: { features: ["shader-f16"], limits: {} } };
    assert.equal(lacks(half, profile(0)), "this device does not compute in 16 bits: choose 32 bits");
  });

  test("gives the plan the rate and schedule of the run", async (context) => {
    const asked = /** @type {string[]} */ ([]);
    context.mock.method(globalThis, "fetch", async (/** @type {URL} */ url) => {
      asked.push(url.pathname);
      return new Response(JSON.stringify({ settings: { optimizer: {}, groups: [] } }));
    });
    const { folder } = await planner(config, profile(0));
    const plan = JSON.parse(new TextDecoder().decode(await folder.read("plan.json")));
    const { maxNorm: _, ...optimizer } = config.optimizer;
    assert.deepEqual(plan.settings, {
      optimizer: { ...optimizer, scheduler: { enabled: true, ...config.schedule } },
      groups: [],
    });
    assert.deepEqual(asked, ["/plans/plain/plan.json"]);
  });
});

test("the schedule of a run follows its length, in its settings and in what it promises", () => {
  const choice = { size: "micro", precision: "f32", steps: 1000, name: "mine", sources: ["a.txt"] };
  const chosen = chosenSettings(size, choice);
  assert.equal(chosen.config.schedule.totalSteps, 995);
  assert.equal(chosen.contract.schedule.totalSteps, 995);
  assert.deepEqual([chosen.config.run, chosen.config.data.source], [{ name: "mine", steps: 1000 }, "a.txt"]);
  assert.deepEqual(chosenSettings(size, { ...choice, sources: ["a", "b"] }).config.data.source, ["a", "b"]);
});

test("the command for the desktop is one that a shell and --set understand", () => {
  /** @param {unknown} source @param {number} [step] */
  const command = (source, step = 20) => {
    const settings = { ...config, data: { ...config.data, source } };
    return desktopCommand("run.hybrid", /** @type {any} */ ({ config: settings, steps: 60 }), step);
  };
  const begin = "hybrid train --resume run.hybrid --set";
  assert.equal(command("stories.txt"), `${begin} data.source=stories.txt`);
  assert.equal(command("stories.txt", 60), `${begin} data.source=stories.txt --steps 120`);
  assert.equal(command("my tales.txt"), `${begin} 'data.source=my tales.txt'`);
  assert.equal(command("it's.txt"), `${begin} 'data.source="it'\\''s.txt"'`);
  assert.equal(command("2026.txt"), `${begin} 'data.source="2026.txt"'`);
  assert.equal(command(["a.txt", "b.txt"]), `${begin} 'data.source=["a.txt","b.txt"]'`);
});

test("numbers are written as people read them", () => {
  assert.deepEqual([21_600, 838_528, 4_900_000, 1.24e9].map(parameters), [
    ...["21,600", "0.84 million", "4.9 million", "1.2 billion"],
  ]);
  assert.deepEqual([12, 5000, 13 * 2 ** 20, 2 ** 30].map(bytes), ["12 bytes", "4.9 KB", "13 MB", "1.0 GB"]);
  assert.deepEqual([5, 65, 3700].map(duration), ["5 s", "1 min 5 s", "1 h 1 min"]);
  const now = Date.parse("2026-01-10T12:00:00Z");
  assert.equal(ago("2026-01-10T11:59:40Z", now), "just now");
  assert.equal(ago("2026-01-10T09:00:00Z", now), "3 h ago");
  assert.match(ago("2026-01-02T09:00:00Z", now), /January 2, 2026/);
});

test("all of the page, without the tokenizer library, is below 150 kB", async () => {
  const { outputFiles } = await bundleApp(false);
  const files = (outputFiles ?? []).filter(({ path }) => !/tokenizers-|LEGAL/.test(path));
  const size = files.reduce((sum, { contents }) => sum + gzipSync(contents, { level: 9 }).length, 0);
  assert.ok(size > 60_000 && size < 140_000, `${size} bytes`);
});
