/**
 * @file A folder on a server, read in ranges, so that a file of gigabytes need never be here whole.
 *
 * May import: errors, contracts.
 */

import { DataContractError, HybridError } from "../errors.js";
import { checkRange, nameProblem, notThere, sizeOf } from "./folder.js";

/** @import { Folder } from "./folder.js" */

/** @typedef {(url: string, options: {headers: Record<string, string>}) => Promise<Response>} Fetch */

const RANGE = /^bytes (\d+)-(\d+)\/(\d+)$/;
const EMPTY = /^bytes \*\/0$/;

/** @implements {Folder} */
export class HttpFolder {
  #url;
  #fetch;
  /** @type {Map<string, number>} */
  #sizes = new Map();

  /**
   * @param {string | URL} url of the folder, with the slash at its end
   * @param {{fetch?: Fetch, name?: string}} [options] name: for messages
   */
  constructor(url, { fetch = (address, options) => globalThis.fetch(address, options), name } = {}) {
    this.#url = new URL(url).href;
    this.#fetch = fetch;
    this.name = name ?? this.#url.replace(/\/$/, "");
  }

  /** @returns {Promise<string[]>} */
  async list() {
    throw new HybridError(`${this.name}: a folder on a server cannot be listed`);
  }

  /** @param {string} file */
  async size(file) {
    if (nameProblem(file)) return null;
    const known = this.#sizes.get(file);
    if (known !== undefined) return known;
    const answer = await this.#ask(file, 0, 0);
    if (answer.status === 404) return null;
    const range = answer.headers.get("Content-Range") ?? "";
    const size = RANGE.exec(range)?.[3] ?? (answer.status === 416 && EMPTY.test(range) ? "0" : null);
    const empty = answer.status === 200 && answer.headers.get("Content-Length") === "0";
    await answer.body?.cancel();
    if (size === null && !empty) throw this.#refused(file, answer);
    this.#sizes.set(file, Number(size));
    return Number(size);
  }

  /** @param {string} file @param {number} [begin] @param {number} [end] */
  async read(file, begin, end) {
    const size = await sizeOf(this, file);
    const [first, after] = checkRange(this, file, size, begin, end);
    if (first === after) return new Uint8Array(0);
    const answer = await this.#ask(file, first, after - 1);
    if (answer.status === 404) throw notThere(this, file);
    const range = answer.headers.get("Content-Range");
    if (answer.status !== 206 || range !== `bytes ${first}-${after - 1}/${size}`) {
      await answer.body?.cancel();
      throw this.#refused(file, answer, `bytes ${first}-${after - 1}/${size}`);
    }
    const bytes = new Uint8Array(await this.#reached(file, () => answer.arrayBuffer()));
    if (bytes.length !== after - first) {
      throw new DataContractError(
        `${this.name}/${file}: ${bytes.length} bytes came for bytes ${first} to ${after - 1}: the connection broke off, ` +
          "or something between here and the server changes what it sends",
      );
    }
    return bytes;
  }

  /** @param {string} file @param {number} first @param {number} last */
  #ask(file, first, last) {
    const headers = { Range: `bytes=${first}-${last}` };
    return this.#reached(file, () => this.#fetch(this.#url + file, { headers }));
  }

  /**
   * @template T
   * @param {string} file
   * @param {() => Promise<T>} action
   * @returns {Promise<T>}
   */
  async #reached(file, action) {
    try {
      return await action();
    } catch (error) {
      if (!(error instanceof TypeError)) throw error;
      throw new HybridError(`${this.name}/${file}: the server cannot be reached (${error.message})`, { cause: error });
    }
  }

  /** @param {string} file @param {Response} answer @param {string} [wanted] */
  #refused(file, { status, headers }, wanted) {
    const where = `${this.name}/${file}`;
    if (status === 200) {
      return new DataContractError(
        `${where}: the server sends the whole file where a part was asked for: use one that answers Range requests`,
      );
    }
    const range = headers.get("Content-Range");
    if (status === 206) {
      return new DataContractError(
        `${where}: the server sends ${range ?? "a part that it does not name"}${wanted ? ` for ${wanted}` : ""}: the file ` +
          "changed while it was read, or the server is wrong",
      );
    }
    return new HybridError(`${where}: the server answers with status ${status}`);
  }
}
