/**
 * @file Digests of a file as its bytes go by: size, sha256 of the whole, sha256 of each 8 MiB chunk.
 *
 * Chunk digests exist for those who cannot hash a stream: `crypto.subtle` hashes whole buffers only, and an interrupted
 * upload continues at the first chunk that differs. May import: errors, sha256.
 */

import { CheckpointCorrupt } from "./errors.js";
import { Sha256, subtleSha256 } from "./sha256.js";

export const CHUNK_BYTES = 8 * 1024 * 1024;

/** Chunks whose digests may be under way at once: each holds 8 MiB. */
const MAX_UNDER_WAY = 2;

/**
 * What a manifest says about one file: the `chunks`' sha256 (the last may be shorter; an empty file has none).
 *
 * @typedef {object} FileDigest
 * @property {number} size in bytes
 * @property {string} sha256 64 hex digits
 * @property {readonly string[]} chunks
 */

/** Feed the bytes of one file in order to `update`, then ask for the `result`. */
export class Digester {
  #size = 0;
  #whole = new Sha256();
  #chunk = new Uint8Array(0);
  /** @type {Promise<string>[]} */
  #chunks = [];

  /**
   * Resolves when more bytes may come; the given ones are no longer needed then.
   *
   * @param {Uint8Array} bytes
   */
  async update(bytes) {
    this.#whole.update(bytes);
    for (let rest = bytes; rest.length; ) {
      const used = this.#size % CHUNK_BYTES;
      const piece = rest.subarray(0, CHUNK_BYTES - used);
      if (used + piece.length > this.#chunk.length) this.#grow(used, used + piece.length);
      this.#chunk.set(piece, used);
      this.#size += piece.length;
      if (this.#size % CHUNK_BYTES === 0) {
        this.#chunks.push(subtleSha256(this.#chunk));
        this.#chunk = new Uint8Array(0);
        await this.#chunks.at(-MAX_UNDER_WAY);
      }
      rest = rest.subarray(piece.length);
    }
  }

  /** @returns {Promise<FileDigest>} */
  async result() {
    const used = this.#size % CHUNK_BYTES;
    const last = used ? [subtleSha256(this.#chunk.slice(0, used))] : [];
    return {
      size: this.#size,
      sha256: this.#whole.hex(),
      chunks: await Promise.all([...this.#chunks, ...last]),
    };
  }

  /** @param {number} used @param {number} needed small files need not 8 MiB */
  #grow(used, needed) {
    const grown = new Uint8Array(Math.min(CHUNK_BYTES, Math.max(needed, 2 * this.#chunk.length)));
    grown.set(this.#chunk.subarray(0, used));
    this.#chunk = grown;
  }
}

/**
 * The digest of bytes that are in memory.
 *
 * @param {Uint8Array} data
 * @returns {Promise<FileDigest>}
 */
export async function digestBytes(data) {
  const digester = new Digester();
  await digester.update(data);
  return digester.result();
}

/**
 * @param {string} source the file's name in messages
 * @param {number} index of the chunk
 * @param {string} found its sha256
 * @param {FileDigest} expected
 * @throws {CheckpointCorrupt} unless it is the expected one
 */
export function expectChunk(source, index, found, expected) {
  if (found === expected.chunks[index]) return;
  const first = index * CHUNK_BYTES;
  const last = Math.min(expected.size, first + CHUNK_BYTES) - 1;
  throw new CheckpointCorrupt(
    `${source}: bytes ${first} to ${last} have sha256 ${found}, but the manifest says ${expected.chunks[index]}: ` +
      "the file was changed or damaged; use another checkpoint",
  );
}

/**
 * @param {string} source the file's name in messages
 * @param {number} size
 * @param {FileDigest} expected
 * @throws {CheckpointCorrupt} unless it is the expected one
 */
export function expectSize(source, size, expected) {
  if (size !== expected.size) {
    throw new CheckpointCorrupt(`${source}: ${size} bytes, but the manifest says ${expected.size}: cut or changed`);
  }
}

/**
 * @param {string} source the file's name in messages
 * @param {FileDigest} found
 * @param {FileDigest} expected
 * @throws {CheckpointCorrupt} naming `source` (and the first chunk that differs) unless the two are equal
 */
export function expectDigest(source, found, expected) {
  expectSize(source, found.size, expected);
  for (const [index, chunk] of found.chunks.slice(0, expected.chunks.length).entries()) {
    expectChunk(source, index, chunk, expected);
  }
  if (found.sha256 !== expected.sha256 || found.chunks.length !== expected.chunks.length) {
    throw new CheckpointCorrupt(
      `${source}: sha256 ${found.sha256} and ${found.chunks.length} chunks, but the manifest says ` +
        `${expected.sha256} and ${expected.chunks.length}: the file or the manifest was changed`,
    );
  }
}
