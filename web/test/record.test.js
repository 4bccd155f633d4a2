/** @file Checkpoint records: hashes are recomputed, tensors cut to their shape, disagreements named. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { checkpointHash, requireExpected, tensors, values, verify } from "../runtime/contracts/record.js";
import { CheckpointCorrupt, ContractMismatch } from "../runtime/errors.js";
import { load } from "./support/vectors.js";

/** @type {any[]} */
const CASES = load("checkpoint_record").cases;

/** @param {string} kind @param {number} count @returns {any[]} */
function of(kind, count) {
  const cases = CASES.filter((one) => one.kind === kind);
  assert.equal(cases.length, count);
  return cases;
}

test("the hash of the content", () => {
  for (const one of [...of("valid", 6), ...of("tampered", 5)]) {
    assert.equal(checkpointHash(one.record), one.computed_hash, one.name);
    if (one.hash_matches) verify(one.record);
    else assert.throws(() => verify(one.record), { name: "CheckpointCorrupt", message: new RegExp(one.computed_hash) });
  }
});

test("tensors end with their shape, not with their buffer", () => {
  for (const one of of("valid", 6)) {
    const found = [...tensors(one.record)];
    assert.equal(found.length, one.tensors.length, one.name);
    for (const [index, tensor] of found.entries()) {
      const expected = one.tensors[index];
      assert.deepEqual([tensor.key, tensor.role, tensor.dtype], [expected.name, expected.role, expected.dtype]);
      assert.deepEqual(tensor.shape, expected.shape);
      assert.ok(tensor.data.length < expected.bytes_stored);
      assert.deepEqual([...values(tensor)], expected.values);
    }
  }
});

test("expected metadata that disagrees is named", () => {
  for (const one of of("load", 5)) {
    if (one.error === null) {
      requireExpected(one.record, one.expectedMetadata);
      continue;
    }
    assert.throws(
      () => requireExpected(one.record, one.expectedMetadata),
      (error) =>
        error instanceof ContractMismatch &&
        error.message === one.error &&
        error.differences.map(([name]) => name).join(", ") === one.error.split(": ")[1],
      one.name,
    );
  }
});

test("a broken tensor is refused by name", () => {
  for (const [change, message] of /** @type {[Record<string, unknown>, RegExp][]} */ ([
    [{ dtype: "f64" }, /'base\[0\]' \(param\) has dtype 'f64', expected one of f32, f16/],
    [{ shape: [3, -2] }, /has shape \[3, -2\]/],
    [{ shape: "3" }, /has shape '3'/],
    [{ dataBase64: "?" }, /not base64/],
    [{ dataBase64: null }, /not base64/],
    [{ dataBase64: "AAAA" }, /has 3 bytes, but f32 of shape \[3, 2\] needs 24/],
  ])) {
    const record = structuredClone(CASES[0].record);
    Object.assign(record.trainingState.params["base[0]"], change);
    assert.throws(() => [...tensors(record)], { name: "CheckpointCorrupt", message });
  }
});

test("a record without its members is refused", () => {
  for (const broken of [{}, { trainingState: [] }, { metadata: null }]) {
    assert.throws(() => [...tensors(broken)], CheckpointCorrupt);
    assert.throws(() => checkpointHash(broken), CheckpointCorrupt);
  }
});
