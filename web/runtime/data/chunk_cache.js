/**
 * @file Pieces of a large file that were read lately.
 *
 * Samples lie anywhere in the tokens and are small; asked for one by one, each would be a request of its own. So whole
 * chunks are read and kept, neighbours that are missing at once, until the memory for them is used up. May import:
 * folders.
 */

/** @import { Folder } from "../folders/folder.js" */

const CHUNK_BYTES = 2 ** 18;
const LARGEST_READ = 32; // chunks, 8 MiB

/** Reads ranges of one file. */
export class ChunkCache {
  #folder;
  #file;
  #size;
  #most;
  /** @type {Map<number, Promise<Uint8Array<ArrayBuffer>>>} by number, the one used last at the end */
  #chunks = new Map();

  /**
   * @param {Folder} folder
   * @param {string} file
   * @param {number} size of the file
   * @param {number} bytes that are kept at most
   */
  constructor(folder, file, size, bytes) {
    this.#folder = folder;
    this.#file = file;
    this.#size = size;
    this.#most = Math.max(1, Math.floor(bytes / CHUNK_BYTES));
  }

  /**
   * @param {number} begin
   * @param {number} end
   * @returns {Promise<Uint8Array<ArrayBuffer>>} the bytes from `begin` to before `end`, in memory of their own
   */
  async read(begin, end) {
    const bytes = new Uint8Array(end - begin);
    const first = Math.floor(begin / CHUNK_BYTES);
    const last = Math.ceil(end / CHUNK_BYTES);
    // A group at a time: a long range needs no more memory than what it is read into.
    for (let group = first; group < last; group += LARGEST_READ) {
      const until = Math.min(last, group + LARGEST_READ);
      const chunks = await Promise.all(this.#take(group, until));
      for (const [place, chunk] of chunks.entries()) {
        const start = (group + place) * CHUNK_BYTES - begin;
        const part = chunk.subarray(Math.max(0, -start), Math.min(CHUNK_BYTES, end - begin - start));
        bytes.set(part, Math.max(0, start));
      }
    }
    return bytes;
  }

  /** @param {number} first @param {number} last @returns {Promise<Uint8Array<ArrayBuffer>>[]} chunks first..last-1 */
  #take(first, last) {
    const taken = [];
    for (let number = first; number < last; number++) {
      if (!this.#chunks.has(number)) this.#fetch(number, last);
      const chunk = /** @type {Promise<Uint8Array<ArrayBuffer>>} */ (this.#chunks.get(number));
      this.#chunks.delete(number);
      this.#chunks.set(number, chunk);
      taken.push(chunk);
    }
    while (this.#chunks.size > this.#most)
      this.#chunks.delete(/** @type {number} */ (this.#chunks.keys().next().value));
    return taken;
  }

  /** Read chunk `first` and the ones behind it that are missing too, before `last`. @param {number} first @param {number} last */
  #fetch(first, last) {
    let until = first + 1;
    while (until < last && !this.#chunks.has(until)) until++;
    const begin = first * CHUNK_BYTES;
    const read = this.#folder.read(this.#file, begin, Math.min(this.#size, until * CHUNK_BYTES));
    for (let number = first; number < until; number++) {
      const at = number * CHUNK_BYTES - begin;
      // A copy where several come at once: a chunk that stays must not keep its neighbours.
      const chunk = read.then((bytes) => (until - first > 1 ? bytes.slice(at, at + CHUNK_BYTES) : bytes));
      this.#chunks.set(number, chunk);
      // What could not be read is asked for again the next time.
      chunk.catch(() => this.#chunks.get(number) === chunk && this.#chunks.delete(number));
    }
  }
}
