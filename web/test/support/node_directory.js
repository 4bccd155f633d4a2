/** @file Folders on the disk, for tests under Node and Deno. */

import { mkdir, open, readdir, rm, stat } from "node:fs/promises";
import path from "node:path";

import { checkName, checkRange, notThere } from "../../runtime/folders/folder.js";

/** @import { Directory, FileSink } from "../../runtime/folders/folder.js" */

/** @implements {Directory} */
export class NodeDirectory {
  /** @param {string} name its path */
  constructor(name) {
    this.name = name;
  }

  async list() {
    return (await this.#entries()).filter((entry) => entry.isFile()).map(({ name }) => name);
  }

  async folders() {
    return (await this.#entries()).filter((entry) => entry.isDirectory()).map(({ name }) => name);
  }

  /** @param {string} file */
  async size(file) {
    const found = await stat(path.join(this.name, file)).catch(() => null);
    return found?.isFile() ? found.size : null;
  }

  /** @param {string} file @param {number} [begin] @param {number} [end] */
  async read(file, begin, end) {
    const size = await this.size(file);
    if (size === null) throw notThere(this, file);
    const [first, after] = checkRange(this, file, size, begin, end);
    const handle = await open(path.join(this.name, file));
    try {
      const bytes = new Uint8Array(after - first);
      await handle.read(bytes, 0, bytes.length, first);
      return bytes;
    } finally {
      await handle.close();
    }
  }

  /** @param {string} file */
  create(file) {
    return this.append(file, 0);
  }

  /** @param {string} file @param {number} [at] @returns {Promise<FileSink>} */
  async append(file, at) {
    const place = path.join(this.name, checkName(this, file));
    const [, start] = checkRange(this, file, at === 0 ? 0 : ((await this.size(file)) ?? 0), 0, at);
    const handle = await open(place, start ? "r+" : "w");
    await handle.truncate(start);
    let position = start;
    return {
      write: async (bytes) => {
        await handle.write(bytes, 0, bytes.length, position);
        position += bytes.length;
      },
      flush: () => handle.sync(),
      close: () => handle.close(),
      abort: async () => {
        await handle.truncate(start);
        await handle.close();
        if (!start) await rm(place);
      },
    };
  }

  /** @param {string} name */
  async remove(name) {
    await rm(path.join(this.name, checkName(this, name)), { recursive: true, force: true });
  }

  /** @param {string} name @returns {Promise<NodeDirectory | null>} */
  async open(name) {
    const place = path.join(this.name, name);
    const found = await stat(place).catch(() => null);
    return found?.isDirectory() ? new NodeDirectory(place) : null;
  }

  /** @param {string} name @returns {Promise<NodeDirectory>} */
  async directory(name) {
    const place = path.join(this.name, checkName(this, name));
    await mkdir(place, { recursive: true });
    return new NodeDirectory(place);
  }

  async #entries() {
    const entries = await readdir(this.name, { withFileTypes: true });
    return entries.sort((a, b) => (a.name < b.name ? -1 : 1));
  }
}
