/** @file A resume that disagrees is shown field by field. */

import assert from "node:assert/strict";
import { test } from "node:test";

import {
  ABSENT,
  differences,
  formatTable,
  identityHashes,
  requireAgreement,
} from "../runtime/contracts/fingerprint.js";
import { stableHash } from "../runtime/contracts/stable_json.js";
import { ContractMismatch, describe, EXIT_REFUSED } from "../runtime/errors.js";

const SAVED = {
  dataset: { tokens: 100, sha256: "a".repeat(64) },
  tokenizer: { kind: "bytes" },
  contract: { optimizer: { lr: 0.001, beta1: 0.9 }, model: { schedule: [0, 1], window: null } },
};
const CURRENT = {
  dataset: { tokens: 100, sha256: "b".repeat(64) },
  tokenizer: { kind: "bytes" },
  contract: { optimizer: { lr: 0.002, beta1: 0.9 }, model: { schedule: [0, 1, 1] }, seed: 1 },
};

test("each difference has its dotted path and both values", () => {
  assert.deepEqual(differences(SAVED, CURRENT), [
    ["dataset.sha256", "a".repeat(64), "b".repeat(64)],
    ["contract.optimizer.lr", 0.001, 0.002],
    ["contract.model.schedule", [0, 1], [0, 1, 1]],
    ["contract.model.window", null, ABSENT],
    ["contract.seed", ABSENT, 1],
  ]);
});

test("the table lines up and shortens long values", () => {
  const table = formatTable([
    ["a", 1, ABSENT],
    ["model.width", "x".repeat(200), { b: [1] }],
  ]).split("\n");
  assert.deepEqual(table[0].split(/ +/), ["field", "saved", "current"]);
  assert.ok(table[2].endsWith('  {"b":[1]}') && table[2].includes(" ..."));
  assert.equal(table[0].indexOf("current"), table[2].indexOf('{"b"'));
});

test("a resume that disagrees is refused with the table and the way out", () => {
  assert.deepEqual(requireAgreement(SAVED, SAVED), []);
  assert.throws(
    () => requireAgreement(SAVED, CURRENT),
    (error) => {
      assert.ok(error instanceof ContractMismatch);
      assert.equal(error.exitCode, EXIT_REFUSED);
      assert.deepEqual(error.differences, differences(SAVED, CURRENT));
      assert.match(error.message, /5 fields differ.*contract\.optimizer\.lr.*--accept-change FIELD --reason TEXT/s);
      assert.deepEqual(describe(error), { name: "ContractMismatch", message: error.message, exitCode: 3 });
      return true;
    },
  );
});

test("accepted changes pass and are returned for the lineage", () => {
  assert.throws(() => requireAgreement(SAVED, CURRENT, ["contract.model", "dataset.sha256"]), /2 fields differ/);
  assert.deepEqual(requireAgreement(SAVED, CURRENT, ["contract", "dataset.sha256"]), differences(SAVED, CURRENT));
});

test("accepting a change that did not happen is a mistake", () => {
  assert.throws(() => requireAgreement(SAVED, CURRENT, ["contract.optimizer.beta1"]), {
    name: "ConfigError",
    message: /'contract\.optimizer\.beta1' is no difference/,
  });
});

test("identity hashes are those of the documents", () => {
  assert.deepEqual(identityHashes(SAVED), {
    configHash: stableHash(SAVED.contract),
    datasetHash: stableHash(SAVED.dataset),
    tokenizerHash: stableHash(SAVED.tokenizer),
  });
  assert.equal(identityHashes({ dataset: {} }).datasetHash, null);
});
