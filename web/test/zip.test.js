/** @file Archives: what is written is read, sizes beyond 4 GiB are right, and nothing dubious is opened. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { crc32 as nodeCrc32 } from "node:zlib";

import { CheckpointCorrupt, HybridError } from "../runtime/errors.js";
import { crc32 } from "../runtime/folders/crc32.js";
import { writeAll } from "../runtime/folders/folder.js";
import { MemoryDirectory } from "../runtime/folders/memory.js";
import { ZipFolder, zipFolder, zipLayout } from "../runtime/folders/zip.js";

/** @param {Record<string, Uint8Array | string>} files */
async function folderOf(files) {
  const folder = new MemoryDirectory("folder");
  for (const [name, content] of Object.entries(files)) await writeAll(folder, name, content);
  return folder;
}

/** @param {ReadableStream<Uint8Array<ArrayBuffer>>} stream */
const blobOf = async (stream) => new Blob([await new Response(stream).arrayBuffer()]);

test("checksums are those of zlib, in any pieces", () => {
  const bytes = Uint8Array.from({ length: 1000 }, (_, index) => (index * 7919) >> 3);
  for (const length of [0, 1, 7, 8, 9, 15, 16, 999, 1000]) {
    const expected = nodeCrc32 ? nodeCrc32(bytes.subarray(0, length)) : crc32(bytes.subarray(0, length));
    assert.equal(crc32(bytes.subarray(0, length)), expected);
    assert.equal(crc32(bytes.subarray(5, length), crc32(bytes.subarray(0, Math.min(5, length)))), expected);
  }
  assert.equal(crc32(new TextEncoder().encode("123456789")), 0xcbf43926);
});

test("what is packed comes out again, read in ranges or whole", async () => {
  const files = { "a.txt": "hello world", empty: "", "b.bin": new Uint8Array(9 * 2 ** 20).fill(7) };
  const { size, stream } = await zipFolder(await folderOf(files), { files: ["b.bin", "a.txt", "empty"] });
  const blob = await blobOf(stream());
  assert.equal(blob.size, size);
  assert.equal((await blobOf(stream())).size, size, "a stream can be had again");
  const zip = await ZipFolder.open(blob, "a.zip");
  assert.deepEqual(await zip.list(), ["a.txt", "b.bin", "empty"]);
  assert.deepEqual([await zip.size("b.bin"), await zip.size("empty"), await zip.size("c")], [9 * 2 ** 20, 0, null]);
  assert.equal(new TextDecoder().decode(await zip.read("a.txt", 6, 11)), "world");
  assert.equal(new TextDecoder().decode(await zip.read("a.txt")), "hello world");
  assert.deepEqual(await zip.read("b.bin"), files["b.bin"]);
  await assert.rejects(zip.read("c"), new HybridError("a.zip/c: not there"));
  await assert.rejects(zip.read("a.txt", 0, 12), /bytes 0 to 12 of 11 do not exist/);
});

test("a file that changes while it is packed is an error", async () => {
  const folder = await folderOf({ a: "before" });
  const { stream } = await zipFolder(folder, { files: ["a"] });
  await writeAll(folder, "a", "behind");
  await assert.rejects(blobOf(stream()), /folder\/a: changed while it was packed/);
});

test("a file that was changed in the archive is refused when its end is read", async () => {
  const { stream } = await zipFolder(await folderOf({ a: "0123456789" }), { files: ["a"] });
  const bytes = new Uint8Array(await (await blobOf(stream())).arrayBuffer());
  bytes[33] ^= 1;
  const zip = await ZipFolder.open(new Blob([bytes]), "a.zip");
  await zip.read("a", 0, 5);
  await assert.rejects(zip.read("a", 5, 10), /a.zip\/a: CRC-32 [0-9a-f]{8}, but the archive says [0-9a-f]{8}/);
  await zip.read("a", 5, 10); // not from its beginning: no checksum to compare
});

/**
 * Bytes of which only some are known, and all others are 0: an archive of many gigabytes.
 *
 * @param {{heads: Uint8Array[], tail: Uint8Array, size: number}} layout
 * @param {readonly number[]} sizes of the files
 */
function sparse({ heads, tail, size }, sizes) {
  /** @type {[at: number, bytes: Uint8Array][]} */
  const parts = [];
  let at = 0;
  for (const [index, head] of heads.entries()) {
    parts.push([at, head]);
    at += head.length + sizes[index];
  }
  parts.push([at, tail]);
  const read = async (/** @type {number} */ begin, /** @type {number} */ end) => {
    const found = new Uint8Array(end - begin);
    for (const [start, bytes] of parts) {
      const from = Math.max(start, begin);
      const to = Math.min(start + bytes.length, end);
      if (from < to) found.set(bytes.subarray(from - start, to - start), from - begin);
    }
    return found;
  };
  return { size, read };
}

for (const sizes of [
  [2 ** 32 - 2, 5],
  [2 ** 32 - 1, 5],
  [5 * 2 ** 32 + 3, 5],
  [2 ** 31, 2 ** 31, 2 ** 31, 7],
]) {
  test(`files of ${sizes.join(", ")} bytes are found where they are`, async () => {
    const files = sizes.map((size, index) => ({ name: `f${index}`, size, crc: index }));
    const layout = zipLayout(files);
    const zip = await ZipFolder.open(sparse(layout, sizes), "big.zip");
    for (const { name, size } of files) assert.equal(await zip.size(name), size);
    const last = sizes.length - 1;
    assert.deepEqual(await zip.read(`f${last}`, 1, 4), new Uint8Array(3));
    // The headers say so in the way that other programs read: the last file is far behind, or the first too large.
    const text = new TextDecoder("latin1").decode(layout.tail);
    const far = sizes.slice(0, -1).reduce((sum, size) => sum + size, 0) >= 2 ** 32 - 100;
    assert.equal(text.includes("PK\x06\x06") && text.includes("PK\x06\x07"), far);
    const cut = sparse({ ...layout, size: layout.size - 1 }, sizes);
    await assert.rejects(ZipFolder.open(cut, "big.zip"), CheckpointCorrupt);
  });
}

test("an archive with two files in the same bytes, and other lies about large sizes, are refused", async () => {
  const sizes = [2 ** 33, 10];
  const layout = zipLayout(sizes.map((size, index) => ({ name: `f${index}`, size, crc: 0 })));
  const { tail } = layout;
  const view = new DataView(tail.buffer);
  // The zip64 fields in the table of contents: that of f0 holds its two sizes, that of f1 its place.
  const first = 46 + 2 + 4;
  /** @type {[at: number, value: bigint, message: RegExp][]} */
  const lies = [
    [first, 2n ** 33n + 1n, /has two sizes/],
    [first, 2n ** 60n, /lacks a size that fits/],
    [first + 16 + 46 + 2 + 4, 0n, /differs from the table of contents/],
    [first + 16 + 46 + 2 + 4, 2n ** 52n, /lies beyond its end/],
    [tail.length - 22 - 20 + 8, 7n, /zip64 end is damaged/],
    [tail.length - 22 - 20 - 56 + 32, 3n, /zip64 end is damaged/],
    [tail.length - 22 - 20 - 56 + 40, 99n, /is not where its end says/],
  ];
  for (const [at, value, message] of lies) {
    const before = view.getBigUint64(at, true);
    view.setBigUint64(at, value, true);
    await assert.rejects(ZipFolder.open(sparse(layout, sizes), "big.zip"), message);
    view.setBigUint64(at, before, true);
  }
  await ZipFolder.open(sparse(layout, sizes), "big.zip");
});
