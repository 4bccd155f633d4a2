/** @file What `answer.js` can be asked about checkpoints and archives, which lie on the disk. */

import { open, readFile, stat, writeFile } from "node:fs/promises";
import path from "node:path";

import { exportCheckpoint, importRun } from "../../runtime/checkpoint/archive.js";
import { loadCheckpoint } from "../../runtime/checkpoint/loading.js";
import { writeCheckpoint } from "../../runtime/checkpoint/snapshot.js";
import { CheckpointStore } from "../../runtime/checkpoint/store.js";
import { ZipFolder, zipLayout } from "../../runtime/folders/zip.js";
import { SafetensorsError } from "../../runtime/safetensors.js";
import { sha256 } from "../../runtime/sha256.js";
import { NodeDirectory } from "../support/node_directory.js";
import { snapshotOf } from "../support/snapshots.js";

/** @param {string} file */
async function archiveOf(file) {
  const bytes = new Uint8Array(await readFile(file));
  return {
    size: bytes.length,
    read: async (/** @type {number} */ begin, /** @type {number} */ end) => bytes.slice(begin, end),
  };
}

/** @param {Float32Array} data */
const hash = ({ buffer, byteOffset, byteLength }) => sha256(new Uint8Array(buffer, byteOffset, byteLength));

/** @type {Record<string, (one: any) => unknown>} */
export const CHECKPOINT_TASKS = {
  load_checkpoint: async ({ folder }) => {
    const { name, dir } = { name: path.basename(folder), dir: path.dirname(folder) };
    try {
      const opened = await new CheckpointStore(new NodeDirectory(dir)).open(name);
      const { manifest, state, files } = await loadCheckpoint(opened);
      const tensors = Object.entries({ ...state.model, ...state.optimizer });
      return {
        checkpointHash: manifest.checkpointHash,
        stateHash: manifest.stateHash,
        tensors: Object.fromEntries(tensors.map(([key, { shape, data }]) => [key, [shape, hash(data)]])),
        tokenizer: files["tokenizer.json"] ?? null,
      };
    } catch (error) {
      if (error instanceof SafetensorsError) return { refused: [error.category, error.message] };
      throw error;
    }
  },
  write_checkpoint: async ({ source, target, sequence, previous, unixMs }) => {
    const snapshot = await snapshotOf(new NodeDirectory(source));
    const place = { sequence, previousCheckpointHash: previous, now: () => unixMs };
    return (await writeCheckpoint(new NodeDirectory(target), snapshot, place)).checkpointHash;
  },
  latest_checkpoint: async ({ folder }) => {
    const ref = await new CheckpointStore(new NodeDirectory(folder)).latest();
    return ref && [ref.name, ref.step, ref.sequence, ref.checkpointHash, ref.stateHash, ref.unixMs, ref.size];
  },
  zip_entries: async ({ archive }) => {
    const zip = await ZipFolder.open(await archiveOf(archive), archive);
    const found = [];
    for (const name of await zip.list()) found.push([name, sha256(await zip.read(name))]);
    return found;
  },
  sparse_zip: async ({ archive, sizes }) => {
    const { heads, tail, size } = zipLayout(
      sizes.map((/** @type {number} */ bytes, /** @type {number} */ index) => ({
        name: `f${index}`,
        size: bytes,
        crc: 0,
      })),
    );
    const file = await open(archive, "w");
    let at = 0;
    for (const [index, part] of [...heads, tail].entries()) {
      await file.write(part, 0, part.length, at);
      at += part.length + (sizes[index] ?? 0);
    }
    await file.close();
    return size;
  },
  pack_checkpoint: async ({ folder, archive }) => {
    const { size, stream } = await exportCheckpoint(new NodeDirectory(folder));
    await writeFile(archive, stream());
    return [size, (await stat(archive)).size];
  },
  unpack_checkpoint: async ({ archive, run }) => {
    const ref = await importRun(new NodeDirectory(run), await archiveOf(archive), { name: archive });
    return [ref.name, ref.checkpointHash];
  },
};
