/** @file Philox, stream keys, initial weights, shuffle and dropout masks are those of the golden vectors, to the bit. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { DataContractError, LimitExceeded } from "../runtime/errors.js";
import { dropoutKey, keepMask } from "../runtime/random/dropout.js";
import { normal } from "../runtime/random/initial.js";
import { philox4x32 } from "../runtime/random/philox.js";
import { epochKey, permute, sample, samplePosition, samples } from "../runtime/random/shuffle.js";
import { streamKey } from "../runtime/random/streams.js";
import { load } from "./support/vectors.js";

const RANDOM = load("random");

/** @param {string[]} words @returns {any} */
const numbers = (words) => words.map((word) => Number.parseInt(word, 16));

/** @param {Iterable<number>} words @returns {string[]} */
const hex = (words) => Array.from(words, (word) => word.toString(16).padStart(8, "0"));

test("philox gives the words of the vectors", () => {
  const { cases } = load("philox");
  for (const { name, ctr, key, out } of cases) {
    assert.deepEqual(philox4x32(numbers(ctr), numbers(key)), numbers(out), name);
  }
  assert.equal(cases.length, 35);
});

test("stream keys are golden", () => {
  for (const { seed, name, key } of RANDOM.keys) {
    assert.deepEqual(hex(streamKey(seed, name)), key, `${seed} ${name}`);
    assert.deepEqual(streamKey(BigInt(seed), name), streamKey(seed, name));
  }
  assert.equal(RANDOM.keys.length, 80);
});

test("initial weights are golden, also when made piece by piece", () => {
  for (const { seed, name, std, bits } of RANDOM.initial) {
    const values = normal(seed, name, bits.length, std);
    assert.deepEqual(hex(new Uint32Array(values.buffer)), bits, name);
    assert.deepEqual(normal(seed, name, 3, std, 4), values.slice(4, 7));
  }
  assert.equal(RANDOM.initial.length, 27);
});

test("shuffles are golden", () => {
  for (const { n, seed, epoch, positions, samples: expected } of RANDOM.shuffle) {
    const key = epochKey(seed, epoch);
    const found = positions.map((/** @type {number} */ position) => permute(position, n, key));
    assert.deepEqual(found, expected, `${n} ${seed} ${epoch}`);
  }
  assert.equal(RANDOM.shuffle.length, 45);
  const { n, seed, samples: order } = RANDOM.order;
  assert.deepEqual(samples(seed, 0, 24, n), order);
  assert.deepEqual(
    Array.from({ length: 24 }, (_, index) => sample(seed, index, n)),
    order,
  );
});

test("any window of the order is a slice of it, across epochs", () => {
  const whole = samples(3, 0, 21, 7);
  for (let first = 0; first < 21; first++) {
    for (const count of [0, 1, 5, 21 - first]) {
      const length = Math.min(count, 21 - first);
      assert.deepEqual(samples(3, first, length, 7), whole.slice(first, first + length));
    }
  }
  for (let epoch = 0; epoch < 3; epoch++) {
    assert.deepEqual(new Set(whole.slice(7 * epoch, 7 * epoch + 7)).size, 7);
  }
  assert.deepEqual(samplePosition(20, 7), [2, 6]);
});

test("what cannot be shuffled is refused by name", () => {
  assert.throws(() => permute(5, 5, [0, 0]), /position 5 .* 5 samples .* expected 0\.\.4/);
  for (const bad of [() => permute(-1, 5, [0, 0]), () => permute(0.5, 5, [0, 0]), () => permute(0, 0, [0, 0])]) {
    assert.throws(bad, DataContractError);
  }
  assert.throws(() => samplePosition(-1, 5), /index -1 is negative/);
  assert.throws(() => permute(0, 2 ** 48 + 1, [0, 0]), LimitExceeded);
});

test("dropout masks are golden", () => {
  for (const { seed, site, step, sample: index, rate, keep } of RANDOM.dropout) {
    assert.deepEqual([...keepMask(dropoutKey(seed, site), { step, sample: index }, rate, keep.length)], keep);
  }
  assert.equal(RANDOM.dropout.length, 12);
});
