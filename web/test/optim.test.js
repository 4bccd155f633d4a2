/** @file Learning rates and the optimizer's table are exact in every language. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { ConfigError } from "../runtime/errors.js";
import { halfCosine, power } from "../runtime/optim/arithmetic.js";
import { learningRate } from "../runtime/optim/schedules.js";
import { DEFAULTS, optimizerSettings } from "../runtime/optim/settings.js";
import { COLUMNS, rows } from "../runtime/optim/table.js";
import { load } from "./support/vectors.js";

const REFUSED = "unknown type keeps its name"; // a type nobody knows is an error here, not a silent constant

test("each step of the schedule vectors", () => {
  const { cases } = load("lr_schedule");
  let steps = 0;
  for (const { name, optimizer, steps: expected } of cases) {
    steps += expected.length;
    if (name === REFUSED) {
      assert.throws(() => learningRate(optimizer, 1), /unknown scheduler type 'polynomial'/);
      continue;
    }
    for (const [index, [rate, position, phase]] of expected.entries()) {
      const [ownRate, ownPosition, ownPhase] = learningRate(optimizer, index + 1);
      assert.deepEqual([ownPosition, ownPhase], [position, phase], `${name}, step ${index + 1}`);
      assert.ok(Math.abs(ownRate - rate) <= 1e-12 * rate + 1e-15 * optimizer.lr, `${name}, step ${index + 1}`);
    }
  }
  assert.deepEqual([cases.length, steps], [20, 500]);
});

test("the rows of the table are those of Python to the last bit", () => {
  const { cases } = load("optimizer_table");
  for (const { optimizer, steps, rows: expected } of cases) {
    const settings = optimizerSettings(optimizer);
    assert.deepEqual(
      steps.map((/** @type {number} */ t) => rows(settings, t, 1)[0]),
      expected,
    );
  }
  assert.equal(cases.length, 8);
  assert.equal(COLUMNS.length, cases[0].rows[0].length);
});

test("windows of the table are slices of it", () => {
  const settings = optimizerSettings({ scheduler: { enabled: true, type: "wsd", totalSteps: 20 } });
  const whole = rows(settings, 1, 30);
  assert.deepEqual(rows(settings, 11, 7), whole.slice(10, 17));
  assert.deepEqual(rows(settings, 5, 0), []);
  assert.throws(() => rows(settings, 0, 1), /step 0/);
  assert.throws(() => learningRate({}, 0), /step 0/);
});

test("absent settings are the defaults, and impossible ones are refused by name", () => {
  assert.deepEqual(optimizerSettings({ lr: null, scheduler: null }), DEFAULTS);
  const bad = /** @type {[Record<string, unknown>, RegExp][]} */ ([
    [{ type: "adamW" }, /'adamW': did you mean 'adam'/],
    [{ weightdecay: 0.1 }, /optimizer field 'weightdecay': did you mean 'weightDecay'/],
    [{ scheduler: { warmup: 3 } }, /optimizer\.scheduler field 'warmup'/],
    [{ scheduler: { type: "cosinus" } }, /'cosinus': did you mean 'cosine'/],
    [{ scheduler: { decayShape: "line" } }, /'line': did you mean 'linear'/],
    [{ lr: -1 }, /optimizer\.lr is -1/],
    [{ lr: Number.NaN }, /optimizer\.lr is nan/],
    [{ lr: "0.1" }, /optimizer\.lr is '0\.1'/],
    [{ beta1: 1 }, /optimizer\.beta1 is 1/],
    [{ eps: 0 }, /optimizer\.eps is 0/],
    [{ scheduler: { gamma: 0 } }, /scheduler\.gamma is 0/],
    [{ lr: 0.1, scheduler: { enabled: true, type: "wsd", minLr: 0.2 } }, /the rate would rise/],
  ]);
  for (const [document, message] of bad) {
    assert.throws(
      () => optimizerSettings(document),
      (error) => error instanceof ConfigError && message.test(error.message),
    );
  }
});

test("the half cosine is accurate and exact at its ends, and so are powers", () => {
  assert.deepEqual([halfCosine(0), halfCosine(1), power(0.9, 0)], [1, 0, 1]);
  for (let step = 0; step <= 1000; step++) {
    assert.ok(Math.abs(halfCosine(step / 1000) - (1 + Math.cos((Math.PI * step) / 1000)) / 2) < 4e-16);
  }
  for (const exponent of [1, 2, 3, 10, 255, 1000]) {
    assert.ok(Math.abs(power(0.999, exponent) / 0.999 ** exponent - 1) < 2e-13);
  }
});
