/** @file What stands behind the page: plans that fit, jobs, commands, and numbers as people read them. */

import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { gzipSync } from "node:zlib";
import { keptPlanner, needs, serverPlanner } from "../app/compilers.js";
import { checkShape, countParameters, customSize } from "../app/custom.js";
import { ago, bytes, duration, parameters } from "../app/format.js";
import { checkBrought, chosenSettings, desktopCommand } from "../app/job.js";
import { bestPlan, firstOf, lacks, planKey, sitePlanner } from "../app/planner.js";
import { freeName, listRuns } from "../app/runs.js";
import { bundleApp } from "../build.js";
import { DEFAULT_LIMITS } from "../runtime/device.js";
import { writeAll } from "../runtime/folders/folder.js";
import { MemoryDirectory } from "../runtime/folders/memory.js";

const config = {
  model: { layers: 1, width: 32, vocabularySize: 256 },
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
const site = {
  text: { file: "", name: "", bytes: 0 },
  planners: { server: null, python: null },
  sizes: [size],
};
/** @param {number} subgroup_size @param {Record<string, number>} [more] */
const profile = (subgroup_size, more) => ({
  limits: { ...DEFAULT_LIMITS, ...more },
  features: subgroup_size ? ["subgroups"] : [],
  subgroup_size,
  cpu: null,
});

describe("the runs of a browser", () => {
  test("have names that every system can hold, whatever their text is called", async () => {
    const runs = new MemoryDirectory("runs");
    for (const [wish, name] of [
      ["tiny-my tales", "tiny-my-tales"],
      [`tiny-${"x".repeat(250)}`, `tiny-${"x".repeat(75)}`],
      ["tiny-dots...", "tiny-dots"],
      ["../../up", "up"],
      ["☕", "run"],
      ["con", "run"],
      ["tiny-my tales", "tiny-my-tales-2"],
    ]) {
      const found = await freeName(runs, wish);
      if (found !== "run") await runs.directory(found); // as if it was begun
      assert.equal(found, name);
    }
  });

  test("are listed although their tab was ended while it wrote their records", async () => {
    const runs = new MemoryDirectory("runs");
    const job = JSON.stringify({ steps: 10, parameters: 5 });
    const facts = JSON.stringify({ step: 3, updatedAt: "2026-01-02T03:04:05.000Z" });
    for (const [name, files] of /** @type {[string, Record<string, string>][]} */ ([
      ["whole", { "job.json": job, "run.json": facts }],
      ["half a record", { "job.json": job, "run.json": '{"st', "run.next.json": facts }],
      ["no record", { "job.json": job, "run.json": "" }],
      ["half a job", { "job.json": job.slice(0, 9), "run.json": facts }],
      ["no job", { "job.json": "null", "run.json": "7" }],
    ])) {
      const folder = await runs.directory(name.replaceAll(" ", "-"));
      for (const [file, text] of Object.entries(files)) await writeAll(folder, file, text);
      await (await folder.directory("checkpoints")).directory("step-00000003");
    }
    const found = (await listRuns(runs)).map(({ name, step, steps, damaged }) => [name, step, steps, damaged]);
    assert.deepEqual(found.sort(), [
      ["half-a-job", 3, 0, true],
      ["half-a-record", 3, 10, false],
      ["no-job", 0, 0, true],
      ["no-record", 0, 10, false],
      ["whole", 3, 10, false],
    ]);
  });

  test("are not begun from a checkpoint whose settings are no run's", () => {
    const sections = { model: {}, checkpoint: {}, evaluation: {}, sampling: {}, backend: {} };
    const brought = { ...config, ...sections, data: { split: {}, samples: {} } };
    const files = { "tokenizer.json": "{}" };
    checkBrought("a.hybrid", brought, files);
    for (const [name, wrong] of Object.entries({
      run: { run: undefined },
      "run.name": { run: { name: 5 } },
      data: { data: null },
      "data.split": { data: { samples: {} } },
      sampling: { sampling: [] },
    })) {
      const message = `a.hybrid: its settings have no ${name}: it is no run's`;
      assert.throws(() => checkBrought("a.hybrid", { ...brought, ...wrong }, files), { message });
    }
    assert.throws(() => checkBrought("a.hybrid", brought, {}), /no tokenizer\.json/);
  });
});

describe("the planner of a static export", () => {
  const planner = sitePlanner(site, new URL("http://localhost/page/"));

  test("takes the plan that makes most of the device", async () => {
    assert.equal(bestPlan([plain, grouped], profile(0)), plain);
    assert.equal(bestPlan([plain, grouped], profile(4)), plain);
    assert.equal((await planner(config, profile(32)))?.folder.name, "grouped");
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
    const other = { ...config, model: { layers: 7, width: 64 } };
    assert.equal(await planner(other, profile(0)), null);
    await assert.rejects(firstOf(site, [planner])(other, profile(0)), /7 layers.*Micro.*--python/);
    await assert.rejects(planner(config, profile(0, { maxBufferSize: 512 })), /maxBufferSize of 1024.*smaller model/);
    const listed = { ...size, precisions: { f32: { ...size.precisions.f32, plans: [] } } };
    const none = sitePlanner({ ...site, sizes: [listed] }, new URL("http://localhost/"));
    assert.equal(await none(config, profile(0)), null, "it is compiled by whoever serves the page");
    const half = { ...plain, requires: { features: ["shader-f16"], limits: {} } };
    assert.equal(lacks(half, profile(0)), "this device does not compute in 16 bits: choose 32 bits");
  });

  test("gives the plan the rate and schedule of the run", async (context) => {
    const asked = /** @type {string[]} */ ([]);
    context.mock.method(globalThis, "fetch", async (/** @type {URL} */ url) => {
      asked.push(url.pathname);
      return new Response(JSON.stringify({ settings: { optimizer: {}, groups: [] } }));
    });
    const { folder } = /** @type {any} */ (await planner(config, profile(0)));
    const plan = JSON.parse(new TextDecoder().decode(await folder.read("plan.json")));
    const { maxNorm: _, ...optimizer } = config.optimizer;
    assert.deepEqual(plan.settings, {
      optimizer: { ...optimizer, scheduler: { enabled: true, ...config.schedule } },
      groups: [],
    });
    assert.deepEqual(asked, ["/page/plain/plan.json"]);
  });
});

describe("plans that are compiled", () => {
  const document = {
    arenas: { params: { pages: [64, 32] }, state: { pages: [4] } },
    requires: { features: [], limits },
    settings: {},
  };

  test("are asked of a server by settings and device, and its errors keep their names", async (context) => {
    const planner = serverPlanner(new URL("http://localhost/t/api/plans"), new URL("http://localhost/t/"));
    /** @type {any[]} */
    const asked = [];
    let answer = Response.json({ plan: "plans/abc/" });
    context.mock.method(globalThis, "fetch", async (/** @type {URL} */ url, /** @type {any} */ request) => {
      asked.push([url.pathname, request?.body && JSON.parse(request.body)]);
      return request ? answer : new Response(JSON.stringify(document));
    });
    const found = /** @type {any} */ (await planner(config, profile(0)));
    assert.deepEqual(await needs(found.folder), { requires: document.requires, memoryBytes: 100 });
    assert.deepEqual(asked, [
      ["/t/api/plans", { config, profile: profile(0) }],
      ["/t/plans/abc/plan.json", undefined],
    ]);
    answer = Response.json({ error: { name: "LimitExceeded", message: "too large" } }, { status: 422 });
    await assert.rejects(planner(config, profile(0)), { name: "LimitExceeded", message: "too large" });
  });

  test("are kept by model and device, with the rate of each run, and the newest stay", async () => {
    let compiled = 0;
    const compiler = async () => {
      compiled++;
      const folder = new MemoryDirectory("plan");
      await writeAll(folder, "plan.json", JSON.stringify(document));
      await writeAll(folder, "constant", "bytes");
      return { folder };
    };
    const kept = new MemoryDirectory("kept");
    const planner = keptPlanner(compiler, kept, "1");
    const optimizer = { ...config.optimizer, lr: 1 };
    for (const settings of [config, config, { ...config, optimizer }]) await planner(settings, profile(0));
    assert.equal(compiled, 1);
    const { folder } = /** @type {any} */ (await planner({ ...config, optimizer }, profile(0)));
    assert.equal(JSON.parse(new TextDecoder().decode(await folder.read("plan.json"))).settings.optimizer.lr, 1);
    assert.equal(new TextDecoder().decode(await folder.read("constant")), "bytes");
    await planner(config, profile(8));
    await keptPlanner(compiler, kept, "2")(config, profile(0));
    assert.equal(compiled, 3);
    for (let layers = 2; layers < 12; layers++) {
      await planner({ ...config, model: { layers, width: 32 } }, profile(0));
    }
    assert.equal((await kept.folders()).length, 8);
    const last = { ...config, model: { layers: 11, width: 32 } };
    const before = compiled;
    await planner(last, profile(0));
    assert.equal(compiled, before);
    for (const name of await kept.folders()) {
      await writeAll(/** @type {any} */ (await kept.open(name)), "plan.json", '{"arenas": {');
    }
    await planner(last, profile(0));
    assert.equal(compiled, before + 1, "a plan that was written half is compiled again");
  });
});

describe("a model of one's own size", () => {
  const good = { layers: 2, width: 64, heads: 4, context: 64, batch: 16 };

  test("is refused with what would be right", () => {
    checkShape(good);
    assert.throws(() => checkShape({ ...good, layers: 0 }), /Layers is 0: choose a whole number from 1 to 64/);
    assert.throws(() => checkShape({ ...good, batch: Number.NaN }), /Batch is no number/);
    assert.throws(() => checkShape({ ...good, width: 60 }), /a width of 60 cannot be shared by 4 heads evenly: try 64/);
  });

  test("counts as many parameters as Python does", () => {
    assert.deepEqual(
      [1, 2, 4].map((layers) => countParameters({ ...good, layers }, 256)),
      [69824, 123200, 229952],
    );
  });

  test("is a size of the page with other numbers, in settings, promise and files", () => {
    const file = JSON.stringify({ hybrid: { layers: 1, width: 32 }, hidden_size: 32 }, null, 2);
    const known = { ...size, parameters: 21_600, checkpointFiles: { "config.json": file, "tokenizer.json": "{}" } };
    const made = customSize({ ...site, sizes: [known] }, good);
    const { config: settings, contract, plans } = made.precisions.f32;
    assert.equal(made.parameters, 123_200);
    assert.deepEqual(plans, []);
    assert.deepEqual([settings.model.kvHeads, settings.model.headWidth, settings.model.feedForwardWidth], [4, 16, 192]);
    assert.deepEqual(settings.model.schedule, [0, 1]);
    assert.deepEqual(
      [settings.data.sequenceLength, settings.data.batchSize, settings.data.microbatchSize],
      [64, 16, 16],
    );
    assert.equal(contract.model.layers, 2);
    assert.equal(contract.data.batchSize, 16);
    assert.equal(JSON.parse(made.checkpointFiles["config.json"]).hybrid.context_length, 64);
    assert.equal(made.checkpointFiles["tokenizer.json"], "{}");
    assert.equal(known.precisions.f32.config.model.layers, 1);
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
  assert.ok(size > 60_000 && size < 145_000, `${size} bytes`);
});
