/** @file How programs are cut into passes and submits, with an encoder that writes down what it is told. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { CommandStream, Timestamps } from "../runtime/command_stream.js";

/** @import {Prepared} from "../runtime/command_stream.js" */

/** A device whose command buffers are lists of words. */
function recorder() {
  /** @type {string[][]} */
  const submits = [];
  const device = {
    createCommandEncoder() {
      /** @type {string[]} */
      const said = [];
      return {
        beginComputePass(/** @type {GPUComputePassDescriptor | undefined} */ descriptor) {
          const slot = descriptor?.timestampWrites?.beginningOfPassWriteIndex;
          said.push(slot === undefined ? "pass" : `pass@${slot}`);
          return {
            setPipeline() {},
            setBindGroup() {},
            dispatchWorkgroups: (/** @type {number} */ x) => said.push(String(x)),
            end: () => said.push("end"),
          };
        },
        clearBuffer: (/** @type {unknown} */ buffer) => said.push(`clear ${buffer}`),
        finish: () => said,
      };
    },
  };
  /** @param {number} perSubmit @param {Timestamps | null} [timestamps] */
  const stream = (perSubmit, timestamps = null) => {
    const submit = (/** @type {unknown} */ commands) => void submits.push(/** @type {string[]} */ (commands));
    return new CommandStream(/** @type {GPUDevice} */ (/** @type {unknown} */ (device)), submit, perSubmit, timestamps);
  };
  return { submits, stream };
}

/** @param {number} x @param {string} [phase] */
function dispatch(x, phase = "") {
  return /** @type {Prepared} */ (/** @type {unknown} */ ({ pipeline: null, group: null, x, y: 1, z: 1, phase }));
}

const CLEAR = /** @type {Prepared} */ (/** @type {unknown} */ (["a", "b"]));
const QUERIES = /** @type {GPUQuerySet} */ (/** @type {unknown} */ ({}));

test("a program is one pass in one submit, and clears stand outside passes", () => {
  const { submits, stream } = recorder();
  const one = stream(Number.POSITIVE_INFINITY);
  one.program([CLEAR, dispatch(1), dispatch(2), CLEAR, dispatch(3)]);
  one.program([dispatch(4)]);
  one.finish();
  assert.deepEqual(submits, [
    ["clear a", "clear b", "pass", "1", "2", "end", "clear a", "clear b", "pass", "3", "end", "pass", "4", "end"],
  ]);
});

test("long programs are cut, and nothing is lost or submitted twice", () => {
  const { submits, stream } = recorder();
  const short = stream(2);
  short.program([dispatch(1), dispatch(2), dispatch(3)]);
  short.program([dispatch(4), dispatch(5)]);
  short.finish();
  short.finish();
  assert.deepEqual(submits, [
    ["pass", "1", "2", "end"],
    ["pass", "3", "end", "pass", "4", "end"],
    ["pass", "5", "end"],
  ]);
});

test("with timestamps a pass ends where the phase changes, and where a submit does", () => {
  const { submits, stream } = recorder();
  const timestamps = new Timestamps(QUERIES, 32, 32);
  const timed = stream(3, timestamps);
  timed.program([dispatch(1, "forward"), dispatch(2), dispatch(3, "backward"), dispatch(4, "backward")]);
  timed.program([dispatch(5)]);
  timed.finish();
  assert.deepEqual(submits, [
    ["pass@32", "1", "2", "end", "pass@34", "3", "end"],
    ["pass@36", "4", "end", "pass@38", "5", "end"],
  ]);
  assert.deepEqual(timestamps.phases, ["forward", "backward", "backward", ""]);
  assert.equal(timestamps.overflowed, false);
});

test("without slots a pass goes untimed, and that is noted", () => {
  const { stream } = recorder();
  const timestamps = new Timestamps(QUERIES, 0, 2);
  const timed = stream(1, timestamps);
  timed.program([dispatch(1, "forward"), dispatch(2, "forward")]);
  assert.equal(timestamps.overflowed, true);
  assert.deepEqual(timestamps.phases, ["forward"]);
});
