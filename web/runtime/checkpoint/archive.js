/**
 * @file `*.hybrid`: a checkpoint folder as one uncompressed zip, to carry a run from one place to another.
 *
 * May import: folders, checkpoint.
 */

import { CheckpointNotFound } from "../errors.js";
import { Checksums, ZipFolder, zipFolder } from "../folders/zip.js";
import { verifyCheckpoint } from "./loading.js";
import { MANIFEST_NAME } from "./manifest.js";
import { CheckpointStore } from "./store.js";

/** @import { Directory, Folder } from "../folders/folder.js" */
/** @import { ByteRange } from "../folders/zip.js" */
/** @import { LoadOptions } from "./loading.js" */
/** @import { CheckpointRef, StoreOptions } from "./store.js" */

export const CHECKPOINTS_FOLDER = "checkpoints";

/**
 * Pack a checkpoint. Every byte of it is verified first.
 *
 * @param {Folder} folder
 * @param {LoadOptions} [options]
 * @returns {Promise<{size: number, stream: () => ReadableStream<Uint8Array<ArrayBuffer>>}>} the archive's size in bytes
 * @throws {CheckpointCorrupt}
 */
export async function exportCheckpoint(folder, options = {}) {
  const checksums = new Checksums();
  /** @type {Folder} */
  const watched = {
    name: folder.name,
    list: () => folder.list(),
    size: (file) => folder.size(file),
    read: async (file, begin = 0, end = undefined) => {
      const bytes = await folder.read(file, begin, end);
      checksums.add(file, begin, bytes);
      return bytes;
    },
  };
  const { manifest } = await verifyCheckpoint(watched, { progress: options.progress, signal: options.signal });
  const files = [MANIFEST_NAME, ...Object.keys(manifest.files)];
  return zipFolder(folder, { files, checksums, signal: options.signal });
}

/**
 * Pack the newest checkpoint of a run.
 *
 * @param {Directory} run its folder
 * @param {LoadOptions} [options]
 * @returns {Promise<{name: string, size: number, stream: () => ReadableStream<Uint8Array<ArrayBuffer>>}>} name: a file
 *   name for it
 * @throws {CheckpointNotFound}
 * @throws {CheckpointCorrupt}
 */
export async function exportRun(run, options = {}) {
  const folder = await run.open(CHECKPOINTS_FOLDER);
  const store = folder && new CheckpointStore(folder);
  const ref = store && (await store.latest());
  if (!store || !ref) throw new CheckpointNotFound(`${run.name}: there is no finished checkpoint here`);
  const packed = await exportCheckpoint(await store.open(ref), options);
  return { name: `${run.name.split("/").at(-1)}-${ref.name}.hybrid`, ...packed };
}

/**
 * Take a packed checkpoint into a run folder, where it is then the newest. Every byte is verified.
 *
 * @param {Directory} run its folder, which may be empty
 * @param {Blob | ByteRange} archive
 * @param {LoadOptions & StoreOptions & {name?: string}} [options] name: of the archive, for messages
 * @returns {Promise<CheckpointRef>}
 * @throws {CheckpointCorrupt} for a damaged or hostile archive
 * @throws {HybridError} when the run here is further than the checkpoint
 */
export async function importRun(run, archive, options = {}) {
  const zip = await ZipFolder.open(archive, options.name);
  const store = new CheckpointStore(await run.directory(CHECKPOINTS_FOLDER), options);
  return store.adopt(zip, options);
}
