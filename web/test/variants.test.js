/** @file Which variant of a kernel is chosen: the rule of the Python side (tests/webgpu/test_variants.py has the same cases). */

import assert from "node:assert/strict";
import { test } from "node:test";

import { timeRounds, winner } from "../runtime/variants.js";

/** @type {[name: string, rounds: number[][], index: number][]} */
const CASES = [
  ["the faster one", Array(3).fill([1, 0.8]), 1],
  ["the best guess when it is too close to call", Array(3).fill([1, 0.97]), 0],
  ["the margin itself is too close", [[1, 0.95]], 0],
  [
    "rounds that slow down as a whole",
    [
      [1, 0.8, 0.7],
      [5, 4, 3.5],
      [9, 7.2, 6.3],
    ],
    2,
  ],
  [
    "single slow measurements",
    [
      [1, 0.8],
      [1, 9],
      [1, 0.8],
      [1, 0.8],
      [9, 0.8],
    ],
    1,
  ],
  [
    "a guess that was disturbed",
    [
      [9, 2],
      [1, 2],
      [1, 2],
      [9, 2],
      [1, 2],
    ],
    0,
  ],
];

for (const [name, rounds, index] of CASES) {
  test(`the winner is judged round by round: ${name}`, () => assert.equal(winner(rounds), index));
}

/**
 * Times that choices with these seconds of work get.
 *
 * @param {number[]} work seconds of one dispatch of each
 */
async function timed(work) {
  let now = 0;
  let dispatches = 0;
  const executor = {
    device: { scoped: async (/** @type {() => unknown} */ make) => make() },
    encoded: (/** @type {unknown} */ _, /** @type {number} */ choice) => choice,
    stream: () => ({
      program: (/** @type {number[]} */ items) => {
        dispatches += items.length;
        for (const item of items) now += work[item];
      },
      finish: () => {},
    }),
    fence: async () => {},
  };
  const dispatch = { choices: [...work.keys()] };
  const rounds = await timeRounds(/** @type {any} */ (executor), /** @type {any} */ (dispatch), () => now);
  return { rounds, dispatches };
}

test("short work is timed many dispatches at once, and hopeless choices once", async () => {
  const short = await timed([0.001, 0.002]);
  assert.ok(short.rounds.every(([a, b]) => Math.abs(a - 0.001) < 1e-9 && Math.abs(b - 0.002) < 1e-9));
  assert.equal(short.dispatches, 2 * 2 + 3 * 2 * 10);
  const long = await timed([0.5, 0.1, 0.09]);
  assert.equal(winner(long.rounds), 2);
  assert.equal(long.dispatches, 2 * 3 + 3 * 2, "the first one is far behind");
  assert.ok(
    (await timed([0, 0])).rounds.flat().every((seconds) => seconds > 0),
    "a clock that stands still",
  );
});
