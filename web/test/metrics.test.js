/** @file Entries are judged exactly as the mirrored runner judges them, and those made here always pass. */

import assert from "node:assert/strict";
import { test } from "node:test";

import {
  buildEntry,
  entryError,
  GENERATIONS,
  LARGEST_FLOAT32,
  OBJECTIVE_FIELDS,
  validateEntry,
} from "../runtime/contracts/metrics.js";
import { progressContext, snapshot } from "../runtime/contracts/progress.js";
import { load, RUN, STEP, telemetry } from "./support/vectors.js";

const CASES = load("metrics_entries").cases;

/** @param {Partial<typeof STEP>} changes @param {number} [number] @param {ReturnType<typeof telemetry>} [watch] */
function entryOf(changes = {}, number = 1, watch = telemetry()) {
  const times = { elapsedMs: 100 * number, executed: number, processMs: 100 * number, nowMs: 0 };
  return buildEntry(RUN, { ...STEP, ...changes }, snapshot(progressContext({ maxSteps: 10 }), number, times), watch);
}

test("both generations give their verdict word for word", () => {
  const verdicts = { accepted: 0, refused: 0 };
  for (const { name, entry, errors } of CASES) {
    for (const generation of GENERATIONS) {
      assert.equal(entryError(entry, generation), errors[generation], `${name} (${generation})`);
      verdicts[errors[generation] === null ? "accepted" : "refused"] += 1;
    }
    const fault = errors.v1 ?? errors.v1_profile;
    if (fault === null) validateEntry(entry);
    else assert.throws(() => validateEntry(entry), { name: "ContractMismatch", message: fault });
  }
  assert.deepEqual([CASES.length, verdicts], [157, { accepted: 51, refused: 263 }]);
});

test("an entry made here satisfies both generations and reports what happened", () => {
  const entry = entryOf();
  validateEntry(entry);
  assert.equal(entry.runtime_preset, "stdlib-tiny");
  assert.equal(entry.runtime_profile, "stdlib-tiny");
  assert.deepEqual([entry.gradient_norm_unclipped, entry.gradient_norm_clipped, entry.clipped_event_count], [2, 1, 1]);
  assert.deepEqual([entry.overflow, entry.skipped_optimizer_step, entry.loss_overflow], [false, false, false]);
  assert.deepEqual([entry.lr, entry.effective_lr], [1e-3, 1e-3]);
  assert.ok(OBJECTIVE_FIELDS.every((name) => entry[name] === null));
});

test("every field of the metrics schema is in an entry, and no other", () => {
  const full = CASES.find((/** @type {any} */ { name }) => name === "valid full cross_entropy").entry;
  const entry = entryOf();
  assert.deepEqual(
    Object.keys(full).filter((name) => !Object.hasOwn(entry, name)),
    [],
  );
  assert.ok(!Object.values(entry).includes(undefined));
});

test("an overflow step is a valid entry that says what was skipped", () => {
  const entry = entryOf({ overflow: true, gradNorm: null, clipFactor: 1, lossScale: 1024, nanCount: 3, infCount: 40 });
  assert.deepEqual([entry.overflow, entry.skipped_optimizer_step, entry.loss_scale], [true, true, 1024]);
  assert.deepEqual([entry.gradient_norm_unclipped, entry.gradient_norm_clipped], [null, null]);
  assert.deepEqual([entry.effective_lr, entry.lr, entry.nan_count, entry.inf_count], [null, 1e-3, 3, 40]);
});

test("a loss that overflowed stays finite and out of the windows", () => {
  const watch = telemetry({ windowSize: 4 });
  entryOf({ totalLoss: 2 }, 1, watch);
  const entry = entryOf({ step: 2, totalLoss: null, overflow: true, gradNorm: null }, 2, watch);
  assert.deepEqual([entry.total_loss, entry.loss_overflow, entry.window_loss_avg], [LARGEST_FLOAT32, true, 2]);
});

test("objective metrics join the entry but never replace a field of the step", () => {
  assert.equal(entryOf({ objectiveMetrics: { z_loss: 0.25 } }).z_loss, 0.25);
  for (const name of ["total_loss", "lr", "telemetry_alerts", "progress_global_step"]) {
    assert.throws(() => entryOf({ objectiveMetrics: { [name]: 0 } }), {
      name: "ContractMismatch",
      message: new RegExp(`'${name}' would overwrite`),
    });
  }
});

test("an entry that would break the schema is never made", () => {
  assert.throws(() => entryOf({ totalLoss: Number.NaN }), /total_loss must be a finite number/);
});

test("an alert is in the entry and ends the run only when asked", () => {
  const thresholds = { maxGradientNorm: 0.5 };
  const quiet = telemetry({ alerts: { enabled: true, thresholds } });
  const entry = entryOf({}, 1, quiet);
  assert.deepEqual(entry.telemetry_alerts, ["max_gradient_norm_exceeded"]);
  quiet.check(entry);
  const strict = telemetry({ alerts: { enabled: true, failOnAlert: true, thresholds } });
  assert.throws(() => strict.check(entry), {
    name: "AlertRaised",
    message: "training telemetry alert(s): max_gradient_norm_exceeded at step 1.",
    exitCode: 4,
  });
});
