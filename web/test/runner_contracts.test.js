/** @file Seed, provenance, environment, memory, telemetry, progress and identity follow the golden vectors. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { currentEnvironment, gpuAdapter, javascriptEnvironment } from "../runtime/contracts/environment.js";
import { checkpointIdentity, comparedFields, forceResumeSource } from "../runtime/contracts/identity.js";
import { heapStats, memoryStats } from "../runtime/contracts/memory.js";
import { Progress, progressContext, snapshot } from "../runtime/contracts/progress.js";
import { buildProvenance } from "../runtime/contracts/provenance.js";
import { resolveSeed } from "../runtime/contracts/seed.js";
import { alerts, RollingWindow, resolveTelemetry, Telemetry } from "../runtime/contracts/telemetry.js";
import { isoTime, parseTime, toNumber } from "../runtime/contracts/values.js";
import { CheckpointCorrupt } from "../runtime/errors.js";
import { load } from "./support/vectors.js";

/** @type {any[]} */
const CASES = load("provenance_environment").cases;

// Accidents of JavaScript's Number() that are refused here: what was left empty is not the number 0.
/** @type {Record<string, number>} */
const COERCED = { "null counts as 0 (JS coercion)": 5, "empty text counts as 0 (JS coercion)": 1337 };

/** @param {number | null} found @param {number | null} expected @param {string} what relative 1e-12 */
function close(found, expected, what) {
  if (found === null || expected === null) assert.equal(found, expected, what);
  else assert.ok(Math.abs(found - expected) <= 1e-12 * Math.abs(expected), `${what}: ${found}, expected ${expected}`);
}

/** @type {Record<string, [cases: number, check: (one: any) => void]>} */
const KINDS = {
  build_provenance: [16, (one) => assert.deepEqual(buildProvenance(one.options, one.env), one.expected, one.name)],
  gpu_adapter: [14, (one) => assert.deepEqual(gpuAdapter(one.adapter_info), one.expected, one.name)],
  seed: [
    11,
    (one) => assert.equal(resolveSeed(one.options, one.training), COERCED[one.name] ?? one.expected, one.name),
  ],
  telemetry: [
    8,
    (one) => {
      const settings = resolveTelemetry(one.telemetry);
      assert.deepEqual(settings, one.settings, one.name);
      for (const point of one.entries) assert.deepEqual(alerts(settings, point.entry), point.alerts, one.name);
    },
  ],
  window: [
    3,
    (one) => {
      const window = new RollingWindow(one.windowSize);
      for (const [index, value] of one.values.entries()) close(window.push(value), one.expected[index], one.name);
    },
  ],
  // The vectors' ETA divides by the global step: an `executed` equal to it must give the very same numbers.
  progress: [
    10,
    (one) => {
      if (one.error) {
        const message = { name: "ConfigError", message: one.error };
        assert.throws(() => progressContext(one.options, one.distill), message, one.name);
        return;
      }
      const context = progressContext(one.options, one.distill);
      assert.deepEqual(context, one.context, one.name);
      for (const { step, elapsedMs, snapshot: expected } of one.points) {
        const executed = expected.globalStep || 1;
        const found = snapshot(context, step, { elapsedMs, executed, processMs: elapsedMs, nowMs: 0 });
        const { etaIso: _, ...own } = found;
        assert.deepEqual(new Set(Object.keys(own)), new Set(Object.keys(expected)), one.name);
        for (const [name, value] of Object.entries(own)) close(value, expected[name], `${one.name} ${name}`);
      }
    },
  ],
  environment: [
    4,
    (one) => assert.deepEqual(javascriptEnvironment(one.options, one.process, one.navigator), one.expected, one.name),
  ],
  memory_stats: [2, (one) => assert.deepEqual(heapStats(one.memory), one.expected, one.name)],
  checkpoint_metadata: [
    3,
    (one) => {
      const identity = checkpointIdentity(one.options, one.training);
      assert.deepEqual(identity, one.expected, one.name);
      assert.deepEqual(comparedFields(identity), one.compared_fields, one.name);
      assert.equal(forceResumeSource(one.options), one.forceResumeSource, one.name);
    },
  ],
};

for (const [kind, [count, check]] of Object.entries(KINDS)) {
  test(`${count} cases of ${kind}`, () => {
    const cases = CASES.filter((one) => one.kind === kind);
    assert.equal(cases.length, count);
    cases.forEach(check);
  });
}

test("the vectors have no other kinds", () => {
  assert.deepEqual(new Set(CASES.map((one) => one.kind)), new Set(Object.keys(KINDS)));
  assert.equal(CASES.length, 71);
});

test("our own build variables come first", () => {
  const variables = {
    ...{ DOPPLER_BUILD_COMMIT: "d", GIT_COMMIT: "g", HYBRID_BUILD_COMMIT: "h", HYBRID_BUILD_ID: "7", BUILD_ID: "9" },
    ...{ BUILD_TIMESTAMP: "5", HYBRID_BUILD_TIMESTAMP: "2026-01-02" },
  };
  assert.deepEqual(buildProvenance({}, variables), {
    commitHash: "h",
    buildId: "7",
    buildTimestamp: "2026-01-02T00:00:00.000Z",
  });
});

test("a bigint seed keeps the digits that a number would lose", () => {
  assert.equal(resolveSeed({ seed: 2n ** 63n + 1n }, { seed: 3 }), 2n ** 63n + 1n);
});

test("the environment of this runtime is named in the same words", () => {
  const facts = currentEnvironment({ command: " train ", gpuAdapterInfo: { vendor: "acme", serial: 1 } });
  assert.ok(["node", "deno"].includes(String(facts.runtime)));
  assert.equal(facts.command, "train");
  assert.deepEqual(facts.gpuAdapter, { vendor: "acme" });
  const stats = memoryStats({ params: 4, total: 4 });
  assert.deepEqual(stats?.device_bytes, { params: 4, total: 4 });
});

test("text that spells a number is one, and accidents of Number() are not", () => {
  for (const [text, number] of /** @type {[unknown, number][]} */ ([
    ["42", 42],
    [" 1e3\n", 1000],
    [".5", 0.5],
    ["5.", 5],
    ["0x1F", 31],
    ["-2", -2],
  ])) {
    assert.equal(toNumber(text), number);
  }
  for (const value of [
    null,
    "",
    "  ",
    true,
    [],
    "1_000",
    "nan",
    "Infinity",
    "12px",
    "\x1c1",
    Number.POSITIVE_INFINITY,
  ]) {
    assert.ok(Number.isNaN(toNumber(value)), String(value));
  }
});

test("times become ISO in UTC", () => {
  for (const [value, expected] of [
    [0, "1970-01-01T00:00:00.000Z"],
    [-1, "1969-12-31T23:59:59.999Z"],
    [1767225600123.9, "2026-01-01T00:00:00.123Z"],
    ["2026-02", "2026-02-01T00:00:00.000Z"],
    ["2024-02-29T24:00", "2024-03-01T00:00:00.000Z"],
    ["2026-01-02T03:04:05.6789Z", "2026-01-02T03:04:05.678Z"],
    ["2026-01-02T03:04+02:30", "2026-01-02T00:34:00.000Z"],
    ["0999-01-01", "0999-01-01T00:00:00.000Z"],
    ["0000-01-01", null],
    ["2026-02-30", null],
    ["2026-13", null],
    ["2026-01-02T24:01Z", null],
    ["2026-01-02T03:60Z", null],
    ["2 January 2026", null],
    [1e300, null],
    [null, null],
    [{}, null],
  ]) {
    assert.equal(parseTime(value), expected, String(value));
  }
  assert.equal(isoTime(1e15), null);
});

/** @param {string} mode @param {number[]} epochs @returns {(number | null)[]} */
function averages(mode, epochs) {
  const watch = new Telemetry(resolveTelemetry({ mode, windowSize: 3 }));
  return epochs.map((epoch, index) => watch.observe(index + 1, 10, epoch)[0]);
}

test("modes decide which entries carry averages", () => {
  assert.deepEqual(averages("step", [0, 0, 0, 0, 0]), [1, 1.5, 2, 3, 4]);
  assert.deepEqual(averages("window", [0, 0, 0, 0, 0, 0, 0]), [null, null, 2, null, null, 5, null]);
  assert.deepEqual(averages("epoch", [0, 0, 0, 1, 1]), [1, 1.5, 2, 4, 4.5]);
});

test("a resumed run continues its windows", () => {
  for (const mode of ["step", "window", "epoch"]) {
    const settings = resolveTelemetry({ mode, windowSize: 3 });
    const [whole, first, second] = [new Telemetry(settings), new Telemetry(settings), new Telemetry(settings)];
    /** @type {[number | null, number][]} */
    const values = [
      [2, 0],
      [3, 0],
      [null, 0],
      [5, 1],
      [7, 1],
      [11, 2],
    ];
    const expected = values.map(([value, epoch]) => whole.observe(value, 1, epoch));
    const observed = values.slice(0, 4).map(([value, epoch]) => first.observe(value, 1, epoch));
    second.restore(first.state());
    observed.push(...values.slice(4).map(([value, epoch]) => second.observe(value, 1, epoch)));
    assert.deepEqual(observed, expected, mode);
  }
});

test("an impossible telemetry state is refused", () => {
  const watch = new Telemetry(resolveTelemetry());
  for (const change of [{ loss: null }, { stepTimeMs: ["x"] }, { observed: 1.5 }, { epoch: true }]) {
    assert.throws(() => watch.restore({ ...watch.state(), ...change }), CheckpointCorrupt);
  }
});

test("the ETA comes from the steps of this process", () => {
  let now = 0;
  const progress = new Progress(
    progressContext({ maxSteps: 100 }),
    () => now,
    90_000,
    () => 1_767_225_600_000,
  );
  now = 1000;
  const state = progress.finishStep(91);
  assert.deepEqual([state.elapsedMs, state.etaMs, state.etaIso], [91_000, 9000, "2026-01-01T00:00:09.000Z"]);
  assert.equal(progress.elapsedMs, 91_000);
  now = -5000; // a clock that was set back gives no negative times
  assert.deepEqual([progress.finishStep(92).elapsedMs, progress.elapsedMs], [90_000, 90_000]);
});
