/** @file Folders in memory, which last as long as the object. May import: errors, contracts. */

import { checkName, checkRange, notThere } from "./folder.js";

/** @import { Directory, FileSink } from "./folder.js" */

/** A file's bytes with room to grow. */
class MemoryFile {
  #bytes = new Uint8Array(0);
  size = 0;

  /** @param {Uint8Array} bytes */
  append(bytes) {
    const size = this.size + bytes.length;
    if (size > this.#bytes.length) {
      const grown = new Uint8Array(Math.max(size, 2 * this.#bytes.length));
      grown.set(this.#bytes.subarray(0, this.size));
      this.#bytes = grown;
    }
    this.#bytes.set(bytes, this.size);
    this.size = size;
  }

  /** @param {number} begin @param {number} end */
  slice(begin, end) {
    return this.#bytes.slice(begin, end);
  }
}

/** What is written can be seen at once, like on a disk. @implements {Directory} */
export class MemoryDirectory {
  /** @type {Map<string, MemoryFile>} */
  #files = new Map();
  /** @type {Map<string, MemoryDirectory>} */
  #folders = new Map();

  constructor(name = "memory") {
    this.name = name;
  }

  async list() {
    return [...this.#files.keys()].sort();
  }

  /** @param {string} file */
  async size(file) {
    return this.#files.get(file)?.size ?? null;
  }

  /** @param {string} file @param {number} [begin] @param {number} [end] */
  async read(file, begin, end) {
    const found = this.#files.get(file);
    if (!found) throw notThere(this, file);
    return found.slice(...checkRange(this, file, found.size, begin, end));
  }

  /** @param {string} file */
  create(file) {
    return this.append(file, 0);
  }

  /** @param {string} file @param {number} [at] @returns {Promise<FileSink>} */
  async append(file, at) {
    const found = this.#files.get(checkName(this, file)) ?? new MemoryFile();
    const [, start] = checkRange(this, file, found.size, 0, at);
    found.size = start;
    this.#files.set(file, found);
    return {
      write: async (bytes) => found.append(bytes),
      flush: async () => {},
      close: async () => {},
      abort: async () => {
        found.size = start;
        if (!start) this.#files.delete(file);
      },
    };
  }

  /** @param {string} name */
  async remove(name) {
    this.#files.delete(name);
    this.#folders.delete(name);
  }

  async folders() {
    return [...this.#folders.keys()].sort();
  }

  /** @param {string} name @returns {Promise<MemoryDirectory | null>} */
  async open(name) {
    return this.#folders.get(name) ?? null;
  }

  /** @param {string} name @returns {Promise<MemoryDirectory>} */
  async directory(name) {
    const found = this.#folders.get(checkName(this, name)) ?? new MemoryDirectory(`${this.name}/${name}`);
    this.#folders.set(name, found);
    return found;
  }
}
