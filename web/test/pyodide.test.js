/** @file Python in the tab, under Node: plans to the byte, estimates, and what a script may do wrong. */

import assert from "node:assert/strict";
import { after, describe, test } from "node:test";
import { Worker } from "node:worker_threads";
import { planRequest } from "../pyodide/plan_request.js";
import { ScriptError } from "../pyodide/tab_python.js";
import { Batch } from "../runtime/batch.js";
import { openDevice } from "../runtime/device.js";
import { ConfigError, LimitExceeded, StopRequested } from "../runtime/errors.js";
import { loadPlan } from "../runtime/plan.js";
import { PlanSession } from "../runtime/session.js";
import { Sha256 } from "../runtime/sha256.js";
import { deviceProfile } from "../runtime/subgroups.js";
import { findGpu, isDeno } from "./support/host.js";
import { askPython, openPython, packed } from "./support/python.js";

/** @import { PlanRequest, Profile } from "../pyodide/tab_python.js" */

const gpu = await findGpu().catch(() => null);
const noDevice = await openDevice({ gpu }).then(
  (device) => device.destroy(),
  (error) => `no WebGPU here (${error.message})`,
);
if (noDevice && (process.env.HYBRID_REQUIRE ?? "").split(",").includes("webgpu")) throw new Error(noDevice);

/**
 * @typedef {object} Case
 * @property {string} name
 * @property {PlanRequest} request
 * @property {Profile} profile
 * @property {Record<string, string>} files
 * @property {number} parameters
 * @property {Record<string, number>} memory
 */

const MODEL = {
  ...{ vocabulary_size: 256, context_length: 16, layers: 1, width: 32, heads: 2, feed_forward_width: 64 },
  activation: "silu",
};
const REQUEST = { model: MODEL, batchSize: 2, sequenceLength: 16, optimizer: { type: "adamw", lr: 0.01 } };
// Text that repeats itself, and a model of it; what stands before says what the blocks are.
const TRAINING = `
import hybrid_tab as tab
from hybrid.models.config import ModelConfig
from hybrid.optim.settings import OptimizerSettings
from hybrid.plan.compiler import PlanSettings

model = ModelConfig(256, 16, 1, 32, 2, 64, activation="silu")
settings = PlanSettings(model, 2, 16, optimizer=OptimizerSettings(type="adamw", lr=0.01))
plan = await tab.compile(settings, blocks=blocks)
session = await tab.open(plan, seed=7)
for batch in tab.byte_batches("she sells sea shells. " * 20, batch_size=2, sequence_length=16, steps=STEPS):
    await session.step([batch])
for result in await session.results(wait=True):
    tab.report(step=result.data_step, loss=result.loss)
`;

const skip = isDeno ? "Python is loaded by Node's file system here" : false;
const bundle = skip ? null : await packed();
const interrupt = new Int32Array(new SharedArrayBuffer(4));
const python = bundle ? await openPython(bundle.folder, interrupt) : /** @type {any} */ (null);
/** @type {Case[]} */
const cases = skip ? [] : JSON.parse(askPython("-m", "tab_python.cases"));
after(() => bundle?.remove());

/** @param {string} source */
async function run(source, options = {}) {
  /** @type {string[]} */
  const lines = [];
  const openDevice = () => Promise.reject(new Error("no device here"));
  await python.runScript(source, { openDevice, print: (/** @type {string} */ line) => lines.push(line), ...options });
  return lines;
}

/** What is wrong with a script. @param {string} source @returns {Promise<ScriptError>} */
async function wrong(source) {
  try {
    await run(source);
  } catch (error) {
    assert.ok(error instanceof ScriptError, String(error));
    return error;
  }
  throw new Error("the script did nothing wrong");
}

describe("a plan compiled in the tab", { skip }, () => {
  for (const { name, request, profile, files } of cases) {
    test(`has the bytes of the desktop's: ${name}`, async () => {
      const folder = await python.compilePlan(request, profile);
      /** @type {Record<string, string>} */
      const found = {};
      for (const file of await folder.list()) found[file] = new Sha256().update(await folder.read(file)).hex();
      assert.deepEqual(found, files);
    });
  }

  test("follows from the settings of a run alone", async () => {
    for (const { name, settings, profile, files } of JSON.parse(askPython("-m", "tab_python.runs"))) {
      const folder = await python.compilePlan(planRequest(settings), profile);
      for (const file of await folder.list()) {
        assert.equal(new Sha256().update(await folder.read(file)).hex(), files[file], `${file} of a run ${name}`);
      }
    }
  });

  test("is refused in the desktop's words", async () => {
    const [{ request, profile }] = cases;
    /** @param {object} changes @param {object} [limits] */
    const refused = (changes, limits = {}) =>
      python.compilePlan({ ...request, ...changes }, { ...profile, limits: { ...profile.limits, ...limits } });
    await assert.rejects(refused({ batchSzie: 2 }), {
      name: "ConfigError",
      message: /^unknown plan setting 'batchSzie': did you mean 'batchSize'\? known: /,
    });
    await assert.rejects(refused({ model: { ...request.model, heads: 0 } }), {
      name: "ConfigError",
      message: "model.heads is 0: expected a whole number of at least 1",
    });
    await assert.rejects(refused({ model: { layers: 1 } }), ConfigError);
    await assert.rejects(refused({ batchSize: "two" }), {
      message: "plan settings: batchSize is 'two': expected a whole number",
    });
    await assert.rejects(refused({ batchSize: 4096 }, { maxBufferSize: 65536 }), LimitExceeded);
    await assert.rejects(refused({}, { maxBufferSize: 0 }), {
      message: "device profile: limits.maxBufferSize is 0: expected a positive number",
    });
  });
});

test("an estimate says parameters and bytes by arena", { skip }, () => {
  for (const { name, request, profile, parameters, memory } of cases.slice(0, 3)) {
    assert.deepEqual(python.estimate(request, profile), { parameters, memory }, name);
  }
});

describe("a script", { skip }, () => {
  test("prints line by line, and may use Python's library", async () => {
    assert.deepEqual(await run("import statistics\nprint('mean', statistics.mean([1, 2, 6]))\nprint('end')"), [
      "mean 3",
      "end",
    ]);
  });

  test("reads the texts that the page gives it, which are gone afterwards", async () => {
    const source = "import os\nprint(open('corpus.txt').read() if os.path.exists('corpus.txt') else 'none')";
    assert.deepEqual(await run(source, { texts: { "corpus.txt": "naïve ☕" } }), ["naïve ☕"]);
    assert.deepEqual(await run(source), ["none"]);
    await assert.rejects(run(source, { texts: { "../corpus.txt": "" } }), /the name '\.\.\/corpus\.txt' is refused/);
  });

  test("may do to its folder what it likes, and its last line needs no end", async () => {
    const texts = { "text.txt": "the text" };
    const look = "print(open('text.txt').read(), end='')";
    for (const source of [
      "import os; os.remove('text.txt'); os.mkdir('text.txt'); open('text.txt/more', 'w').write('x')",
      "import os; os.makedirs('../other'); os.chdir('../other')",
      "import os; os.close(1)",
    ]) {
      await run(source, { texts });
      assert.deepEqual(await run(look, { texts }), ["the text"], source);
    }
    assert.deepEqual(await run("import os; print(os.listdir())"), ["[]"]);
  });

  test("leaves Python as it was", async () => {
    const model = "from hybrid.models.config import ModelConfig\nfrom hybrid.plan.compiler import PlanSettings\n";
    const look = `${model}import hybrid_tab, json\nprint(json.loads(json.dumps([len("abc")])))`;
    for (const source of [
      "import builtins; builtins.print = builtins.len = builtins.compile = None",
      "import json, asyncio; json.dumps = json.loads = asyncio.wait = None",
      "import sys; sys.modules.clear(); sys.stdout = None",
      "import hybrid.plan.compiler as compiler, hybrid_tab; compiler.PlanSettings = hybrid_tab.compile = None",
    ]) {
      await run(source);
      assert.deepEqual(await run(look), ["[3]"], source);
    }
  });

  test("reports numbers to the page", async () => {
    /** @type {object[]} */
    const reports = [];
    const report = (/** @type {object} */ values) => reports.push(values);
    await run("import hybrid_tab as tab\nfor i in range(2): tab.report(step=i, loss=2.5, note='a', more=None)", {
      report,
    });
    assert.deepEqual(
      reports,
      [0, 1].map((step) => ({ step, loss: 2.5, note: "a", more: null })),
    );
  });

  test("that fails says which line, and what was on it", async () => {
    const error = await wrong("x = 1\n\ndef f():\n    return x / 0\n\nf()\n");
    assert.equal(error.message, "line 4 of the script: ZeroDivisionError: division by zero (in “return x / 0”)");
    assert.deepEqual([error.line, error.kind], [4, "ZeroDivisionError"]);
    assert.match(error.traceback, /^Traceback.*\n {2}File "script.py", line 6/);
  });

  test("that cannot be read says where", async () => {
    const error = await wrong("x = 1\nif x\n  y = 2\n");
    assert.deepEqual([error.line, error.kind], [2, "SyntaxError"]);
  });

  test("that asks for a model that cannot be gets the error by its name, at its own line", async () => {
    const error = await wrong(
      "from hybrid.models.config import ModelConfig\nmodel = ModelConfig(256, 32, 1, 32, 4, 64, window=0)\nmodel.validate()\n",
    );
    assert.deepEqual([error.line, error.kind], [3, "ConfigError"]);
    assert.match(error.message, /model\.window is 0: expected at least 1/);
  });

  test("gets an error of the device as an error of its own", async () => {
    const error = await wrong(
      "import hybrid_tab as tab\nfrom hybrid.models.config import ModelConfig\n" +
        "from hybrid.plan.compiler import PlanSettings\n" +
        "await tab.compile(PlanSettings(ModelConfig(256, 32, 1, 32, 4, 64), 2, 32))\n",
    );
    assert.deepEqual([error.line, error.kind], [4, "HybridError"]);
    assert.match(error.message, /no device here/);
  });

  test("is stopped where it waits, and the next one runs", async () => {
    const waiting = run("import asyncio\nwhile True:\n    await asyncio.sleep(0.01)\n");
    setTimeout(() => python.stop("enough"), 50);
    await assert.rejects(waiting, (/** @type {Error} */ error) => {
      assert.ok(error instanceof StopRequested);
      assert.equal(error.message, "the script was stopped at line 3: enough");
      return true;
    });
    assert.deepEqual(await run("print('again')"), ["again"]);
  });

  test("that never waits is interrupted by another thread", async () => {
    const thread = new Worker("setTimeout(() => Atomics.store(require('node:worker_threads').workerData, 0, 2), 300)", {
      eval: true,
      workerData: interrupt,
    });
    await assert.rejects(run("i = 0\nwhile True:\n    i += 1\n"), {
      name: "StopRequested",
      message: /^the script was stopped at line [23]: it was interrupted$/,
    });
    await thread.terminate();
    assert.deepEqual(await run("print('again')"), ["again"]);
  });

  test("leaves no trace in the next one", async () => {
    const [{ request, profile, files }] = cases;
    await run(
      "from hybrid.models import decoder\nleft = 1\ndecoder.feed_forward = None\nimport asyncio\n" +
        "async def forever():\n    while True:\n        await asyncio.sleep(0.001)\n        print('still here')\n" +
        "asyncio.ensure_future(forever())",
    );
    assert.deepEqual(await run("import asyncio\nawait asyncio.sleep(0.05)\nprint('left' in globals())"), ["False"]);
    const plan = await (await python.compilePlan(request, profile)).read("plan.json");
    assert.equal(new Sha256().update(plan).hex(), files["plan.json"]);
  });
});

describe("a script that trains", { skip: skip || noDevice || false }, () => {
  /** The losses that it reports. @param {string} source */
  async function losses(source) {
    /** @type {number[]} */
    const found = [];
    const report = (/** @type {{loss: number}} */ { loss }) => found.push(loss);
    await run(source, { report, openDevice: () => openDevice({ gpu, features: [] }), variants: {} });
    return found;
  }

  /**
   * The losses of a plan of Python's that JavaScript drives, with batches of Python's.
   *
   * @param {object} model @param {number} steps
   */
  async function byJavaScript(model, steps) {
    const batches = JSON.parse(
      (
        await run(
          "import json, hybrid_tab as tab\nprint(json.dumps([list(batch.words()) for batch in tab.byte_batches(" +
            `"she sells sea shells. " * 20, batch_size=2, sequence_length=16, steps=${steps})]))`,
        )
      )[0],
    );
    const device = await openDevice({ gpu, features: [] });
    const request = { ...REQUEST, model: { ...MODEL, ...model } };
    const folder = await python.compilePlan(request, await deviceProfile(device));
    const session = await PlanSession.create(await loadPlan((name) => folder.read(name)), {
      device,
      seed: 7,
      variants: {},
    });
    for (const [i, words] of batches.entries()) {
      const all = Uint32Array.from(words);
      const [ids, targets, positions, segmentIds] = [0, 32, 64, 96].map((at) => all.subarray(at, at + 32));
      await session.begin({ dataStep: i + 1, targetTokens: 32, microbatches: 1 });
      await session.accumulate(
        new Batch([2, 16], { ids, targets, positions, segmentIds, sampleIds: all.subarray(128) }),
      );
      await session.apply();
    }
    const results = await session.pollMetrics({ wait: true });
    session.close();
    device.destroy();
    return results.map((result) => result.loss);
  }

  test("gives the bits of JavaScript alone", async () => {
    assert.deepEqual(await losses(`STEPS = 3; blocks = {}${TRAINING}`), await byJavaScript({}, 3));
  });

  test("puts a block of its own in the place of the model's", async () => {
    const gelu =
      "STEPS = 3\ndef mine(ops, p, h, cfg):\n    return ops.linear(ops.gelu(ops.linear(h, p.up)), p.down)\n" +
      `blocks = {"feed_forward": mine}${TRAINING}`;
    assert.deepEqual(await losses(gelu), await byJavaScript({ activation: "gelu" }, 3));
  });

  test("trains a block that no model here has", async () => {
    const squared =
      "STEPS = 20\ndef mine(ops, p, h, cfg):\n    x = ops.linear(h, p.up)\n" +
      `    return ops.linear(ops.add(ops.silu(x), ops.relu2(x)), p.down)\nblocks = {"feed_forward": mine}${TRAINING}`;
    const found = await losses(squared);
    assert.equal(found.length, 20);
    assert.ok(found[19] < 0.7 * found[0], `${found[0]} to ${found[19]}`);
  });

  test("writes with n-grams as it reads with them, one token after the other", async () => {
    const source = `STEPS = 20
def mine(ops, p, inputs, cfg):
    x = ops.embedding(inputs.ids, p.tokens)
    return ops.add(x, ops.hashed_ngram_embedding(inputs.ids, inputs.segment_ids, p.tokens, order=3, seed=5))
blocks = {"embed": mine}${TRAINING}
ids = [*b"she "]
written = await session.generate(ids, tokens=8, temperature=0)
for _ in range(8):  # each of them after a prefill of all before it
    ids += await session.generate(ids, tokens=1, temperature=0)
print(written == ids[4:], len(set(written)) > 2)
`;
    const lines = await run(source, { openDevice: () => openDevice({ gpu }) });
    assert.deepEqual(lines, ["True True"]);
  });

  test("hears of a mistake in its block at the line of the block", async () => {
    const source =
      "STEPS = 1\ndef mine(ops, p, h, cfg):\n    return ops.linear(ops.linear(h, p.down), p.up)\n" +
      `blocks = {"feed_forward": mine}${TRAINING}`;
    const error = await losses(source).then(
      () => assert.fail("it went through"),
      (caught) => caught,
    );
    assert.deepEqual([error.line, error.kind], [3, "OpError"]);
    assert.match(error.message, /linear in block 'layers\.0'/);
  });

  test("is stopped between two steps", async () => {
    const endless = TRAINING.replace("steps=STEPS", "steps=10**6").replace(
      "await session.step([batch])",
      "tab.report(loss=await session.step([batch]))",
    );
    /** @type {number[]} */
    const steps = [];
    const report = (/** @type {{loss: number}} */ { loss }) => {
      if (steps.push(loss) === 3) python.stop("seen enough");
    };
    const openHere = () => openDevice({ gpu, features: [] });
    await assert.rejects(run(`blocks = {}${endless}`, { report, openDevice: openHere, variants: {} }), {
      name: "StopRequested",
      message: /^the script was stopped at line \d+: seen enough$/,
    });
    assert.equal(steps.length, 3);
  });
});
