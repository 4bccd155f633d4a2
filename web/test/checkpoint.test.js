/** @file Checkpoints are saved whole or not at all, found as Python finds them, and restored piece by piece. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { exportRun, importRun } from "../runtime/checkpoint/archive.js";
import { loadCheckpoint, restoreCheckpoint, verifyCheckpoint } from "../runtime/checkpoint/loading.js";
import { askForPersistence, requireRoom } from "../runtime/checkpoint/room.js";
import { writeCheckpoint } from "../runtime/checkpoint/snapshot.js";
import { CheckpointStore, UNFINISHED, withRunLock } from "../runtime/checkpoint/store.js";
import { CheckpointCorrupt, CheckpointNotFound, ConfigError, HybridError, LimitExceeded } from "../runtime/errors.js";
import { readAll, writeAll } from "../runtime/folders/folder.js";
import { MemoryDirectory } from "../runtime/folders/memory.js";
import { failing, tracing } from "./support/failing.js";
import { holdingSession, numbers, SHAPES, snapshot } from "./support/snapshots.js";

/** @import { Directory } from "../runtime/folders/folder.js" */

const UNIX_MS = 1_700_000_000_250;
const now = () => UNIX_MS;

/** @param {Directory} directory @param {object} [options] */
const storeIn = (directory, options = {}) => new CheckpointStore(directory, { now, ...options });

/** @param {CheckpointStore} store */
const steps = async (store) => (await store.list()).map(({ step }) => step);

/** @param {Directory} directory @param {string} name @param {string} file @param {number} at from the end */
async function flip(directory, name, file, at = -1) {
  const folder = /** @type {Directory} */ (await directory.open(name));
  const data = await readAll(folder, file, 1e9);
  data[data.length + at] ^= 1;
  await writeAll(folder, file, data);
}

test("what is saved is what is loaded", async () => {
  const directory = new MemoryDirectory("checkpoints");
  const store = storeIn(directory);
  const saved = snapshot(500);
  const ref = await store.save(saved);
  assert.deepEqual([ref.name, ref.step, ref.sequence, ref.unixMs], ["step-00000500", 500, 1, UNIX_MS]);
  const { state, manifest, files, model } = await loadCheckpoint(await storeIn(directory).open(ref));
  assert.deepEqual(numbers(state), numbers(saved.state));
  assert.equal(state.optimizerStep, 500);
  assert.deepEqual(files, saved.files);
  assert.equal(model.width, 2);
  assert.deepEqual(manifest.lineage, {
    previousCheckpointHash: null,
    runId: "run-a",
    runtime: "browser",
    sequence: 1,
  });
  for (const key of /** @type {const} */ (["progress", "config", "hashes", "fingerprints", "session", "seed"])) {
    assert.deepEqual(manifest[key], saved[key], key);
  }
  const folder = /** @type {MemoryDirectory} */ (await directory.open(ref.name));
  assert.deepEqual(await folder.list(), [
    ...["checkpoint.json", "config.json", "generation_config.json", "model.safetensors", "optimizer.safetensors"],
  ]);
});

test("the chain of checkpoints is linked, and the newest is of the newest history", async () => {
  const directory = new MemoryDirectory();
  const first = storeIn(directory);
  const refs = [await first.save(snapshot(300)), await first.save(snapshot(500))];
  const again = storeIn(directory);
  assert.deepEqual(await again.latest(), refs[1]);
  again.continueFrom(refs[0]);
  const back = await again.save(snapshot(350, 1));
  const { lineage } = (await verifyCheckpoint(await again.open(back))).manifest;
  assert.deepEqual([lineage.sequence, lineage.previousCheckpointHash], [3, refs[0].checkpointHash]);
  assert.deepEqual(await storeIn(directory).latest(), back);
  const next = await storeIn(directory).save(snapshot(360));
  const { manifest } = await verifyCheckpoint(await again.open(next));
  assert.equal(manifest.lineage.previousCheckpointHash, back.checkpointHash);
});

test("the same state is not saved twice, another one of its step takes over", async () => {
  const directory = new MemoryDirectory();
  const store = storeIn(directory);
  const ref = await store.save(snapshot(5, 1));
  assert.deepEqual(await store.save(snapshot(5, 1)), ref);
  assert.deepEqual(await storeIn(directory).save(snapshot(5, 1)), ref);
  const other = await store.save(snapshot(5, 2));
  assert.deepEqual([other.name, other.sequence], ["step-000000005", 2]);
  assert.deepEqual(await directory.folders(), ["step-000000005"]);
  assert.equal((await store.save(snapshot(5, 3))).name, "step-00000005");
});

test("a damaged checkpoint of the step is never overwritten", async () => {
  const directory = new MemoryDirectory();
  const ref = await storeIn(directory).save(snapshot(5));
  await flip(directory, ref.name, "model.safetensors");
  const store = storeIn(directory);
  const again = await store.save(snapshot(5));
  assert.equal(again.name, "step-000000005");
  await verifyCheckpoint(await store.open(again));
  await assert.rejects(verifyCheckpoint(await store.open(ref)), CheckpointCorrupt);
  await storeIn(directory, { keepLast: 1 }).save(snapshot(6));
  await store.clean();
  assert.deepEqual(
    (await store.list()).map(({ name, status }) => [name, status]),
    [
      ["step-00000005", "set aside"],
      ["step-00000006", "complete"],
    ],
  );
});

test("absent, unfinished and damaged are three answers", async () => {
  const directory = new MemoryDirectory("checkpoints");
  const store = storeIn(directory);
  assert.equal(await store.latest(), null);
  await assert.rejects(store.open("step-00000001"), CheckpointNotFound);
  const first = await store.save(snapshot(1));
  const second = await store.save(snapshot(2));
  const folder = /** @type {Directory} */ (await directory.open(second.name));
  const manifest = await readAll(folder, "checkpoint.json", 1e9);

  await folder.remove("checkpoint.json");
  assert.deepEqual(await store.latest(), first);
  await assert.rejects(store.open(second), /its save never finished/);

  await writeAll(folder, "checkpoint.json", "{}");
  await assert.rejects(
    store.latest(),
    /step-00000002.*cannot be used; restore it, or move checkpoints\/step-00000002 away, or resume from .*step-00000001/,
  );
  assert.deepEqual(
    (await store.list()).map(({ status }) => status),
    ["damaged", "complete"],
  );
  await writeAll(folder, "checkpoint.json", manifest);
  await writeAll(folder, UNFINISHED, "");
  assert.deepEqual(await store.latest(), first);
  assert.deepEqual(await store.clean(), [second.name]);
  assert.deepEqual(await steps(store), [1]);
});

test("a damaged older checkpoint does not stand in the way, and other folders are ignored", async () => {
  const directory = new MemoryDirectory();
  const store = storeIn(directory);
  const first = await store.save(snapshot(1));
  await store.save(snapshot(2));
  await /** @type {Directory} */ (await directory.open(first.name)).remove("model.safetensors");
  for (const name of ["step-9", "notes", "step-00000009x"]) await directory.directory(name);
  assert.equal((await store.latest())?.step, 2);
});

test("retention keeps the newest and every so many, and never deletes the only good one", async () => {
  const directory = new MemoryDirectory();
  const store = storeIn(directory, { keepLast: 2, keepEvery: 10 });
  for (let step = 5; step < 36; step += 5) await store.save(snapshot(step));
  assert.deepEqual(await steps(store), [10, 20, 30, 35]);
  for (const { name, step } of await store.list()) {
    if (step > 10) await flip(directory, name, "optimizer.safetensors");
  }
  assert.deepEqual(await storeIn(directory, { keepLast: 1 }).prune(), []);
  const last = await store.save(snapshot(40));
  assert.equal((await storeIn(directory, { keepLast: 1 }).prune()).length, 4);
  assert.deepEqual(await storeIn(directory).latest(), last);
  assert.throws(() => storeIn(directory, { keepLast: 0 }), ConfigError);
});

test("retention keeps checkpoints that are hours apart", async () => {
  const directory = new MemoryDirectory();
  let hours = 0;
  const store = storeIn(directory, { keepLast: 1, keepHours: 1, now: () => 1e12 + hours * 3_600_000 });
  let step = 0;
  for (hours of [0, 0.5, 1, 1.5, 2.1, 2.6, 3, 3.1, 9.1, 9.6]) await store.save(snapshot(++step));
  assert.deepEqual(await steps(store), [1, 3, 5, 8, 9, 10]);
  assert.throws(() => storeIn(directory, { keepHours: 0 }), ConfigError);
});

test("a wrong snapshot is refused before anything is written", async () => {
  const directory = new MemoryDirectory();
  const good = snapshot(1);
  const norm = good.state.model["model.norm.weight"];
  const { "model.norm.weight": _, ...less } = good.state.model;
  /** @type {[Partial<typeof good.state>, string][]} */
  const wrong = [
    [{ model: less }, "the snapshot lacks the tensor 'model.norm.weight' of shape (2,)"],
    [{ model: { ...good.state.model, extra: norm } }, "the snapshot has the tensor 'extra', which"],
    [{ model: { ...less, "model.norm.weight": { shape: [1, 2], data: norm.data } } }, "has shape (1, 2), but"],
    [{ optimizer: { "moment1/nothing": norm } }, "has the optimizer tensor 'moment1/nothing'"],
  ];
  for (const [change, message] of wrong) {
    const state = { ...good.state, ...change };
    await assert.rejects(storeIn(directory).save({ ...good, state }), (error) => {
      assert.ok(error instanceof HybridError && !(error instanceof CheckpointCorrupt));
      return error.message.includes(message);
    });
  }
  await assert.rejects(storeIn(directory).save({ ...good, seed: 2n ** 53n + 1n }), /seed is 9007199254740993: JSON/);
  await assert.rejects(storeIn(directory).save({ ...good, runId: "" }), /runId is '': expected a text/);
  assert.deepEqual(await directory.folders(), []);
});

// --- interruptions

/** Ordinary saves with retention, then a save that replaces another state of its step. */
const SCENARIO = /** @type {const} */ ([
  [1, 1],
  [2, 2],
  [3, 3],
  [3, 33],
  [4, 4],
]);

/** @param {Directory} directory @param {(done: number) => void} [saved] @param {number} [from] */
async function runScenario(directory, saved, from = 0) {
  const store = storeIn(directory, { keepLast: 2 });
  for (const [index, [step, seed]] of SCENARIO.entries()) {
    if (index < from) continue;
    await store.save(snapshot(step, seed));
    saved?.(index + 1);
  }
}

for (const how of /** @type {const} */ (["stops for good", "fails once", "stops half-way"])) {
  test(`a save that ${how} at any operation loses nothing that was saved before`, async () => {
    const whole = failing(new MemoryDirectory(), Number.POSITIVE_INFINITY, how);
    await runScenario(whole.directory);
    assert.ok(whole.operations() > 100);
    const hashes = new Map();
    for (const [step, seed] of SCENARIO) {
      const ref = await storeIn(new MemoryDirectory()).save(snapshot(step, seed));
      hashes.set(ref.stateHash, hashes.size);
    }
    for (let at = 1; at <= whole.operations(); at += how === "stops half-way" ? 2 : 5) {
      const memory = new MemoryDirectory();
      let acknowledged = 0;
      await assert.rejects(
        runScenario(failing(memory, at, how).directory, (done) => {
          acknowledged = done;
        }),
        HybridError,
        `operation ${at}`,
      );
      const store = storeIn(memory, { keepLast: 2 });
      const found = await store.latest();
      assert.ok(
        (await store.list()).every(({ status }) => status !== "damaged"),
        `operation ${at}`,
      );
      if (acknowledged) assert.ok(found, `operation ${at}: an acknowledged checkpoint is gone`);
      const index = found ? hashes.get(found.stateHash) : -1;
      // The last save may have come to its end without being acknowledged.
      assert.ok([acknowledged - 1, acknowledged].includes(index), `operation ${at}: found ${index} of ${acknowledged}`);
      if (found) await verifyCheckpoint(await store.open(found));
      await store.clean();
      assert.deepEqual(await store.latest(), found);
      assert.ok((await store.list()).every(({ status }) => status === "complete"));
      await runScenario(memory, undefined, Math.max(acknowledged, 0));
      assert.deepEqual([await steps(store), (await store.latest())?.step], [[3, 4], 4], `operation ${at}`);
    }
  });
}

test("no room is said before a save, and the browser's own refusal after it", async () => {
  const directory = new MemoryDirectory("checkpoints");
  const first = await storeIn(directory).save(snapshot(1));
  /** @param {number} quota */
  const storage = (quota) =>
    /** @type {any} */ ({
      estimate: async () => ({ quota, usage: 100 }),
      persisted: async () => false,
      persist: async () => true,
    });
  const store = storeIn(directory, { room: (/** @type {number} */ bytes) => requireRoom(bytes, storage(5000)) });
  await assert.rejects(store.save(snapshot(2)), (error) => {
    assert.ok(error instanceof LimitExceeded);
    assert.match(error.message, /needs \d+ bytes, but this browser has 4900 left of the 5000 .*export and delete/);
    return true;
  });
  assert.deepEqual(await store.latest(), first);
  await requireRoom(4900, storage(5000));
  await requireRoom(1e15, undefined);
  assert.equal(await askForPersistence(storage(1)), true);
  assert.equal(await askForPersistence(undefined), false);

  const full = failing(directory, 12, "stops for good", () => new LimitExceeded("no more room"));
  await assert.rejects(storeIn(full.directory).save(snapshot(2)), (error) => {
    assert.ok(error instanceof LimitExceeded);
    assert.match(error.message, /step-00000002: could not be saved: no more room; earlier checkpoints are untouched/);
    return true;
  });
  assert.deepEqual(await store.latest(), first);
});

test("one tab trains a run", async () => {
  const held = new Set();
  const locks = /** @type {any} */ ({
    request: async (/** @type {string} */ name, /** @type {unknown} */ _, /** @type {any} */ work) => {
      if (held.has(name)) return work(null);
      held.add(name);
      try {
        return await work({ name });
      } finally {
        held.delete(name);
      }
    },
  });
  const result = await withRunLock(
    "a",
    async () => {
      await assert.rejects(
        withRunLock("a", async () => 1, locks),
        /run 'a': another tab is training it/,
      );
      return withRunLock("b", async () => 2, locks);
    },
    locks,
  );
  assert.deepEqual(
    [result, await withRunLock("a", async () => 3, locks), await withRunLock("a", async () => 4, undefined)],
    [2, 3, 4],
  );
});

// --- restoring

test("a session gets every tensor of a checkpoint, or an error", async () => {
  const directory = new MemoryDirectory();
  const saved = snapshot(7);
  const ref = await storeIn(directory).save(saved);
  const folder = /** @type {Directory} */ (await directory.open(ref.name));
  const session = holdingSession(SHAPES);
  /** @type {number[]} */
  const progress = [];
  const { manifest } = await restoreCheckpoint(folder, session, { progress: (done) => void progress.push(done) });
  assert.equal(manifest.checkpointHash, ref.checkpointHash);
  const found = Object.fromEntries(Object.entries(session.written).map(([name, data]) => [name, [...data]]));
  assert.deepEqual(found, numbers(saved.state));
  assert.deepEqual(session.progress(), { optimizerStep: 7, scaler: saved.scaler });
  assert.equal(progress.at(-1), ref.size);

  const reading = holdingSession(SHAPES, false);
  await restoreCheckpoint(folder, reading);
  assert.deepEqual(Object.keys(reading.written).sort(), Object.keys(SHAPES).sort());

  const { "model.norm.weight": _, ...less } = SHAPES;
  await assert.rejects(
    restoreCheckpoint(folder, holdingSession(less)),
    /weight tensor 'model.norm.weight' belongs to no/,
  );
  await assert.rejects(
    restoreCheckpoint(folder, holdingSession({ ...SHAPES, more: [1] })),
    /weight tensor 'more' is missing/,
  );
  await assert.rejects(
    restoreCheckpoint(folder, holdingSession({ ...SHAPES, "model.embed_tokens.weight": [2, 5] })),
    /'model.embed_tokens.weight' is float32 \[5, 2\]: expected float32 \[2, 5\]/,
  );
  const aborted = AbortSignal.abort();
  await assert.rejects(restoreCheckpoint(folder, holdingSession(SHAPES), { signal: aborted }), { name: "AbortError" });
  await flip(directory, ref.name, "optimizer.safetensors");
  const refused = holdingSession(SHAPES);
  await assert.rejects(restoreCheckpoint(folder, refused), CheckpointCorrupt);
  assert.equal(refused.progress(), null);
});

test("weights that are no numbers are refused", async () => {
  const directory = new MemoryDirectory();
  const saved = snapshot(7);
  saved.state.optimizer["moment2/model.norm.weight"].data[1] = Number.NaN;
  const ref = await storeIn(directory).save(saved);
  const folder = /** @type {Directory} */ (await directory.open(ref.name));
  await assert.rejects(
    restoreCheckpoint(folder, holdingSession(SHAPES)),
    /moment tensor 'moment2\/model.norm.weight' holds 1 non-finite/,
  );
});

test("saving and restoring hold the largest tensor and a few chunks, however large the model is", async () => {
  // Two tables of 32 MiB: what is asked for and written comes in pieces of 8 MiB.
  const vocabulary = 2 ** 22;
  const hybrid = {
    vocabulary_size: vocabulary,
    context_length: 4,
    layers: 1,
    width: 2,
    heads: 1,
    feed_forward_width: 2,
  };
  const files = { "config.json": JSON.stringify({ hybrid }), "generation_config.json": "{}\n" };
  const shapes = { ...SHAPES, "model.embed_tokens.weight": [vocabulary, 2], "lm_head.weight": [vocabulary, 2] };
  const model = Object.fromEntries(
    Object.entries(shapes).map(([name, shape]) => {
      const size = shape.reduce((product, extent) => product * extent, 1);
      return [name, { shape, data: new Float32Array(size).fill(0.5) }];
    }),
  );
  const small = snapshot(1);
  const state = { ...small.state, model, optimizer: {} };
  const traced = tracing(new MemoryDirectory("big"));
  await writeCheckpoint(traced.folder, { ...small, state, files }, { sequence: 1, previousCheckpointHash: null, now });
  assert.ok(traced.largestWrite() <= 8 * 2 ** 20);
  const { manifest } = await verifyCheckpoint(traced.folder);
  assert.equal(manifest.files["model.safetensors"].chunks.length, 9);
  assert.ok(traced.largestRead() <= 8 * 2 ** 20);

  // Bytes that were read and are not yet in the session: what is in memory at once, garbage aside.
  let given = -traced.bytesRead();
  let most = 0;
  const session = {
    ...holdingSession(shapes, false),
    /** @type {import("../runtime/checkpoint/loading.js").Restorable["restore"]} */
    restore: (_, fill) =>
      fill((_name, values) => {
        most = Math.max(most, traced.bytesRead() + given);
        given -= values.byteLength;
      }),
  };
  await assert.rejects(restoreCheckpoint(traced.folder, session), /moment tensor .* is missing/);
  const largest = 32 * 2 ** 20;
  assert.ok(most > largest && most <= largest + 3 * 8 * 2 ** 20, `${most} bytes were held`);
});

// --- carrying runs

test("a run is packed, carried and goes on elsewhere", async () => {
  const run = new MemoryDirectory("run-a");
  await assert.rejects(exportRun(run), CheckpointNotFound);
  const checkpoints = await run.directory("checkpoints");
  const store = storeIn(checkpoints);
  await store.save(snapshot(1));
  const ref = await store.save(snapshot(2));
  const packed = await exportRun(run);
  assert.equal(packed.name, "run-a-step-00000002.hybrid");
  const blob = new Blob([await new Response(packed.stream()).arrayBuffer()]);
  assert.equal(blob.size, packed.size);

  const elsewhere = new MemoryDirectory("run-b");
  const taken = await importRun(elsewhere, blob);
  assert.deepEqual(taken, ref);
  assert.deepEqual(await importRun(elsewhere, blob), ref, "once is enough");
  const other = storeIn(await elsewhere.directory("checkpoints"));
  assert.deepEqual(await other.latest(), ref);
  const next = await other.save(snapshot(3));
  const { lineage } = (await verifyCheckpoint(await other.open(next))).manifest;
  assert.deepEqual([lineage.sequence, lineage.previousCheckpointHash], [3, ref.checkpointHash]);

  await store.save(snapshot(3, 33));
  await store.save(snapshot(4));
  const older = new Blob([await new Response((await exportRun(elsewhere)).stream()).arrayBuffer()]);
  await assert.rejects(importRun(run, older), /its checkpoint 4 is not older than .* which is number 3 of its run/);
});

test("an archive that is damaged on the way leaves no checkpoint", async () => {
  const run = new MemoryDirectory("run-a");
  await storeIn(await run.directory("checkpoints")).save(snapshot(1));
  const good = new Uint8Array(await new Response((await exportRun(run)).stream()).arrayBuffer());
  for (const at of [50, Math.floor(good.length / 2), good.length - 30, good.length - 1]) {
    const bad = good.slice();
    bad[at] ^= 0x41;
    const elsewhere = new MemoryDirectory("run-b");
    await assert.rejects(importRun(elsewhere, new Blob([bad]), { name: "a.hybrid" }), CheckpointCorrupt);
    assert.deepEqual(await (await elsewhere.directory("checkpoints")).folders(), []);
  }
});
