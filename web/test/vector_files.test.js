/** @file Which files of golden vectors are run here: all that Python runs outside its ops, with as many cases. */

import assert from "node:assert/strict";
import { existsSync } from "node:fs";
import { test } from "node:test";

import { load, names } from "./support/vectors.js";

/** @type {Record<string, [cases: number, file: string]>} */
const RUN = {
  philox: [35, "random.test.js"],
  random: [164, "random.test.js"],
  stable_json: [151, "stable_json.test.js"],
  loss_scaling: [20, "loss_scaler.test.js"],
  metrics_entries: [157, "metrics.test.js"],
  provenance_environment: [71, "runner_contracts.test.js"],
  checkpoint_record: [16, "record.test.js"],
  ngram: [32, "ngram.test.js"],
  lr_schedule: [20, "optim.test.js"],
  optimizer_table: [8, "optim.test.js"],
  ul_noise: [29, "latent_noise.test.js"],
  safetensors_bad: [64, "safetensors.test.js"],
};

// Vectors of objectives and artifacts, which do not exist yet.
const NOT_RUN_YET = ["kd", "manifests", "triplet"];

test("every file of vectors is run or named as not run", () => {
  assert.deepEqual(new Set(names()), new Set([...Object.keys(RUN), ...NOT_RUN_YET]));
});

test("no file has lost or gained cases, and each named test exists", () => {
  for (const [name, [count, file]] of Object.entries(RUN)) {
    const lists = Object.values(load(name)).filter(Array.isArray);
    assert.equal(
      lists.reduce((sum, list) => sum + list.length, 0),
      count,
      name,
    );
    assert.ok(existsSync(new URL(file, import.meta.url)), file);
  }
});
