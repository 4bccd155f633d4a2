/** @file The noise of the latent objectives is that of the golden vectors. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { levels, noiseSeed, normals } from "../runtime/random/latent_noise.js";
import { load } from "./support/vectors.js";

const { cases } = load("ul_noise");

/**
 * Equal but for the last bit of a float32, where engines' logarithms and cosines may differ.
 *
 * @param {ArrayLike<number>} found
 * @param {number[]} expected
 */
function sameFloats(found, expected) {
  assert.equal(found.length, expected.length);
  expected.forEach((value, i) => {
    assert.ok(Math.abs(Math.fround(found[i]) - value) <= 2 ** -23 * Math.abs(value), `${i}: ${found[i]}, not ${value}`);
  });
}

test("noise and noisy latents are golden", () => {
  const full = cases.filter((/** @type {any} */ { kind }) => kind === "full");
  for (const { seed, step, clean, lambda, alpha, sigma, noise, noisy } of full) {
    const found = new Float64Array(clean.length);
    normals(noiseSeed(seed, step), found);
    sameFloats(found, noise);
    const [signal, spread] = levels(lambda);
    assert.ok(Math.abs(signal - alpha) <= 1e-12 && Math.abs(spread - sigma) <= 1e-12);
    const sum = found.map((value, i) => signal * clean[i] + spread * value);
    // A sum near zero keeps the rounding of its terms.
    sum.forEach((value, i) => {
      assert.ok(Math.abs(Math.fround(value) - noisy[i]) <= 2 ** -23 * Math.max(Math.abs(noisy[i]), 2 ** -20));
    });
  }
  assert.equal(full.length, 27);
});

test("elements far out are golden too, one by one", () => {
  const sampled = cases.filter((/** @type {any} */ { kind }) => kind === "sampled");
  for (const { seed, step, noise_seed: expected, indices, noise } of sampled) {
    assert.equal(noiseSeed(seed, step), expected);
    const one = new Float32Array(1);
    sameFloats(
      indices.map((/** @type {number} */ index) => {
        normals(expected, one, index);
        return one[0];
      }),
      noise,
    );
  }
  assert.equal(sampled.length, 2);
});
