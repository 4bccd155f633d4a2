/** @file The loss scaler moves exactly as its vectors say. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { DEFAULTS, DynamicLossScaler } from "../runtime/contracts/loss_scaler.js";
import { CheckpointCorrupt, ConfigError } from "../runtime/errors.js";
import { load } from "./support/vectors.js";

const CASES = load("loss_scaling").cases;

test("each trace is replayed exactly", () => {
  let steps = 0;
  for (const { name, config, overflow, steps: expected } of CASES) {
    const scaler = new DynamicLossScaler(config);
    for (const [index, flag] of overflow.entries()) {
      const used = scaler.stepScale();
      scaler.update(flag);
      assert.deepEqual({ used, ...scaler.state() }, expected[index], `${name}, step ${index}`);
      steps += 1;
    }
  }
  assert.deepEqual([CASES.length, steps], [20, 2271]);
});

test("a restored scaler continues where it was", () => {
  const config = { enabled: true, initialScale: 4, growthInterval: 3 };
  const [scaler, resumed] = [new DynamicLossScaler(config), new DynamicLossScaler(config)];
  for (const overflow of [false, false, true, false]) scaler.update(overflow);
  resumed.restore(scaler.state());
  for (const overflow of [false, false, false, true]) {
    scaler.update(overflow);
    resumed.update(overflow);
    assert.deepEqual(resumed.state(), scaler.state());
  }
});

test("impossible states are refused", () => {
  for (const state of [{}, { scale: 0, growthCounter: 0 }, { scale: 2, growthCounter: -1 }]) {
    const restore = () => new DynamicLossScaler({ enabled: true }).restore(state);
    assert.throws(restore, (error) => error instanceof CheckpointCorrupt && /loss scaler state/.test(error.message));
  }
});

test("unknown and unusable settings are refused", () => {
  assert.throws(() => new DynamicLossScaler({ initialscale: 2 }), {
    name: "ConfigError",
    message: /'initialscale': did you mean 'initialScale'/,
  });
  for (const value of [0, -1, Number.NaN, Number.POSITIVE_INFINITY, "2", true]) {
    assert.throws(() => new DynamicLossScaler({ minScale: value }), ConfigError);
  }
});

test("no configuration means the defaults and no scaling", () => {
  const scaler = new DynamicLossScaler(null);
  assert.deepEqual([scaler.enabled, scaler.stepScale(), scaler.scale], [false, 1, DEFAULTS.initialScale]);
});

test("only powers of two may live on a device", () => {
  /** @param {Record<string, unknown>} config */
  const exact = (config) => new DynamicLossScaler({ enabled: true, ...config }).powersOfTwo();
  assert.deepEqual([{}, { initialScale: 0.25, backoffFactor: 0.125 }, { minScale: 2 ** -1074 }].map(exact), [
    true,
    true,
    true,
  ]);
  assert.deepEqual([{ initialScale: 1000 }, { scaleFactor: 1.5 }].map(exact), [false, false]);
});
