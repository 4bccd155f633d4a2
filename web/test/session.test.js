/** @file The plan session against the reference session's numbers, and against itself. */

import assert from "node:assert/strict";
import { after, describe, test } from "node:test";

import { findHost, isDeno } from "./support/host.js";
import * as scenarios from "./support/scenarios.js";

const { host, features, missing, release } = await findHost();
after(release);

const noF16 = missing || (features.has("shader-f16") ? false : "this adapter has no shader-f16");

/**
 * @param {number} actual
 * @param {number} expected
 * @param {number} tolerance
 * @param {string} what
 */
function near(actual, expected, tolerance, what) {
  const error = Math.abs(actual - expected) / Math.abs(expected);
  assert.ok(error <= tolerance, `${what}: ${actual} and ${expected} differ by ${error}, more than ${tolerance}`);
}

/**
 * 1 - cosine of two updates.
 *
 * @param {readonly number[]} start
 * @param {readonly number[]} mine
 * @param {readonly number[]} theirs
 */
function angle(start, mine, theirs) {
  let dot = 0;
  let a = 0;
  let b = 0;
  for (let i = 0; i < start.length; i++) {
    const x = mine[i] - start[i];
    const y = theirs[i] - start[i];
    dot += x * y;
    a += x * x;
    b += y * y;
  }
  return 1 - dot / Math.sqrt(a * b);
}

for (const model of ["gpt2", "llama", "looped"]) {
  describe(`${model} in float32`, { skip: missing }, () => {
    test("ten steps give the losses, norms and weights of the reference", async () => {
      const report = await scenarios.trainFixture(host, model);
      assert.equal(report.initialSha256, report.expected.initialSha256);
      assert.equal(report.results.length, report.expected.results.length);
      report.results.forEach((result, i) => {
        const expected = report.expected.results[i];
        near(result.loss, expected.loss, 1e-6, `loss of step ${i + 1}`);
        near(result.nll, expected.nll, 1e-6, `nll of step ${i + 1}`);
        near(Number(result.gradNorm), expected.gradNorm, 1e-5, `norm of step ${i + 1}`);
        for (const key of /** @type {const} */ (["dataStep", "targetTokens", "optimizerStep", "overflow"])) {
          assert.equal(result[key], expected[key], key);
        }
      });
      for (const [name, start] of Object.entries(report.start)) {
        // Softmax does not see a constant added to every key: this gradient is zero but for rounding.
        if (name.endsWith("k_proj.bias")) continue;
        assert.ok(angle(start, report.model[name], report.expected.model[name]) <= 1e-6, name);
      }
    });
  });

  describe(`${model} in mixed precision`, { skip: noF16 }, () => {
    test("ten steps with an overflow give the losses and the scales of the reference", async () => {
      const report = await scenarios.trainFixture(host, `${model}-mixed`);
      assert.equal(report.results.length, report.expected.results.length);
      report.results.forEach((result, i) => {
        const expected = report.expected.results[i];
        near(result.loss, expected.loss, 1e-3, `loss of step ${i + 1}`);
        for (const key of /** @type {const} */ ([
          "overflow",
          "lossScale",
          "lossScaleAfter",
          "growthCounter",
          "optimizerStep",
        ])) {
          assert.equal(result[key], expected[key], `${key} of step ${i + 1}`);
        }
      });
      assert.equal(report.results.filter((result) => result.overflow).length, 1);
    });
  });
}

describe("a session", { skip: missing }, () => {
  test("every kernel of every plan and variant compiles", async () => {
    const { kernels, compiled, refused, features: used } = await scenarios.compileKernels(host, isDeno);
    assert.deepEqual(refused, []);
    for (const feature of ["shader-f16", "subgroups"]) assert.equal(used.includes(feature), features.has(feature));
    assert.ok(compiled > 60 && compiled <= kernels, `${compiled} of ${kernels}`);
  });

  test("compiles pipelines once, before the first step, and says how far it is", async () => {
    const { pipelinesCreated, progress } = await scenarios.prepareFixture(host, "gpt2");
    assert.deepEqual(progress[0], ["compiling kernels", 0, pipelinesCreated]);
    assert.deepEqual(progress.at(-1), ["compiling kernels", pipelinesCreated, pipelinesCreated]);
  });

  test("gives the same bits however often it stops, reads or submits", async () => {
    const hashes = await scenarios.repeatFixture(host, "llama");
    assert.equal(new Set(Object.values(hashes)).size, 1, JSON.stringify(hashes, null, 1));
  });

  test("gives the same bits in mixed precision", { skip: noF16 }, async () => {
    const hashes = await scenarios.repeatFixture(host, "looped-mixed");
    assert.equal(new Set(Object.values(hashes)).size, 1, JSON.stringify(hashes, null, 1));
  });

  test("creates nothing over a hundred warm steps, and reads seldom", async () => {
    const { before, after, arrivedEarly, arrivedLate } = await scenarios.countFixture(host, "gpt2", 100);
    assert.equal(after.buffersCreated, before.buffersCreated);
    assert.equal(after.pipelinesCreated, before.pipelinesCreated);
    assert.equal(after.fences - before.fences, 100);
    assert.ok(after.readbacks - before.readbacks <= 26, `${after.readbacks - before.readbacks} readbacks`);
    assert.equal(arrivedEarly + arrivedLate, 100);
    assert.ok(arrivedEarly > 0, "no result arrived before it was waited for");
  });

  test("may use any variant of a product, and remembers the fastest", async () => {
    const { classes, hashes, said, chosen } = await scenarios.variantsFixture(host, "wide");
    assert.ok(classes > 0);
    assert.ok(hashes.length > 1);
    assert.equal(new Set(hashes).size, 1);
    assert.ok(said[0].includes("timing kernel variants"));
    assert.ok(!said[1].includes("timing kernel variants"));
    assert.equal(Object.keys(chosen[0]).length, classes);
    assert.deepEqual(chosen[0], chosen[1]);
  });

  for (const model of ["gpt2", "llama"]) {
    test(`evaluates and samples like the reference, and evaluation leaves training alone (${model})`, async () => {
      const report = await scenarios.evaluateFixture(host, model);
      const expected = report.expected.evaluation;
      near(report.evaluation.lossSum, Number(expected?.lossSum), 1e-6, "evaluation");
      assert.equal(report.evaluation.targetTokens, expected?.targetTokens);
      assert.notEqual(report.midway.lossSum, report.evaluation.lossSum);
      assert.equal(report.stateHash, report.undisturbed);
      assert.deepEqual(report.greedy, report.expected.greedy);
      assert.deepEqual(report.sampled, report.expected.sampled);
    });
  }

  test("says when a value of an evaluation did not fit f16", { skip: noF16 }, async () => {
    assert.deepEqual(await scenarios.overflowFixture(host), {
      plain: false,
      activation: true,
      again: false,
      weight: true,
    });
  });

  test("without timestamps, takes the times from a synchronised step now and then", async () => {
    const { results, stateHash, usualHash } = await scenarios.calibrateFixture(host, "gpt2");
    assert.equal(stateHash, usualHash);
    // The first step may still compile, and is not measured.
    for (const result of results.slice(1)) {
      assert.equal(result.timingSource, "calibration");
      const { forwardMs, backwardMs, optimizerMs, stepTimeMs } = result;
      for (const time of [forwardMs, backwardMs, optimizerMs]) assert.ok(Number(time) > 0);
      assert.ok(Number(forwardMs) + Number(backwardMs) <= Number(stepTimeMs));
    }
  });

  test("evaluates and generates with a plan that cannot train, in less memory", async () => {
    const { evaluation, greedy, refused, memory, expected } = await scenarios.inferenceFixture(host);
    near(evaluation.lossSum, Number(expected.evaluation?.lossSum), 1e-6, "evaluation");
    assert.deepEqual(greedy, expected.greedy);
    assert.equal(refused.length, 2);
    for (const message of refused) assert.match(message, /compiled without its training programs/);
    assert.ok(!("grads" in memory));
  });

  test("names a kernel that does not compile, and the line", async () => {
    const { name, message } = await scenarios.brokenFixture(host, "gpt2");
    assert.equal(name, "HybridError");
    assert.match(message, /kernel 'step_finalize' does not compile on .*\(.*/);
    assert.match(message, /line \d+/);
  });

  test("says what is wrong: calls out of order, foreign batches and states, a lost device", async () => {
    const { errors, inspected, applied } = await scenarios.failFixture(host, "gpt2");
    const expected = {
      noTargets: ["DataContractError", /step 1 has no target tokens/],
      noBegin: ["Error", /begin comes first/],
      twice: ["Error", /step 1 is under way/],
      early: ["Error", /1 of 2 microbatches/],
      exportInStep: ["Error", /step 1 is under way/],
      vocabulary: ["DataContractError", /batch\.ids\[0, 3\] is 999999 .*below the vocabulary size 96/],
      foreign: ["CheckpointCorrupt", /weight tensor 'model\.embed_tokens\.weight' is missing/],
      whileExporting: ["Error", /exportState has not finished/],
      lost: ["DeviceLost", /was lost/],
      lostExport: ["DeviceLost", /was lost/],
    };
    for (const [what, [name, message]] of Object.entries(expected)) {
      assert.equal(errors[what].name, name, `${what}: ${errors[what].message}`);
      assert.match(errors[what].message, /** @type {RegExp} */ (message));
    }
    for (const key of /** @type {const} */ (["dataStep", "loss", "gradNorm", "clipFactor", "optimizerStep"])) {
      assert.equal(inspected[key], applied[key]);
    }
  });

  test("tells the plan compiler what the adapter can do", async () => {
    const { info, profile, modest } = await scenarios.profile(host);
    assert.ok(info.name);
    assert.ok(profile.limits.maxBufferSize >= modest.limits.maxBufferSize);
    assert.equal(modest.limits.maxStorageBufferBindingSize, 128 * 2 ** 20);
    assert.deepEqual(modest.features, []);
    assert.equal(profile.subgroup_size > 0, profile.features.includes("subgroups"));
  });
});
