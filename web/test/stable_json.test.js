/** @file Stable JSON is the same text everywhere, and its hash is sha256. */

import assert from "node:assert/strict";
import { createHash, randomBytes } from "node:crypto";
import { test } from "node:test";

import { stableHash, stableJson } from "../runtime/contracts/stable_json.js";
import { ConfigError } from "../runtime/errors.js";
import { Sha256, sha256, subtleSha256 } from "../runtime/sha256.js";
import { load } from "./support/vectors.js";

// V8 14.9 and 15.0 (Deno 2.8 and 2.9) read a key that is written as an escape as "\\", where another object had that
// key after the same members. The vectors cannot be read there; newer engines read them. `strict_json` is not affected.
const misread = Object.keys(JSON.parse('[{"":1,"\\\\":2},[{"":1,"\\u4e2d":2}]]')[1][0])[1] !== "\u4e2d";
const skip = misread && "this engine's JSON.parse misreads keys that are written as escapes";

const VECTORS = load("stable_json");

test("every case gives its text and hash", { skip }, () => {
  for (const { input, text, sha256: hash } of VECTORS.cases) {
    assert.equal(stableJson(input), text);
    assert.equal(stableHash(input), hash);
  }
  assert.equal(VECTORS.cases.length, 150);
});

test("the key that runtimes treat differently is refused", () => {
  assert.equal(VECTORS.quirk_cases.length, 1);
  assert.throws(
    () => stableJson(VECTORS.quirk_cases[0].input),
    (error) => error instanceof ConfigError && /^\$ has a key '__proto__'/.test(error.message),
  );
});

test("with an indentation the text is that of JSON.stringify for the sorted copy", () => {
  const value = { b: [1, { d: null, c: [] }], a: {}, 10: -0, 9: "x" };
  const sorted = { 9: "x", 10: 0, a: {}, b: [1, { c: [], d: null }] };
  assert.equal(stableJson(value, "  "), JSON.stringify(sorted, null, 2));
  assert.equal(stableJson(value), JSON.stringify(sorted));
});

test("what JSON would drop or change silently is refused with its path", () => {
  for (const [value, kind] of [
    [undefined, "undefined"],
    [() => 1, "function"],
    [new Map(), "Map"],
    [new Uint8Array(1), "Uint8Array"],
    [new Date(0), "Date"],
  ]) {
    const path = new RegExp(`^\\$\\.a\\[1\\] is a ${kind}: stable JSON takes`);
    assert.throws(() => stableJson({ a: [1, value] }), { name: "TypeError", message: path });
  }
  assert.equal(stableJson([2n ** 64n, Object.create(null)]), "[18446744073709552000,{}]");
});

test("sha256 agrees with the platform's, in whatever pieces the bytes come", async () => {
  const data = randomBytes(70_000);
  for (const length of [0, 1, 55, 56, 57, 63, 64, 65, 119, 120, 128, 1000, 70_000]) {
    const piece = data.subarray(0, length);
    const expected = createHash("sha256").update(piece).digest("hex");
    assert.equal(sha256(piece), expected);
    assert.equal(await subtleSha256(new Uint8Array(piece)), expected);
    const pieces = new Sha256();
    for (let at = 0; at < length; at += 37) pieces.update(piece.subarray(at, Math.min(length, at + 37)));
    assert.equal(pieces.hex(), expected);
    assert.equal(pieces.hex(), expected);
  }
});

test("a hash can be read in the middle and go on", () => {
  const hash = new Sha256().update(new Uint8Array(100));
  hash.hex();
  assert.equal(hash.update(new Uint8Array(100)).hex(), sha256(new Uint8Array(200)));
});
