/** @file Whole runs on WebGPU: against the reference, in parts, with devices that are lost. */

import assert from "node:assert/strict";
import { after, describe, test } from "node:test";

import { validateEntry } from "../runtime/contracts/metrics.js";
import { findHost } from "./support/host.js";
import { trainInParts, trainWithLosses, trainWithPause } from "./support/runs.js";

const { host, missing, release } = await findHost("browser.runner_fixtures");
after(release);

/** @type {Promise<Awaited<ReturnType<typeof trainInParts>>> | null} */
let made = null;
/** The run in one piece, made once. */
const whole = () => {
  made ??= trainInParts(host, [20]);
  return made;
};

// Optional fields of an entry (docs/formats/metrics.md), which a tab does not measure.
const NOT_IN_A_TAB = ["data_wait_share", "peak_device_bytes", "peak_host_bytes"];

/** @param {any[]} entries */
const losses = (entries) => entries.map((entry) => entry.total_loss);

describe("a run on WebGPU", { skip: missing }, () => {
  test("has the entries of the reference, to rounding", async () => {
    const { entries, reference, validation, samples, outcome } = await whole();
    assert.equal(outcome?.status, "finished");
    assert.equal(entries.length, 20);
    const exact = ["step", "epoch", "batch", "lr", "scheduler_index", "scheduler_phase", "optimizer_step", "overflow"];
    const counts = ["supervised_token_count", "ignored_target_count", "total_param_count", "progress_percent_complete"];
    for (const [i, entry] of entries.entries()) {
      validateEntry(entry);
      const expected = reference.entries[i];
      const measured = Object.keys(expected).filter((key) => !NOT_IN_A_TAB.includes(key));
      assert.deepEqual(Object.keys(entry).sort(), measured.sort());
      for (const key of [...exact, ...counts]) assert.equal(entry[key], expected[key], `${key} of step ${i + 1}`);
      near(entry.total_loss, expected.total_loss, 1e-6);
      near(entry.gradient_norm_unclipped, expected.gradient_norm_unclipped, 1e-5);
    }
    assert.equal(validation.length, reference.validation.length);
    for (const [i, row] of validation.entries()) {
      const expected = reference.validation[i];
      assert.deepEqual([row.step, row.split, row.targetTokens], [expected.step, expected.split, expected.targetTokens]);
      near(row.loss, expected.loss, 1e-6);
    }
    assert.deepEqual(samples, reference.samples);
  });

  test("in two parts ends in the same bits", async () => {
    const report = await trainInParts(host, [10, 20]);
    assert.equal(report.stateHash, (await whole()).stateHash);
    assert.deepEqual(losses(report.entries), losses((await whole()).entries));
    assert.deepEqual(report.validation, (await whole()).validation);
  });

  test("whose device is destroyed goes on with another one, and ends in the same bits", async () => {
    const { outcome, stateHash, entries, notes } = await trainWithLosses(host);
    assert.equal(outcome.status, "finished");
    assert.equal(stateHash, (await whole()).stateHash);
    assert.deepEqual(losses(entries), losses((await whole()).entries));
    assert.equal(notes.filter((text) => String(text).includes("going on from the last checkpoint")).length, 2);
  });

  test("that is paused, stopped and started again ends in the same bits", async () => {
    const { first, outcome, stateHash } = await trainWithPause(host);
    assert.equal(first.status, "stopped");
    assert.ok(first.step >= 12 && first.step < 20);
    assert.equal(outcome.status, "finished");
    assert.equal(stateHash, (await whole()).stateHash);
  });
});

/** @param {number} actual @param {number} expected @param {number} tolerance relative */
function near(actual, expected, tolerance) {
  assert.ok(Math.abs(actual - expected) <= tolerance * Math.abs(expected), `${actual} and ${expected}`);
}
