import assert from "node:assert/strict";
import { test } from "node:test";
import { DataContractError, HybridError, LimitExceeded } from "../runtime/errors.js";
import { BlobFolder } from "../runtime/folders/blob.js";
import { PIECE_BYTES, readAll, readPieces, writeAll, writePieces } from "../runtime/folders/folder.js";
import { HttpFolder } from "../runtime/folders/http.js";
import { MemoryDirectory } from "../runtime/folders/memory.js";
import { openOpfs } from "../runtime/folders/opfs.js";

/** @import { Folder } from "../runtime/folders/folder.js" */

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

test("dropped files are a folder", async () => {
  const folder = new BlobFolder([new File(["hello"], "b.txt"), new File([""], "a.txt")], "dropped");
  assert.deepEqual(await folder.list(), ["a.txt", "b.txt"]);
  assert.equal(await text(folder, "b.txt", 1, 3), "el");
  assert.equal(await text(folder, "a.txt"), "");
  assert.equal(await folder.size("c"), null);
  await assert.rejects(folder.read("c"), new HybridError("dropped/c: not there"));
});

const CONTENT = new TextEncoder().encode("0123456789");

/**
 * A server with the file `a` and the empty file `e`, and what it was asked for.
 *
 * @param {(begin: number, end: number) => Response} [part] answers for a range of `a`
 */
function server(part = partial) {
  /** @type {string[]} */
  const asked = [];
  const fetch = async (/** @type {string} */ url, /** @type {{headers: Record<string, string>}} */ { headers }) => {
    asked.push(`${url} ${headers.Range}`);
    const [, first, last] = /** @type {string[]} */ (/^bytes=(\d+)-(\d+)$/.exec(headers.Range));
    if (url.endsWith("/a")) return part(Number(first), Number(last) + 1);
    if (!url.endsWith("/e")) return new Response("nothing", { status: 404 });
    return new Response(null, { status: 416, headers: { "Content-Range": "bytes */0" } });
  };
  return { asked, folder: new HttpFolder("http://host/data/", { fetch, name: "data" }) };
}

/** @param {number} begin @param {number} end */
function partial(begin, end, size = CONTENT.length) {
  const headers = { "Content-Range": `bytes ${begin}-${end - 1}/${size}` };
  return new Response(CONTENT.slice(begin, end), { status: 206, headers });
}

test("a folder on a server is read in ranges, and its sizes are asked for once", async () => {
  const { asked, folder } = server();
  assert.equal(await folder.size("a"), 10);
  assert.equal(await text(folder, "a", 3, 6), "345");
  assert.equal(await text(folder, "a"), "0123456789");
  assert.equal(await text(folder, "a", 4, 4), "");
  assert.deepEqual(asked, [
    "http://host/data/a bytes=0-0",
    "http://host/data/a bytes=3-5",
    "http://host/data/a bytes=0-9",
  ]);
  assert.deepEqual([await folder.size("e"), await text(folder, "e")], [0, ""]);
  assert.deepEqual([await folder.size("b"), await folder.size("../a"), await folder.size("x?y")], [null, null, null]);
  await assert.rejects(folder.read("b"), new HybridError("data/b: not there"));
  await assert.rejects(folder.list(), /cannot be listed/);
  const empty = server(() => new Response("", { headers: { "Content-Length": "0" } }));
  assert.equal(await empty.folder.size("a"), 0, "some servers send an empty file whole");
});

test("a server that sends something else than was asked for is refused", async () => {
  const whole = server(() => new Response(CONTENT));
  await assert.rejects(whole.folder.size("a"), (error) => {
    assert.ok(error instanceof DataContractError);
    assert.equal(
      error.message,
      "data/a: the server sends the whole file where a part was asked for: use one that answers Range requests",
    );
    return true;
  });
  /** @type {[(begin: number, end: number) => Response, RegExp][]} */
  const answers = [
    [(begin, end) => partial(begin + 1, end + 1), /data\/a: the server sends bytes 3-5\/10 for bytes 2-4\/10/],
    [(begin, end) => partial(begin, end, 11), /the server sends bytes 2-4\/11 for bytes 2-4\/10: the file changed/],
    [() => new Response("x", { status: 206 }), /the server sends a part that it does not name for bytes 2-4\/10/],
    [() => new Response("x", { status: 500 }), /data\/a: the server answers with status 500/],
    [
      (begin, end) => new Response("22", { status: 206, headers: partial(begin, end).headers }),
      /2 bytes came for bytes 2 to 4: the connection broke off/,
    ],
  ];
  for (const [answer, message] of answers) {
    const { folder } = server((begin, end) => (begin ? answer(begin, end) : partial(begin, end)));
    await folder.size("a");
    await assert.rejects(folder.read("a", 2, 5), message);
  }
  const gone = new HttpFolder("http://host/", { fetch: () => Promise.reject(new TypeError("fetch failed")) });
  await assert.rejects(gone.size("a"), new HybridError("http://host/a: the server cannot be reached (fetch failed)"));
});

test("where there is no private file system, that is said", async () => {
  await assert.rejects(openOpfs(["runs"], undefined), /no private file system here: use a secure context/);
});

/** @param {Folder} folder @param {string} file @param {number} [begin] @param {number} [end] */
async function text(folder, file, begin, end) {
  return new TextDecoder().decode(await folder.read(file, begin, end));
}
