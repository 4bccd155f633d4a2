/** @file What a page or a worker does with the private file system, for the browser tests to judge. */

import { exportRun, importRun } from "../../runtime/checkpoint/archive.js";
import { loadCheckpoint } from "../../runtime/checkpoint/loading.js";
import { askForPersistence, requireRoom } from "../../runtime/checkpoint/room.js";
import { CheckpointStore, withRunLock } from "../../runtime/checkpoint/store.js";
import { stableJson } from "../../runtime/contracts/stable_json.js";
import { describe } from "../../runtime/errors.js";
import { readAll, writeAll } from "../../runtime/folders/folder.js";
import { openOpfs } from "../../runtime/folders/opfs.js";
import { FolderRunPlace } from "../../runtime/runner/place_folder.js";
import { numbers, snapshot } from "./snapshots.js";

/** @param {() => Promise<unknown>} work @returns {Promise<{name: string, message: string} | null>} what it throws */
async function refusal(work) {
  try {
    await work();
    return null;
  } catch (error) {
    return describe(error);
  }
}

/** Files and folders: made, read in ranges, gone on with, cut, and removed. */
export async function files() {
  const root = await openOpfs(["files"]);
  const inner = await root.directory("inner");
  const sink = await root.create("a.txt");
  const bytes = new TextEncoder().encode("hello world");
  await sink.write(bytes.subarray(0, 6));
  await sink.write(bytes.subarray(6));
  await sink.flush();
  /** @param {string} name @param {number} [begin] @param {number} [end] */
  const text = async (name, begin, end) => new TextDecoder().decode(await root.read(name, begin, end));
  const flushed = await root.size("a.txt");
  await sink.close();
  await writeAll(inner, "b.txt", "deep");
  const part = await text("a.txt", 6, 9);
  const more = await root.append("a.txt", 6);
  await more.write(new TextEncoder().encode("all"));
  await more.close();
  const continued = await text("a.txt");
  const undone = await root.append("a.txt");
  await undone.write(new Uint8Array(1000));
  await undone.abort();
  const afterAbort = await text("a.txt");
  const made = await root.create("c.txt");
  await made.write(new Uint8Array(10));
  await made.abort();
  await writeAll(root, "a.txt", "shorter");
  const replaced = await text("a.txt");
  const listing = [await root.list(), await root.folders(), await inner.list()];
  const missing = [
    await root.size("nothing"),
    await root.open("nothing"),
    await root.size("inner"),
    await root.size("../a"),
  ];
  const refused = await Promise.all(
    [
      () => root.read("nothing"),
      () => root.read("a.txt", 2, 99),
      () => root.create("../a"),
      () => root.directory("a/b"),
    ].map(refusal),
  );
  await root.remove("inner");
  await root.remove("a.txt");
  await root.remove("a.txt");
  return {
    flushed,
    part,
    continued,
    afterAbort,
    replaced,
    listing,
    missing,
    refused,
    left: [await root.list(), await root.folders()],
  };
}

/** Save some steps. @param {readonly number[]} steps @param {string} [run] */
export async function saveSteps(steps, run = "run-a") {
  const store = new CheckpointStore(await openOpfs(["runs", run, "checkpoints"]), { keepLast: 2, room: requireRoom });
  await store.clean();
  for (const step of steps) await store.save(snapshot(step));
  return (await store.list()).map(({ name, status }) => [name, status]);
}

/** The newest checkpoint, read whole. @param {string} [run] */
export async function readNewest(run = "run-a") {
  const store = new CheckpointStore(await openOpfs(["runs", run, "checkpoints"]));
  const ref = await store.latest();
  if (!ref) return null;
  const { state, manifest } = await loadCheckpoint(await store.open(ref));
  const same = stableJson(numbers(state)) === stableJson(numbers(snapshot(ref.step).state));
  return { step: ref.step, sequence: ref.sequence, checkpointHash: manifest.checkpointHash, same };
}

/** Begin a save and end in the middle of it, as a tab that is closed does. @param {number} step */
export async function leaveInTheMiddle(step) {
  const directory = await openOpfs(["runs", "run-a", "checkpoints"]);
  const ref = await new CheckpointStore(directory).save(snapshot(step));
  const folder = await directory.directory(ref.name);
  await writeAll(folder, "unfinished", "");
  const manifest = await readAll(folder, "checkpoint.json", 1e6);
  await writeAll(folder, "checkpoint.json", manifest.subarray(0, 100));
  return ref.name;
}

/** The newest checkpoint as an archive, in base64. @param {string} [run] */
export async function packNewest(run = "run-a") {
  const { name, size, stream } = await exportRun(await openOpfs(["runs", run]));
  const bytes = new Uint8Array(await new Response(stream()).arrayBuffer());
  return {
    name,
    complete: size === bytes.length,
    base64: btoa(Array.from(bytes, (b) => String.fromCharCode(b)).join("")),
  };
}

/** @param {string} base64 @param {string} run */
export async function unpack(base64, run) {
  const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  const ref = await importRun(await openOpfs(["runs", run]), new Blob([bytes]), { name: "a.hybrid" });
  return ref.checkpointHash;
}

/** Save when there is room for little: what the estimate says, and what the browser does without one. @param {number} step */
export async function saveWithoutRoom(step) {
  const directory = await openOpfs(["runs", "run-a", "checkpoints"]);
  const store = new CheckpointStore(directory, { room: requireRoom });
  const estimated = await refusal(() => store.save(snapshot(step)));
  const filler = await refusal(async () => {
    const sink = await directory.create("filler");
    try {
      for (let megabytes = 0; megabytes < 64; megabytes++) await sink.write(new Uint8Array(2 ** 20));
    } finally {
      await sink.abort();
    }
  });
  // No estimate, and the storage full but for a little: the save itself comes upon the end.
  const sink = await directory.create("filler");
  /** @type {unknown} */
  let full = null;
  for (let size = 2 ** 20; size >= 128; size /= 2) {
    full = await refusal(async () => {
      for (let count = 0; count < 64; count++) await sink.write(new Uint8Array(size));
    });
  }
  const inside = await refusal(() => new CheckpointStore(directory).save(snapshot(step)));
  await sink.abort();
  const folders = await directory.folders();
  return { estimated, filler, full, inside, folders, files: await directory.list() };
}

/** @type {((value: unknown) => void) | null} */
let letGo = null;

/** Take a run's lock, on this page, until `release`. @param {string} run */
export async function hold(run) {
  await new Promise((taken) => {
    withRunLock(run, () => {
      taken(undefined);
      return new Promise((resolve) => {
        letGo = resolve;
      });
    });
  });
}

export async function release() {
  letGo?.(undefined);
}

/** @param {string} run */
export async function tryLock(run) {
  return refusal(() => withRunLock(run, async () => {}));
}

/** A run's place while another one is open, is closed, and where whoever opens it holds the lock. @param {string} run */
export async function placesOfOneRun(run) {
  const config = { checkpoint: { keepLast: 0, keepEvery: 0 } };
  const folder = await openOpfs(["runs", run]);
  const first = await FolderRunPlace.open(folder, config);
  const second = await refusal(() => FolderRunPlace.open(folder, config));
  const app = await refusal(() => withRunLock(run, async () => {}));
  await first.close();
  const third = await withRunLock(run, () => FolderRunPlace.open(folder, config, { isLocked: true }));
  await third.close();
  const broken = await folder.create("run.json");
  await broken.write(new TextEncoder().encode("{}"));
  await broken.close();
  const unreadable = await refusal(() => FolderRunPlace.open(folder, config));
  return { second, app, unreadable, free: await refusal(() => withRunLock(run, async () => {})) };
}

/** Save in a run's place when there is room for little. @param {string} run */
export async function placeWithoutRoom(run) {
  const place = await FolderRunPlace.open(await openOpfs(["runs", run]), { checkpoint: { keepLast: 0, keepEvery: 0 } });
  const full = await refusal(() => place.checkpoints.save(snapshot(7)));
  await place.close();
  return full;
}

/** A file that another writer has open. */
export async function busyFile() {
  const root = await openOpfs(["busy"]);
  const sink = await root.create("a");
  const second = await refusal(() => root.create("a"));
  await sink.close();
  return second;
}

export async function persistence() {
  return typeof (await askForPersistence());
}
