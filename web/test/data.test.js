/** @file Token stores: what is read, how much of it, what is refused, and what a failed build leaves. */

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { test } from "node:test";

import { IGNORE } from "../runtime/batch.js";
import { buildStore } from "../runtime/data/build.js";
import { describeSource, textDocuments } from "../runtime/data/corpus.js";
import { BatchPlan, DataLoader, evaluationBatches } from "../runtime/data/loader.js";
import { seal } from "../runtime/data/manifest.js";
import { PackedDataset } from "../runtime/data/packing.js";
import { prepareData } from "../runtime/data/prepare.js";
import { heldOut } from "../runtime/data/split.js";
import { TokenStore } from "../runtime/data/store.js";
import { WindowDataset } from "../runtime/data/windows.js";
import { CHUNK_BYTES } from "../runtime/digests.js";
import { ConfigError, DataContractError, StopRequested } from "../runtime/errors.js";
import { writeAll } from "../runtime/folders/folder.js";
import { MemoryDirectory } from "../runtime/folders/memory.js";
import { ByteTokenizer } from "../runtime/tokenizers/bytes.js";

/** @import { Folder } from "../runtime/folders/folder.js" */
/** @import { Manifest } from "../runtime/data/manifest.js" */

/** @param {...string} texts */
const documents = (...texts) => texts.map((text, number) => ({ name: `document ${number}`, text }));

/** @type {{by: "share", validationShare: number}} */
const ALL = { by: "share", validationShare: 0 };

/** A byte store whose documents have these lengths; the stream spells the alphabet over and over. @param {number[]} lengths */
async function storeOf(...lengths) {
  let at = 0;
  const texts = lengths.map((length) => Array.from({ length }, () => String.fromCharCode(97 + (at++ % 26))).join(""));
  return buildStore(documents(...texts), "bytes", new MemoryDirectory("letters"), { split: ALL });
}

/** @param {Promise<unknown>} promise @param {RegExp} message @param {typeof DataContractError} [type] */
const refused = (promise, message, type = DataContractError) =>
  assert.rejects(promise, (/** @type {Error} */ error) => {
    assert.ok(error instanceof type, String(error));
    assert.match(error.message, message);
    return true;
  });

/** @param {Uint32Array} ids */
const letters = (ids) => String.fromCharCode(...ids);

test("documents come back, and the files are those of the format's page", async () => {
  const folder = new MemoryDirectory("store");
  const source = { type: "files", paths: ["greetings.jsonl"], field: "text", maxBytes: null };
  const store = await buildStore(documents("hello", "world!"), "bytes", folder, { source });
  assert.equal(letters(await store.document(0)), "hello");
  assert.equal(letters(await store.document(1)), "world!");
  assert.deepEqual(await folder.list(), ["documents.bin", "manifest.json", "tokenizer.json", "tokens.bin"]);
  assert.equal(Buffer.from(await folder.read("tokens.bin")).toString("latin1"), `${[..."helloworld!"].join("\0")}\0`);
  assert.equal(store.fingerprint, "067b18110a6593a56e61e6c26be2d2588c4a16b2cb4e3d6ddcdcfe54a6ed8cf0");
  assert.equal(store.manifest.manifestHash, "ec29001e5052b2b0d67ce8883acd088fb1cb47e39ed5f83d45aff11b0b7e79f2");
  await store.verify();
  assert.equal((await store.tokenizer()).kind, "bytes");
  await refused(store.document(2), /store: no document 2, expected 0\.\.1/);
  await refused(store.read(3, 12), /tokens 3\.\.12 do not exist/);
});

test("the worked example of the format's page is cut as it says", async () => {
  const store = await buildStore(documents("hello", "world!"), "bytes", new MemoryDirectory("store"));
  const dataset = new WindowDataset(store.split("all"), 4);
  const rows = [];
  for (let index = 0; index < dataset.size; index++) {
    const { ids, targets, positions, segmentIds } = await dataset.sample(index);
    rows.push([
      [...ids].map((id) => (id ? letters(Uint32Array.of(id)) : ".")).join(" "),
      [...targets].map((id) => (id === IGNORE ? "-" : letters(Uint32Array.of(id)))).join(" "),
      positions.join(" "),
      segmentIds.join(" "),
    ]);
  }
  assert.deepEqual(rows, [
    ["h e l l", "e l l o", "0 1 2 3", "1 1 1 1"],
    ["o w o r", "- o r l", "0 0 1 2", "1 2 2 2"],
    ["l d . .", "d ! - -", "0 1 0 0", "1 1 0 0"],
  ]);
});

/** A store of a gigabyte that nobody ever wrote: token i is (i * 7) mod 251. */
function vastFolder() {
  const tokens = 2 ** 29;
  const tokenizer = new TextEncoder().encode(new ByteTokenizer().toJson());
  const bounds = new Uint8Array(new BigUint64Array([0n, 1000n, BigInt(tokens)]).buffer);
  /** @param {Uint8Array} bytes */
  const sha = (bytes) => createHash("sha256").update(bytes).digest("hex");
  /** @param {Uint8Array} bytes */
  const record = (bytes) => ({ bytes: bytes.length, sha256: sha(bytes), chunks: [sha(bytes)] });
  const zero = "0".repeat(64);
  const manifest = seal({
    format: "hybrid.tokens",
    version: 1,
    vocabularySize: 256,
    tokenType: "uint16",
    endOfText: null,
    tokenizer: { kind: "bytes", hash: new ByteTokenizer().hash },
    documents: 2,
    tokens,
    chunkBytes: CHUNK_BYTES,
    files: {
      "tokens.bin": { bytes: 2 * tokens, sha256: zero, chunks: new Array((2 * tokens) / CHUNK_BYTES).fill(zero) },
      "documents.bin": record(bounds),
      "tokenizer.json": record(tokenizer),
    },
    split: { by: "share", validationShare: 0.1, seed: 0 },
    source: {},
  });
  /** @type {Record<string, Uint8Array<ArrayBuffer>>} */
  const small = {
    "manifest.json": new TextEncoder().encode(JSON.stringify(manifest)),
    "documents.bin": bounds,
    "tokenizer.json": tokenizer,
  };
  /** @type {number[]} */
  const reads = [];
  /** @type {Folder} */
  const folder = {
    name: "vast",
    list: async () => [...Object.keys(small), "tokens.bin"],
    size: async (file) => small[file]?.length ?? 2 * tokens,
    read: async (file, begin = 0, end = small[file].length) => {
      if (small[file]) return small[file].slice(begin, end);
      reads.push(end - begin);
      const ids = new Uint16Array((end - begin) / 2);
      for (let place = 0; place < ids.length; place++) ids[place] = ((begin / 2 + place) * 7) % 251;
      return new Uint8Array(ids.buffer);
    },
  };
  return { folder, reads };
}

test("of a store of a gigabyte only what is needed is read, and little of it is kept", async () => {
  const { folder, reads } = vastFolder();
  const store = await TokenStore.open(folder);
  const dataset = new WindowDataset(store.split("train"), 512);
  const plan = new BatchPlan({ size: dataset.size, globalBatch: 8, seed: 1 });
  const loader = new DataLoader(dataset, plan, 4);
  assert.deepEqual(reads, []);
  globalThis.gc?.();
  const before = process.memoryUsage().arrayBuffers;
  for (let step = 1; step <= 60; step++) {
    const indices = plan.indices(step);
    const batches = await loader.step(step);
    assert.equal(batches[1].ids[5], ((indices[4] * 512 + 5) * 7) % 251);
  }
  loader.close();
  const read = reads.reduce((sum, bytes) => sum + bytes, 0);
  assert.ok(Math.max(...reads) <= 8 * 2 ** 20, "no single read is large");
  assert.ok(read < 200 * 2 ** 20, `${read} bytes`);
  assert.ok(process.memoryUsage().arrayBuffers - before < 400 * 2 ** 20);
});

test("a long range comes in large reads, and what lies near costs nothing more", async () => {
  const { folder, reads } = vastFolder();
  const store = await TokenStore.open(folder);
  await store.read(0, 2 ** 24);
  assert.deepEqual(reads, new Array(4).fill(8 * 2 ** 20));
  const dataset = new WindowDataset(store.split("train"), 512);
  for (let index = 0; index < 100; index++) await dataset.sample(32000 + index);
  assert.equal(reads.length, 4);
});

test("what could not be read is asked for again", async () => {
  const whole = new MemoryDirectory("store");
  await buildStore(documents("hello"), "bytes", whole, { split: ALL });
  let failures = 1;
  const store = await TokenStore.open({
    name: "flaky",
    list: () => whole.list(),
    size: (file) => whole.size(file),
    read: async (file, begin, end) => {
      if (file === "tokens.bin" && failures-- > 0) throw new Error("the server hiccuped");
      return whole.read(file, begin, end);
    },
  });
  await assert.rejects(store.read(0, 5), /hiccuped/);
  assert.equal(letters(await store.read(0, 5)), "hello");
});

test("a store that is not there, and a folder that is none, are told apart", async () => {
  await refused(TokenStore.open(null), /there is no token store here; make one with/);
  await refused(TokenStore.open(new MemoryDirectory("folder")), /^folder: no manifest\.json, so this folder is not/);
});

test("a changed byte anywhere is found and the file named", async () => {
  for (const name of ["tokens.bin", "documents.bin", "tokenizer.json", "manifest.json"]) {
    const folder = new MemoryDirectory("store");
    await buildStore(documents("first", "", "zweites Dökument"), "bytes", folder);
    const bytes = await folder.read(name);
    for (let offset = 0; offset < bytes.length; offset += name.endsWith("json") ? 41 : 1) {
      bytes[offset] ^= 1;
      await writeAll(folder, name, bytes);
      bytes[offset] ^= 1;
      const opened = TokenStore.open(folder).then((store) => store.verify());
      await refused(opened, new RegExp(`^store/${name.replace(".", "\\.")}: `));
    }
  }
});

test("verifying reports progress, and stops on request", async () => {
  const store = await storeOf(5, 9);
  /** @type {unknown[]} */
  const seen = [];
  await store.verify({ progress: (...report) => seen.push(report) });
  const total = Object.values(store.manifest.files).reduce((sum, { bytes }) => sum + bytes, 0);
  assert.deepEqual(seen.at(-1), ["verify", total, total]);
  await refused(store.verify({ signal: AbortSignal.abort() }), /verifying letters; nothing half made/, StopRequested);
});

test("a failed or stopped build leaves nothing, and a store is not overwritten", async () => {
  const folder = new MemoryDirectory("store");
  const stop = new AbortController();
  const stopping = (async function* () {
    yield* documents("a", "b");
    stop.abort();
  })();
  await refused(
    buildStore(stopping, "bytes", folder, { signal: stop.signal }),
    /building the token store store/,
    StopRequested,
  );
  assert.deepEqual(await folder.list(), []);
  const failing = (async function* () {
    yield* documents("a");
    throw new Error("the disk is gone");
  })();
  await assert.rejects(buildStore(failing, "bytes", folder), /the disk is gone/);
  assert.deepEqual(await folder.list(), []);
  await refused(buildStore([], "bytes", folder), /the corpus is empty: no document; name a source/);
  await refused(
    buildStore(documents("", ""), "bytes", folder, { source: { paths: ["a.txt", "b.txt"] } }),
    /2 documents, all of them empty in a.txt, b.txt; name a source/,
  );
  assert.deepEqual(await folder.list(), []);
  for (const name of ["documents.bin", "manifest.json"]) {
    const full = new MemoryDirectory("store");
    const { create } = full;
    full.create = (file) => (file === name ? Promise.reject(new Error("full")) : create.call(full, file));
    await assert.rejects(buildStore(documents("a"), "bytes", full), /full/);
    assert.deepEqual(await full.list(), []);
  }
  await buildStore(documents("a"), "bytes", folder);
  await refused(buildStore(documents("b"), "bytes", folder), /store exists already/);
  assert.equal((await TokenStore.open(folder)).tokens, 1);
});

test("the characters of a corpus need two readings of it", async () => {
  const folder = new MemoryDirectory("store");
  const store = await buildStore(documents("ba", "🙂a"), "characters", folder);
  assert.deepEqual([...(await store.read(0, 4))], [1, 0, 2, 0]);
  assert.equal((await store.tokenizer()).decode([2, 1]), "🙂b");
  const once = documents("a").values();
  await refused(buildStore(once, "characters", new MemoryDirectory()), /reads the documents twice/, ConfigError);
});

test("dropped files become a store", async () => {
  const files = [
    Object.assign(new Blob(["\ufeffeins\n"]), { name: "a.txt" }),
    Object.assign(new Blob(['{"text": "zwei"}\n\n{"text": "drei"}']), { name: "b.jsonl" }),
  ];
  const source = describeSource(files);
  const store = await buildStore(textDocuments(files), "characters", new MemoryDirectory(), { source });
  const tokenizer = await store.tokenizer();
  const texts = [];
  for (let index = 0; index < store.documents; index++) texts.push(tokenizer.decode(await store.document(index)));
  assert.deepEqual(texts, ["eins\n", "zwei", "drei"]);
  assert.deepEqual(store.manifest.source, {
    type: "files",
    paths: ["a.txt", "b.jsonl"],
    field: "text",
    maxBytes: null,
  });
  const broken = textDocuments([Object.assign(new Blob([Uint8Array.of(97, 0xff)]), { name: "c.txt" })]);
  await refused(buildStore(broken, "bytes", new MemoryDirectory()), /^c\.txt: not UTF-8 at offset 1 \(byte 0xFF\)/);
});

test("a document keeps its side when others are added", () => {
  const rule = { by: /** @type {const} */ ("document"), validationShare: 0.3, seed: 3 };
  assert.deepEqual(heldOut(rule, 50), heldOut(rule, 200).slice(0, 50));
});

test("every token is read once, and every target is counted", async () => {
  const store = await storeOf(1, 7, 0, 12, 5, 1, 30, 2);
  for (const length of [1, 2, 3, 5, 16, 100]) {
    const view = store.split("all");
    const sets = [
      new WindowDataset(view, length),
      new WindowDataset(view, length, { isolateDocuments: false }),
      new WindowDataset(view, length, { stride: 1 }),
      new PackedDataset(view, length),
    ];
    for (const dataset of sets) {
      const ledger = dataset.ledger;
      assert.equal(ledger.rows * length, ledger.kept + ledger.repeated + ledger.padded);
      assert.equal(ledger.tokens, ledger.kept + ledger.targetOnly + ledger.dropped);
      assert.equal(ledger.targets + ledger.acrossDocuments, ledger.kept + ledger.repeated);
      let targets = 0;
      for (let index = 0; index < dataset.size; index++) {
        const found = (await dataset.sample(index)).targets.filter((target) => target !== IGNORE).length;
        assert.equal(dataset.targetCounts([index])[0], found);
        targets += found;
      }
      assert.equal(targets, ledger.targets);
    }
  }
});

test("the loader gives any step at any time, ahead or not", async () => {
  const dataset = new WindowDataset((await storeOf(300)).split("all"), 8);
  const plan = new BatchPlan({ size: dataset.size, globalBatch: 4, seed: 5, limit: 21 });
  assert.equal(plan.steps, 6);
  assert.deepEqual(plan.indices(6).slice(1), [-1, -1, -1]);
  const plain = new DataLoader(dataset, plan, 2, { prefetch: 0 });
  const ahead = new DataLoader(dataset, plan, 2, { prefetch: 3 });
  for (const step of [1, 2, 3, 2, 6, 1, 5, 6, 6, 4]) {
    assert.deepEqual(await ahead.step(step), await plain.step(step));
  }
  // Asked for before what stands ahead of it is made.
  const both = await Promise.all([ahead.step(4), ahead.step(5)]);
  assert.deepEqual(both, [await plain.step(4), await plain.step(5)]);
  await refused(ahead.step(7), /there is no data step 7, expected 1\.\.6/);
  ahead.close();
  await assert.rejects(ahead.step(1), /closed/);
});

test("what goes wrong ahead is said when the step is asked for", async () => {
  const folder = new MemoryDirectory("store");
  await buildStore(documents("x".repeat(100)), "bytes", folder, { split: ALL });
  /** @type {Manifest} */
  const manifest = JSON.parse(new TextDecoder().decode(await folder.read("manifest.json")));
  const small = seal({ ...manifest, vocabularySize: 100 });
  await writeAll(folder, "manifest.json", JSON.stringify(small));
  const dataset = new WindowDataset((await TokenStore.open(folder)).split("all"), 8);
  const loader = new DataLoader(dataset, new BatchPlan({ size: dataset.size, globalBatch: 2, seed: 0 }), 1);
  const message = /store\/tokens\.bin: id 120 at offset 0 \(token 0\) is outside the vocabulary: expected 0\.\.99/;
  await refused(dataset.sample(0), message);
  for (const step of [1, 2, 3]) await refused(loader.step(step), /id 120 at offset/);
  await new Promise((resolve) => setTimeout(resolve, 20)); // no unhandled rejection of what was made ahead
});

test("evaluation reads every sample once, or the same few spread over all", async () => {
  const dataset = new WindowDataset((await storeOf(100)).split("all"), 8);
  /** @param {number} size @param {number | null} [batches] */
  const firsts = async (size, batches) => {
    const found = [];
    for await (const { ids } of evaluationBatches(dataset, size, batches)) {
      for (let row = 0; row < size; row++) found.push(ids[row * 8]);
    }
    return found;
  };
  const all = await firsts(5);
  assert.deepEqual([dataset.size, all.length], [13, 15]);
  assert.deepEqual(all.slice(13), [0, 0]);
  assert.deepEqual(
    await firsts(2, 2),
    [0, 3, 6, 9].map((index) => all[index]),
  );
});

test("what is prepared is what the settings say", async () => {
  const folder = new MemoryDirectory("store");
  await buildStore(documents(..."abcdefghij".split("").map((letter) => letter.repeat(9))), "bytes", folder);
  const samples = { mode: /** @type {const} */ ("windows"), stride: 2, isolateDocuments: true };
  const split = { by: /** @type {const} */ ("document"), validationShare: 0.3 };
  const prepared = await prepareData(folder, { sequenceLength: 4, split, samples });
  assert.equal(prepared.tokenizer.kind, "bytes");
  assert.equal(prepared.fingerprint, prepared.train.fingerprint);
  assert.equal(prepared.train.ledger.tokens + (prepared.validation?.ledger.tokens ?? 0), 90);
  assert.equal(prepared.validation?.ledger.repeated, 0);
  const none = await prepareData(folder, { sequenceLength: 4, split: { ...split, validationShare: 0 }, samples });
  assert.equal(none.validation, null);
});
