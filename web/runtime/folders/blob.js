/** @file A folder of files that were dropped on a page or chosen in a dialogue. May import: errors, contracts. */

import { HybridError } from "../errors.js";
import { checkRange, notThere } from "./folder.js";

/** @import { Folder } from "./folder.js" */

/** @implements {Folder} */
export class BlobFolder {
  #blobs;

  /**
   * @param {Iterable<Blob & {name: string}>} files such as a `FileList`
   * @param {string} [name] for messages
   */
  constructor(files, name = "files") {
    this.#blobs = new Map([...files].map((file) => [file.name, file]));
    this.name = name;
  }

  async list() {
    return [...this.#blobs.keys()].sort();
  }

  /** @param {string} file */
  async size(file) {
    return this.#blobs.get(file)?.size ?? null;
  }

  /** @param {string} file @param {number} [begin] @param {number} [end] */
  async read(file, begin, end) {
    const blob = this.#blobs.get(file);
    if (!blob) throw notThere(this, file);
    return readBlob(blob, `${this.name}/${file}`, ...checkRange(this, file, blob.size, begin, end));
  }
}

/**
 * @param {Blob} blob
 * @param {string} where for messages
 * @param {number} begin
 * @param {number} end
 * @returns {Promise<Uint8Array<ArrayBuffer>>}
 * @throws {HybridError} when the file behind it is gone or was changed
 */
export async function readBlob(blob, where, begin, end) {
  try {
    return new Uint8Array(await blob.slice(begin, end).arrayBuffer());
  } catch (error) {
    const { message } = /** @type {Error} */ (error);
    throw new HybridError(`${where}: cannot be read any more; choose it again (${message})`, { cause: error });
  }
}
