/** @file A folder of this machine's disk, to read in tests what Python wrote there. */

import { open, readdir, stat } from "node:fs/promises";

import { checkRange } from "../../runtime/folders/folder.js";

/**
 * @param {string} path
 * @returns {import("../../runtime/folders/folder.js").Folder & {reads: number[]}} with the size of each read so far
 */
export function diskFolder(path) {
  /** @param {string} file */
  const size = (file) =>
    stat(`${path}/${file}`).then(
      (found) => found.size,
      () => null,
    );
  /** @type {number[]} */
  const reads = [];
  return {
    name: path,
    reads,
    list: async () => (await readdir(path)).sort(),
    size,
    read: async (file, begin, end) => {
      const [first, last] = checkRange({ name: path }, file, (await size(file)) ?? 0, begin, end);
      const bytes = new Uint8Array(last - first);
      const handle = await open(`${path}/${file}`);
      try {
        await handle.read(bytes, 0, bytes.length, first);
      } finally {
        await handle.close();
      }
      reads.push(bytes.length);
      return bytes;
    },
  };
}
