/** @file How far the host may run ahead of the device, with a device and a clock made for the purpose. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { Flight } from "../runtime/flight.js";

/** A device that finishes steps when told to. */
function bench() {
  /** @type {{resolve: () => void, reject: (error: Error) => void}[]} */
  const open = [];
  const clock = { now: 0 };
  const fence = () => /** @type {Promise<void>} */ (new Promise((resolve, reject) => open.push({ resolve, reject })));
  const flight = new Flight(fence, () => clock.now);
  /** @param {number} seconds */
  const finish = async (seconds) => {
    clock.now += seconds;
    open.shift()?.resolve();
    await settled();
  };
  /** Whether the host may go on without waiting. */
  const free = async () => {
    let done = false;
    flight.bound().then(
      () => {
        done = true;
      },
      () => {},
    );
    await settled();
    return done;
  };
  return { flight, open, clock, finish, free };
}

/** Lets every promise that can settle do so. */
function settled() {
  return new Promise((resolve) => setTimeout(resolve));
}

test("two steps may be under way, and the third waits", async () => {
  const { flight, finish, free } = bench();
  flight.add();
  flight.add();
  assert.equal(await free(), true);
  flight.add();
  assert.equal(await free(), false);
  await finish(1);
  assert.equal(await free(), true);
});

test("of short steps as many as fit a quarter of a second", async () => {
  const { flight, finish, free } = bench();
  flight.add();
  await finish(0.01);
  assert.equal(flight.stepSeconds, 0.01);
  for (let step = 0; step < 25; step++) flight.add();
  assert.equal(await free(), true);
  flight.add();
  assert.equal(await free(), false);
});

test("a step is timed from the end of the one before it", async () => {
  const { flight, finish } = bench();
  flight.add();
  flight.add();
  await finish(0.1);
  await finish(0.1);
  assert.ok(Math.abs(flight.stepSeconds - 0.1) < 1e-12);
});

test("steps that a browser reports together count as equally long", async () => {
  const { flight, finish } = bench();
  for (let round = 0; round < 40; round++) {
    for (let step = 0; step < 5; step++) flight.add();
    await finish(0.1);
    for (let step = 1; step < 5; step++) await finish(0);
  }
  assert.ok(flight.stepSeconds > 0.005 && flight.stepSeconds < 0.04, String(flight.stepSeconds));
});

test("draining waits for all, and an error comes out once", async () => {
  const { flight, open, finish } = bench();
  flight.add();
  flight.add();
  const drained = flight.drain();
  await finish(1);
  open.shift()?.reject(new Error("lost"));
  await assert.rejects(drained, /lost/);
  await flight.drain();
});
