/** @file Errors have the names and exit codes of Python's. */

import assert from "node:assert/strict";
import { test } from "node:test";

import * as errors from "../runtime/errors.js";

test("every class has its exit code, its name, and HybridError above it", () => {
  /** @type {Record<string, number>} */
  const codes = {
    HybridError: 1,
    ConfigError: 2,
    ContractMismatch: 3,
    CheckpointNotFound: 1,
    CheckpointCorrupt: 3,
    DataContractError: 3,
    DeviceLost: 1,
    LimitExceeded: 1,
    NonFiniteError: 1,
    StopRequested: 75,
  };
  for (const [name, code] of Object.entries(codes)) {
    const error = new /** @type {any} */ (errors)[name]("what happened");
    assert.ok(error instanceof errors.HybridError && error instanceof Error);
    assert.deepEqual([error.name, error.exitCode, error.message], [name, code, "what happened"]);
    assert.deepEqual(errors.describe(error), { name, message: "what happened", exitCode: code });
  }
  assert.deepEqual(
    [new errors.AlertRaised(["a", "b"], 7).message, new errors.AlertRaised([], 1).exitCode],
    ["training telemetry alert(s): a, b at step 7.", 4],
  );
  assert.equal(new errors.MissingDependency("x", "npm install x").exitCode, 2);
});

test("other errors are described by their message alone", () => {
  assert.deepEqual(errors.describe(new RangeError("deep")), { name: "Error", message: "deep", exitCode: 1 });
  assert.deepEqual(errors.describe("thrown text"), { name: "Error", message: "thrown text", exitCode: 1 });
});
