/** @file Rows of the ring and timestamps, decoded. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { decodeRow, FLOAT32_MAX, NOT_TIMED, stepTimes } from "../runtime/step_result.js";

/** @param {number} flags */
function row(flags) {
  const words = new Uint32Array(16);
  const floats = new Float32Array(words.buffer);
  words.set([7, 0, 0, 100]);
  floats.set([2.5, 2.25], 1);
  floats.set([3, 0.5, 256], 4);
  words.set([flags, 4, 5, 6, 2], 7);
  floats[12] = 128;
  return words;
}

test("a row of a good step", () => {
  assert.deepEqual(decodeRow(row(0), NOT_TIMED), {
    dataStep: 7,
    loss: 2.5,
    nll: 2.25,
    targetTokens: 100,
    gradNorm: 3,
    clipFactor: 0.5,
    lossScale: 256,
    lossScaleAfter: 128,
    growthCounter: 2,
    overflow: false,
    lossOverflow: false,
    nanCount: 4,
    infCount: 5,
    optimizerStep: 6,
    ...NOT_TIMED,
  });
});

test("what did not fit a float32 is said to be its largest, and a norm that is no number is null", () => {
  const result = decodeRow(row(7), NOT_TIMED);
  assert.equal(result.loss, FLOAT32_MAX);
  assert.equal(result.nll, FLOAT32_MAX);
  assert.equal(result.gradNorm, null);
  assert.equal(result.overflow, true);
  assert.equal(result.lossOverflow, true);
});

test("times add up by phase, and the step lasts from the first pass to the last", () => {
  const ticks = BigUint64Array.of(1_000_000n, 3_000_000n, 3_500_000n, 7_500_000n, 8_000_000n, 8_250_000n);
  assert.deepEqual(stepTimes(["forward", "backward", ""], ticks), {
    stepTimeMs: 7.25,
    forwardMs: 2,
    backwardMs: 4,
    optimizerMs: 0.25,
    timingSource: "device",
  });
});

test("blurred or broken timestamps measure nothing", () => {
  assert.equal(stepTimes(["forward", "backward"], BigUint64Array.of(0n, 0n, 0n, 100_000n)), NOT_TIMED);
  assert.equal(stepTimes(["forward", "backward"], BigUint64Array.of(9n, 5n, 6n, 8n)), NOT_TIMED);
});
