/** @file Malformed tensor files are refused by rule and by name, good ones read in any pieces, and bytes are repeatable. */

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { test } from "node:test";

import { CHUNK_BYTES, digestBytes, expectDigest } from "../runtime/digests.js";
import { CheckpointCorrupt, HybridError } from "../runtime/errors.js";
import { halfToFloat } from "../runtime/half.js";
import { openStream, readBytes, readStream, SafetensorsError } from "../runtime/safetensors.js";
import { layout, write } from "../runtime/safetensors_writer.js";
import { load } from "./support/vectors.js";

const VECTORS = load("safetensors_bad");

// What other readers let pass and we refuse, because two readers could disagree about it.
/** @type {Record<string, string>} */
const QUIRK_CATEGORIES = {
  "integral float shape (JSON.parse cannot tell 1.0 from 1)": "shape_invalid",
  "unknown extra member in a tensor entry": "tensor_info_schema",
  "empty tensor with a huge other dimension": "size_overflow",
  "metadata is null": "metadata_not_string",
  "empty tensor name": "name_empty",
};

/** @param {string} text @returns {Uint8Array<ArrayBuffer>} */
const bytesOf = (text) => new Uint8Array(Buffer.from(text, "base64"));

/** @param {Uint8Array} data @returns {string} */
const sha = (data) => createHash("sha256").update(data).digest("hex");

/** @param {Uint8Array} data @param {number} length @returns {Uint8Array[]} */
function cut(data, length) {
  const pieces = [];
  for (let at = 0; at < data.length; at += length) pieces.push(data.slice(at, at + length));
  return pieces;
}

/** @param {Uint8Array} data @param {readonly string[]} categories @param {string} name */
async function assertRefused(data, categories, name) {
  for (const stream of [[data], cut(data, 3)]) {
    await assert.rejects(
      readStream("file.safetensors", stream, data.length),
      (error) =>
        error instanceof SafetensorsError &&
        error instanceof CheckpointCorrupt &&
        categories.includes(error.category) &&
        error.message.startsWith("file.safetensors: "),
      name,
    );
  }
}

test("malformed files are refused for the right reason", async () => {
  const bad = VECTORS.cases.filter((/** @type {any} */ { expected }) => expected === "error");
  assert.deepEqual([VECTORS.cases.length, bad.length], [59, 52]);
  for (const { name, base64, category, also_acceptable: others } of bad) {
    await assertRefused(bytesOf(base64), [category, ...others], name);
  }
});

test("good files give their values, in whatever pieces they come", async () => {
  const good = VECTORS.cases.filter((/** @type {any} */ { expected }) => expected === "ok");
  assert.equal(good.length, 7);
  for (const { name, base64, metadata, tensors } of good) {
    const data = bytesOf(base64);
    for (const length of [1, 7, 64, 4096]) {
      const file = await readStream("file.safetensors", cut(data, length), data.length);
      assert.deepEqual(file.header.metadata && Object.fromEntries(file.header.metadata), metadata, name);
      const found = file.header.entries.map((entry) => [entry.name, entry.dtype, entry.shape, plain(file, entry)]);
      const expected = tensors.map((/** @type {any} */ t) => [t.name, t.dtype, t.shape, t.values]);
      assert.deepEqual(
        new Map(found.map((one) => [one[0], one])),
        new Map(expected.map((/** @type {any} */ one) => [one[0], one])),
        name,
      );
    }
  }
});

/** @param {any} file @param {any} entry @returns {unknown[]} values as the vectors list them: 64-bit integers as text */
function plain(file, { name, dtype }) {
  const values = [...file.tensors.get(name)];
  if (dtype === "BOOL") return values.map(Boolean);
  return values.map((value) => (typeof value === "bigint" ? String(value) : value));
}

test("what readers disagree about is refused", async () => {
  assert.deepEqual(VECTORS.quirk_cases.length, 5);
  for (const { name, base64 } of VECTORS.quirk_cases) {
    await assertRefused(bytesOf(base64), [QUIRK_CATEGORIES[name]], name);
  }
});

/** @param {string | Uint8Array} header @param {Uint8Array} [data] @returns {Uint8Array<ArrayBuffer>} */
function fileOf(header, data = new Uint8Array(0)) {
  const text = typeof header === "string" ? new TextEncoder().encode(header) : header;
  const file = new Uint8Array(8 + text.length + data.length);
  new DataView(file.buffer).setBigUint64(0, BigInt(text.length), true);
  file.set(text, 8);
  file.set(data, 8 + text.length);
  return file;
}

test("more that is refused", async () => {
  for (const [header, category] of [
    ['{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', "duplicate_name"],
    ['{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"\\u0061":{}}', "duplicate_name"],
    ['{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', "header_not_json"],
    ['{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}', "shape_invalid"],
    ['{"a":{"dtype":"U8","shape":[1],"data_offsets":[-0,1]}}', "offsets_invalid"],
    ['{"a":{"dtype":"U8","shape":[1e999],"data_offsets":[0,1]}}', "header_not_json"],
    [`{"a":{"dtype":"U8","shape":[${"9".repeat(5000)}],"data_offsets":[0,1]}}`, "header_not_json"],
    ['{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}', "dtype_unknown"],
    ['{"a":{"dtype":"BOOL","shape":[1],"data_offsets":[0,1]}}', "bool_invalid"],
    ['{"__proto__":{"dtype":"U8","shape":[2],"data_offsets":[0,1]}}', "shape_size_mismatch"],
    ['\ufeff{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', "header_not_json"],
  ]) {
    await assertRefused(fileOf(header, Uint8Array.of(7)), [category], header.slice(0, 80));
  }
  await assertRefused(fileOf(`{"a":${"[".repeat(200_000)}`), ["header_not_json"], "deep nesting");
  const size = 2 ** 50;
  const header = `{"huge":{"dtype":"U8","shape":[${size}],"data_offsets":[0,${size}]}}`;
  await assertRefused(fileOf(header), ["offsets_beyond_data"], "a petabyte in a header of 100 bytes");
});

/** @returns {{name: string, dtype: string, shape: number[], bytes: Uint8Array<ArrayBuffer>}[]} */
function example() {
  return [
    { name: "z.bias", dtype: "F16", shape: [3], bytes: new Uint8Array(Uint16Array.of(0, 0x3c00, 0x4000).buffer) },
    { name: "b", dtype: "F32", shape: [2, 3], bytes: new Uint8Array(Float32Array.of(0, 1, 2, 3, 4, 5).buffer) },
    { name: "a", dtype: "F64", shape: [], bytes: new Uint8Array(Float64Array.of(7.5).buffer) },
    { name: "flags", dtype: "BOOL", shape: [2], bytes: Uint8Array.of(1, 0) },
    { name: "empty", dtype: "F32", shape: [0, 4], bytes: new Uint8Array(0) },
    { name: "ids", dtype: "U64", shape: [1], bytes: new Uint8Array(BigUint64Array.of(2n ** 63n + 1n).buffer) },
  ];
}

/** @param {ReturnType<typeof example>} tensors @param {Record<string, string> | null} [metadata] */
async function written(tensors, metadata = null) {
  /** @type {Uint8Array[]} */
  const pieces = [];
  const result = await write((bytes) => void pieces.push(bytes.slice()), tensors, metadata);
  return { data: new Uint8Array(Buffer.concat(pieces)), ...result };
}

test("what is written is read back, and the order of insertion changes no byte", async () => {
  const { data, digest, sha256 } = await written(example(), { format: "pt" });
  assert.deepEqual(data, (await written(example().reverse(), { format: "pt" })).data);
  assert.equal(data.length, layout(example(), { format: "pt" }).size);
  const file = await readBytes("x", data, digest);
  assert.deepEqual([...(file.tensors.get("z.bias") ?? [])], [0, 1, 2]);
  assert.deepEqual(file.tensors.get("ids"), BigUint64Array.of(2n ** 63n + 1n));
  assert.deepEqual(file.sha256, sha256);
  for (const { name, bytes } of example()) assert.equal(sha256.get(name), sha(bytes));
  assert.equal(file.header.dataStart % 8, 0);
});

test("what cannot be written is an error naming the tensor", async () => {
  const bytes = new Uint8Array(16);
  const tied = ["table", "head"].map((name) => ({ name, dtype: "F32", shape: [4], bytes }));
  await assert.rejects(written(tied), /'head' and 'table' are the same memory/);
  await assert.rejects(written([{ name: "t", dtype: "F4", shape: [4], bytes }]), /'t': dtype F4/);
  await assert.rejects(written([{ name: "t", dtype: "F32", shape: [5], bytes }]), /'t': 16 bytes, .* takes 20/);
  for (const name of ["", "__metadata__", "\ud800"]) {
    await assert.rejects(written([{ name, dtype: "F32", shape: [4], bytes }]), /cannot be named/);
  }
  const twice = [
    { name: "t", dtype: "F32", shape: [1] },
    { name: "u", dtype: "F32", shape: [1] },
    { name: "t", dtype: "U8", shape: [1] },
  ];
  assert.throws(() => layout(twice), HybridError);
});

/** A file of two chunks, and its digest. */
async function large() {
  const values = Float32Array.from({ length: CHUNK_BYTES / 4 + 1000 }, (_, index) => index);
  return written([
    { name: "big", dtype: "F32", shape: [values.length], bytes: new Uint8Array(values.buffer) },
    { name: "small", dtype: "F32", shape: [2], bytes: new Uint8Array(8) },
  ]);
}

test("digests are of the whole and of each chunk", async () => {
  const { data, digest } = await large();
  const chunks = cut(data, CHUNK_BYTES).map(sha);
  assert.equal(chunks.length, 2);
  assert.deepEqual(digest, { size: data.length, sha256: sha(data), chunks });
  assert.deepEqual(await digestBytes(data), digest);
  assert.deepEqual((await digestBytes(new Uint8Array(0))).chunks, []);
  assert.equal((await digestBytes(new Uint8Array(CHUNK_BYTES))).chunks.length, 1);
  expectDigest("x", digest, { ...digest });
  assert.throws(() => expectDigest("x", digest, { ...digest, sha256: sha(chunks.length ? data.slice(1) : data) }), {
    message: /the file or the manifest was changed/,
  });
});

test("a changed byte is refused before any byte of its chunk is used", async () => {
  const { data, digest } = await large();
  const changed = data.slice();
  changed[data.length - 1] ^= 1;
  const file = await openStream("x", cut(changed, 1 << 20), changed.length, digest);
  let used = 0;
  await assert.rejects(
    async () => {
      for await (const { bytes } of file.pieces()) used += bytes.length;
    },
    { name: "CheckpointCorrupt", message: /bytes 8388608 to \d+ have sha256 [0-9a-f]{64}, but the manifest says/ },
  );
  assert.ok(used > 0 && used < CHUNK_BYTES);
  changed[100] ^= 1;
  await assert.rejects(openStream("x", [changed], changed.length, digest), /bytes 0 to 8388607/);
});

test("a file of another length is refused, whoever says so", async () => {
  const { data, digest } = await written(example());
  const longer = new Uint8Array([...data, 0]);
  await assert.rejects(readBytes("x", longer, digest), /bytes, but the manifest says \d+: cut or changed/);
  for (const expected of [null, digest]) {
    await assert.rejects(readStream("x", [longer], data.length, expected), /longer than the \d+ bytes/);
    for (const length of [4, 20, data.length - 1]) {
      await assert.rejects(readStream("x", [data.slice(0, length)], data.length, expected), { category: "truncated" });
    }
  }
});

test("pieces come in whole elements, also where a chunk ends inside one", async () => {
  const values = Float64Array.from({ length: CHUNK_BYTES / 4 }, (_, index) => index);
  const text = `{"a":{"dtype":"F64","shape":[${values.length}],"data_offsets":[0,${values.byteLength}]}}`;
  for (const padding of [1, 4, 7]) {
    const data = fileOf(text + " ".repeat(padding), new Uint8Array(values.buffer));
    const file = await openStream("x", cut(data, 1_000_003), data.length);
    let next = 0;
    for await (const { entry, offset, bytes } of file.pieces()) {
      assert.equal(offset, next);
      next += bytes.length;
      assert.ok(next === entry.end || bytes.length % 8 === 0);
      assert.equal(new DataView(bytes.buffer, bytes.byteOffset).getFloat64(0, true), values[offset / 8]);
    }
    assert.equal(next, values.byteLength);
    await assert.rejects(async () => {
      for await (const piece of file.pieces()) assert.fail(String(piece.offset));
    }, /only once/);
  }
});

test("a stream that is refused is closed", async () => {
  let cancelled = false;
  const stream = new ReadableStream({
    pull: (controller) => controller.enqueue(new Uint8Array(9)),
    cancel() {
      cancelled = true;
    },
  });
  await assert.rejects(openStream("x", stream, 100), /longer than the 100 bytes/);
  assert.ok(cancelled);
});

test("float16 is widened exactly", () => {
  const values = [0x0000, 0x8000, 0x3c00, 0xc000, 0x7bff, 0x0001, 0x03ff, 0x0400, 0x3555].map(halfToFloat);
  assert.deepEqual(values, [0, -0, 1, -2, 65504, 2 ** -24, 1023 * 2 ** -24, 2 ** -14, 0.333251953125]);
  assert.deepEqual([0x7c00, 0xfc00].map(halfToFloat), [Number.POSITIVE_INFINITY, Number.NEGATIVE_INFINITY]);
  assert.ok(Number.isNaN(halfToFloat(0x7e00)));
});
