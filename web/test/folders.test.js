import assert from "node:assert/strict";
import { test } from "node:test";
import { HybridError, LimitExceeded } from "../runtime/errors.js";
import { PIECE_BYTES, readAll, readPieces, writeAll, writePieces } from "../runtime/folders/folder.js";
import { MemoryDirectory } from "../runtime/folders/memory.js";

test("a file is written piece by piece, read in ranges, continued, cut and removed", async () => {
  const folder = new MemoryDirectory("run");
  const sink = await folder.create("a.txt");
  await sink.write(new TextEncoder().encode("hello "));
  await sink.write(new TextEncoder().encode("world"));
  await sink.close();
  assert.equal(await folder.size("a.txt"), 11);
  assert.equal(await text(folder, "a.txt", 6), "world");
  assert.equal(await text(folder, "a.txt", 2, 4), "ll");
  const more = await folder.append("a.txt", 6);
  await more.write(new TextEncoder().encode("all"));
  await more.close();
  assert.equal(await text(folder, "a.txt"), "hello all");
  const undone = await folder.append("a.txt");
  await undone.write(new Uint8Array(100));
  await undone.abort();
  assert.equal(await text(folder, "a.txt"), "hello all");
  assert.deepEqual(await folder.list(), ["a.txt"]);
  await folder.remove("a.txt");
  await folder.remove("a.txt");
  assert.deepEqual([await folder.list(), await folder.size("a.txt")], [[], null]);
});

test("what a folder does not have is refused by name", async () => {
  const folder = new MemoryDirectory("run");
  await writeAll(folder, "a", "12345");
  await assert.rejects(folder.read("b"), new HybridError("run/b: not there"));
  await assert.rejects(folder.read("a", 2, 6), new HybridError("run/a: bytes 2 to 6 of 5 do not exist"));
  await assert.rejects(readAll(folder, "a", 4), new LimitExceeded("run/a: 5 bytes; at most 4 are read"));
  for (const name of ["", "..", "a/b", ".hidden", "a.", "NUL", "com1.txt", "ä", "x".repeat(129), "a\n"]) {
    await assert.rejects(folder.create(name), /is refused: expected a plain file name/);
    await assert.rejects(folder.directory(name), /is refused/);
  }
});

test("a write that fails leaves no file", async () => {
  const folder = new MemoryDirectory("run");
  await assert.rejects(
    writePieces(
      folder,
      "a",
      (function* () {
        yield new Uint8Array(3);
        throw new HybridError("the source ended");
      })(),
    ),
    /the source ended/,
  );
  assert.deepEqual(await folder.list(), []);
});

test("a whole file comes in pieces of 8 MiB", async () => {
  const folder = new MemoryDirectory("run");
  await writeAll(folder, "a", new Uint8Array(PIECE_BYTES + 5));
  const sizes = [];
  for await (const piece of readPieces(folder, "a")) sizes.push(piece.length);
  assert.deepEqual(sizes, [PIECE_BYTES, 5]);
});

test("folders lie in folders, and go with what is in them", async () => {
  const run = new MemoryDirectory("run");
  const step = await (await run.directory("checkpoints")).directory("step-00000001");
  await writeAll(step, "a", "1");
  assert.equal(step.name, "run/checkpoints/step-00000001");
  assert.deepEqual(await run.folders(), ["checkpoints"]);
  assert.equal(await run.open("other"), null);
  assert.equal(await (await (await run.open("checkpoints"))?.open("step-00000001"))?.size("a"), 1);
  await run.remove("checkpoints");
  assert.deepEqual(await run.folders(), []);
});

/** @param {MemoryDirectory} folder @param {string} file @param {number} [begin] @param {number} [end] */
async function text(folder, file, begin, end) {
  return new TextDecoder().decode(await folder.read(file, begin, end));
}
