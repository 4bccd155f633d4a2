/** @file The options of the mirrored runner: what they change, and which make no sense here. */

import assert from "node:assert/strict";
import { describe, test } from "node:test";

import { Batch, IGNORE } from "../runtime/batch.js";
import { applyOptions } from "../runtime/runner/options.js";
import { microJob, microRun, of, rowsOf, saved } from "./support/micro.js";

/** @import { RunOptions } from "../runtime/runner/options.js" */

/** @param {RunOptions} options @param {Record<string, Record<string, unknown>>} [config] */
const applied = (options, config) => applyOptions(microJob(config), options).job;

describe("the length of a run", () => {
  test("maxSteps replaces the job's steps", () => {
    const { steps, limit, config, fingerprints, hashes } = applied({ maxSteps: 40 });
    assert.deepEqual([steps, limit, config.run.steps], [40, null, 40]);
    assert.deepEqual(fingerprints.contract.run, { seed: 1337 });
    assert.equal(hashes.configHash, applied({}).hashes.configHash);
  });

  test("epochs measure it in passes over the data, which is another contract", () => {
    const { steps, limit, config, fingerprints, hashes } = applied({ epochs: 3 });
    assert.deepEqual([steps, limit, config.run.steps, config.run.epochs], [8, 30, null, 3]);
    assert.deepEqual(fingerprints.contract.run, { seed: 1337, epochs: 3 });
    assert.notEqual(hashes.configHash, applied({}).hashes.configHash);
  });

  test("of both, what comes first ends it", () => {
    assert.deepEqual([applied({ epochs: 3, maxSteps: 5 }).steps, applied({ epochs: 1, maxSteps: 5 }).steps], [5, 3]);
    const inEpochs = { run: { steps: null, epochs: 2 } };
    assert.deepEqual([applied({ maxSteps: 4 }, inEpochs).steps, applied({}, inEpochs).steps], [4, 5]);
  });
});

test("batchSize and seed are the run's, and in its contract", async () => {
  const { config, fingerprints } = applied({ batchSize: 8, seed: 7 });
  assert.deepEqual([config.data.batchSize, config.run.seed], [8, 7]);
  assert.deepEqual([fingerprints.contract.data.batchSize, fingerprints.contract.run.seed], [8, 7]);
  const { calls } = await microRun({ options: { batchSize: 8, maxSteps: 1 } });
  assert.equal(calls.filter((call) => call.startsWith("accumulate")).length, 4);
  const { error } = await microRun({ options: { batchSize: 3 } });
  assert.equal(error?.name, "ConfigError");
  assert.match(error?.message ?? "", /global batch of 3 does not divide into microbatches of 2/);
});

test("checkpointEvery 0 saves at the end only", async () => {
  const { folder } = await microRun({ options: { checkpointEvery: 0 } });
  assert.deepEqual(await saved(folder), ["step-00000020"]);
});

test("onStep comes every logEvery steps, or at each one", async () => {
  /** @type {unknown[]} */
  const seen = [];
  const onStep = (/** @type {Record<string, unknown>} */ { step }) => seen.push(step);
  await microRun({ options: { maxSteps: 6, logEvery: 3, onStep } });
  await microRun({ options: { maxSteps: 2, logEvery: 0, onStep } });
  assert.deepEqual(seen, [3, 6, 1, 2]);
});

test("onEpoch comes at the end of each pass and of the run, onCheckpoint when something is stored", async () => {
  /** @type {unknown[]} */
  const epochs = [];
  /** @type {unknown[]} */
  const checkpoints = [];
  const report = await microRun({
    options: {
      maxSteps: 6, // of 4 samples; a pass has 10
      onEpoch: async (facts) => void epochs.push(facts),
      onCheckpoint: ({ key, step, epoch, batch }) => void checkpoints.push([key, step, epoch, batch]),
    },
  });
  assert.deepEqual(epochs, [
    { epoch: 0, steps: 3, loss: 1 / 3 },
    { epoch: 1, steps: 2, loss: 1 / 5 },
    { epoch: 2, steps: 1, loss: 1 / 6 },
  ]);
  assert.deepEqual(checkpoints, [
    ["step-00000005", 5, 2, 0],
    ["step-00000006", 6, 2, 1],
  ]);
  assert.equal(of(report, "checkpoint").length, 2);
});

test("prepareBatch changes each microbatch, and the targets that it leaves count", async () => {
  const prepareBatch = (/** @type {Batch} */ batch) => {
    const targets = batch.targets.slice();
    targets[0] = IGNORE;
    return new Batch(batch.shape, { ...batch, targets });
  };
  const { calls, folder } = await microRun({ options: { maxSteps: 1, prepareBatch } });
  assert.equal(calls[1], "begin 1 30 2 0.5");
  const [row] = await rowsOf(folder);
  assert.deepEqual([row.supervised_token_count, row.ignored_target_count], [30, 2]);
});

test("an error of a callback ends the run", async () => {
  const onStep = () => {
    throw new Error("not mine");
  };
  assert.equal((await microRun({ options: { onStep } })).error?.message, "not mine");
});

describe("what makes no sense here", () => {
  /** @type {[Record<string, unknown>, RegExp][]} */
  const cases = [
    [{ maxstep: 3 }, /unknown TrainingRunner option 'maxstep': did you mean 'maxSteps'\?/],
    [{ shuffle: false }, /shuffle is False: expected true, for the order of the data is that of the seed/],
    [{ epochs: 0 }, /epochs is 0: expected a whole number of at least 1/],
    [{ maxSteps: 2.5 }, /maxSteps is 2\.5: expected a whole number/],
    [{ batchSize: "4" }, /batchSize is '4'/],
    [{ logEvery: 0.5 }, /logEvery is 0\.5/],
    [{ onStep: "x" }, /onStep is 'x': expected a function/],
    [{ resumeFrom: " " }, /resumeFrom is ' ': expected a text/],
    [{ forceResumeReason: "because" }, /forceResumeReason is only for a forced resume/],
    [{ trainingObjective: "kd" }, /expected the objective of the job, 'cross_entropy'/],
    [{ distillShardIndex: 1 }, /distillShardIndex makes no sense for the objective 'cross_entropy'/],
    [{ ulArtifactDir: "x" }, /ulArtifactDir makes no sense/],
  ];
  for (const [options, message] of cases) {
    test(`${JSON.stringify(options)} is refused before anything begins`, async () => {
      const { error, calls } = await microRun({ options: /** @type {RunOptions} */ (options) });
      assert.equal(error?.name, "ConfigError");
      assert.match(error?.message ?? "", message);
      assert.deepEqual(calls, []);
    });
  }

  test("null is as if nothing was said", async () => {
    const options = { epochs: null, maxSteps: null, shuffle: null, onStep: null, resumeFrom: null, logEvery: null };
    assert.equal((await microRun({ options })).outcome?.step, 20);
  });
});
