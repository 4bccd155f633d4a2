/**
 * @file The token store: documents as ids in one file, with an index and a manifest. The format is
 * docs/formats/token_store.md; Python has the same in `data/store.py`, and the same messages.
 *
 * Only the document index is read as a whole; tokens come in ranges. May import: errors, contracts, digests, sha256,
 * folders, tokenizers.
 */

import { CHUNK_BYTES } from "../digests.js";
import { DataContractError, StopRequested } from "../errors.js";
import { readPieces } from "../folders/folder.js";
import { Sha256, subtleSha256 } from "../sha256.js";
import { openTokenizer } from "../tokenizers/open.js";
import { ChunkCache } from "./chunk_cache.js";
import { readManifest } from "./manifest.js";
import { TokenView } from "./split.js";
import { decodeUtf8 } from "./utf8.js";

/** @import { Folder } from "../folders/folder.js" */
/** @import { Tokenizer } from "../tokenizers/tokenizer.js" */
/** @import { FileRecord, Manifest } from "./manifest.js" */
/** @import { SplitRule } from "./split.js" */

/** `total` is null where it is not known beforehand. @typedef {(stage: string, done: number, total: number | null) => void} Progress */

/** @typedef {{progress?: Progress, signal?: AbortSignal}} Watched */

/** Bytes of tokens that are kept in memory at most. */
const CACHE_BYTES = 2 ** 26;

/** An open token store. */
export class TokenStore {
  #folder;
  #tokens;
  /** @type {Promise<Tokenizer> | null} */
  #tokenizer = null;

  /**
   * @param {Folder} folder
   * @param {Manifest} manifest
   * @param {Float64Array} bounds
   */
  constructor(folder, manifest, bounds) {
    this.#folder = folder;
    this.name = folder.name;
    this.manifest = manifest;
    /** [documents + 1]: document d is the tokens from bounds[d] to before bounds[d + 1] */
    this.bounds = bounds;
    this.vocabularySize = manifest.vocabularySize;
    this.endOfText = manifest.endOfText;
    this.documents = manifest.documents;
    this.tokens = manifest.tokens;
    this.fingerprint = manifest.fingerprint;
    this.itemBytes = manifest.tokenType === "uint16" ? 2 : 4;
    this.#tokens = new ChunkCache(folder, "tokens.bin", this.tokens * this.itemBytes, CACHE_BYTES);
  }

  /**
   * Open the store in a folder, checking its manifest, the size of every file and the document index. `verify` checks the
   * rest.
   *
   * @param {Folder | null} folder null for one that is not there
   * @returns {Promise<TokenStore>}
   * @throws {DataContractError} naming the file, the offset where there is one, and what was expected
   */
  static async open(folder) {
    if (!folder) throw new DataContractError("there is no token store here; make one with `hybrid data build`");
    const manifest = await readManifest(folder);
    for (const [name, record] of Object.entries(manifest.files)) await checkSize(folder, name, record);
    return new TokenStore(folder, manifest, await readBounds(folder, manifest));
  }

  /** The split that the store was built with. @returns {SplitRule} */
  get rule() {
    return this.manifest.split;
  }

  /**
   * The tokens of "train", "validation" or "all".
   *
   * @param {string} name
   * @param {SplitRule} [rule] the store's own by default
   * @returns {TokenView}
   * @throws {DataContractError} if that part is empty
   * @throws {ConfigError} for another name
   */
  split(name, rule = this.rule) {
    return TokenView.of(this, name, rule);
  }

  /**
   * @param {number} index
   * @returns {Promise<Uint32Array<ArrayBuffer>>} the ids of one document
   */
  async document(index) {
    if (!(index >= 0 && index < this.documents)) {
      throw new DataContractError(`${this.name}: no document ${index}, expected 0..${this.documents - 1}`);
    }
    return this.read(this.bounds[index], this.bounds[index + 1]);
  }

  /**
   * @param {number} begin
   * @param {number} end
   * @returns {Promise<Uint32Array<ArrayBuffer>>} tokens begin..end-1, each checked against the vocabulary (a device would
   *   clamp a wrong id silently)
   */
  async read(begin, end) {
    if (!(begin >= 0 && begin <= end && end <= this.tokens)) {
      throw new DataContractError(`${this.name}: tokens ${begin}..${end} do not exist: it has ${this.tokens} tokens`);
    }
    const ids = this.#idsOf(await this.#tokens.read(begin * this.itemBytes, end * this.itemBytes));
    const wrong = this.#wrong(ids);
    if (wrong >= 0) throw this.#refusal(begin + wrong, ids[wrong]);
    return Uint32Array.from(ids);
  }

  /**
   * The text of tokenizer.json.
   *
   * @returns {Promise<string>}
   * @throws {DataContractError} if the file is not the one that the manifest lists
   */
  async tokenizerText() {
    /** @type {Uint8Array[]} */
    const pieces = [];
    await this.#verifyFile("tokenizer.json", (piece) => void pieces.push(piece));
    const bytes = new Uint8Array(this.manifest.files["tokenizer.json"].bytes);
    for (const [place, piece] of pieces.entries()) bytes.set(piece, place * CHUNK_BYTES);
    const decoded = decodeUtf8(bytes);
    if ("text" in decoded) return decoded.text;
    throw new DataContractError(`${this.name}/tokenizer.json: not UTF-8 at offset ${decoded.offset}`);
  }

  /**
   * The tokenizer that made the ids.
   *
   * @returns {Promise<Tokenizer>}
   * @throws {DataContractError} if its file is not the one that the manifest names
   */
  tokenizer() {
    this.#tokenizer ??= this.#openTokenizer().catch((error) => {
      this.#tokenizer = null;
      throw error;
    });
    return this.#tokenizer;
  }

  /**
   * Hash every file, check every id and the tokenizer.
   *
   * @param {Watched} [watched] progress("verify", bytes so far, bytes)
   * @returns {Promise<void>}
   * @throws {DataContractError} naming the file and the offsets that differ
   * @throws {StopRequested} when the signal says so
   */
  async verify({ progress, signal } = {}) {
    const total = Object.values(this.manifest.files).reduce((sum, { bytes }) => sum + bytes, 0);
    let done = 0;
    let token = 0;
    /** @type {DataContractError | null} */
    let wrong = null;
    for (const name of Object.keys(this.manifest.files)) {
      await this.#verifyFile(name, (piece) => {
        done += piece.length;
        progress?.("verify", done, total);
        stopIf(signal, `verifying ${this.name}`);
        if (name !== "tokens.bin" || wrong) return;
        // A file that was changed is named first, so an id is refused only when all of them are as they were written.
        const ids = this.#idsOf(piece);
        const place = this.#wrong(ids);
        if (place >= 0) wrong = this.#refusal(token + place, ids[place]);
        token += ids.length;
      });
    }
    if (wrong) throw wrong;
    await this.tokenizer();
  }

  async #openTokenizer() {
    const path = `${this.name}/tokenizer.json`;
    const tokenizer = await openTokenizer(await this.tokenizerText());
    const expected = this.manifest.tokenizer.hash;
    if (tokenizer.hash !== expected) {
      throw new DataContractError(`${path}: the tokenizer's hash is ${tokenizer.hash}, expected ${expected}`);
    }
    if (tokenizer.vocabularySize !== this.vocabularySize) {
      throw new DataContractError(
        `${path}: a vocabulary of ${tokenizer.vocabularySize}, but the manifest says ${this.vocabularySize}`,
      );
    }
    return tokenizer;
  }

  /**
   * Hash a whole file and compare with its record.
   *
   * @param {string} name
   * @param {(piece: Uint8Array<ArrayBuffer>) => void} onPiece called with each 8 MiB that are right; may throw
   */
  async #verifyFile(name, onPiece) {
    const path = `${this.name}/${name}`;
    const record = this.manifest.files[name];
    await checkSize(this.#folder, name, record);
    const whole = new Sha256();
    let number = 0;
    for await (const piece of readPieces(this.#folder, name, record.bytes)) {
      const digest = subtleSha256(piece);
      whole.update(piece); // while the other digest is made elsewhere
      if ((await digest) !== record.chunks[number]) {
        const first = number * CHUNK_BYTES;
        throw new DataContractError(
          `${path}: the bytes at offsets ${first}..${first + piece.length - 1} (chunk ${number}) are not what was ` +
            "written: their sha256 differs from the manifest's; copy the file again or build the store again",
        );
      }
      number += 1;
      onPiece(piece);
    }
    if (whole.hex() !== record.sha256) {
      throw new DataContractError(`${path}: the chunks match the manifest but the sha256 of the whole file does not`);
    }
  }

  /** @param {Uint8Array<ArrayBuffer>} bytes whose memory begins with the first of them */
  #idsOf(bytes) {
    return this.itemBytes === 2
      ? new Uint16Array(bytes.buffer, bytes.byteOffset, bytes.length / 2)
      : new Uint32Array(bytes.buffer, bytes.byteOffset, bytes.length / 4);
  }

  /** @param {Uint16Array | Uint32Array} ids @returns {number} the place of the first one outside the vocabulary, or -1 */
  #wrong(ids) {
    for (let place = 0; place < ids.length; place++) if (ids[place] >= this.vocabularySize) return place;
    return -1;
  }

  /** @param {number} index @param {number} id */
  #refusal(index, id) {
    return new DataContractError(
      `${this.name}/tokens.bin: id ${id} at offset ${index * this.itemBytes} (token ${index}) is outside the ` +
        `vocabulary: expected 0..${this.vocabularySize - 1}; build the store again`,
    );
  }
}

/**
 * @param {AbortSignal | undefined} signal
 * @param {string} what
 * @throws {StopRequested} if a stop is wanted
 */
export function stopIf(signal, what) {
  if (signal?.aborted) throw new StopRequested(`stopped on request while ${what}; nothing half made was kept`);
}

/**
 * @param {Folder} folder
 * @param {string} name
 * @param {FileRecord} record
 * @throws {DataContractError} unless the file exists and has the size of its record
 */
async function checkSize(folder, name, { bytes }) {
  const path = `${folder.name}/${name}`;
  const size = await folder.size(name);
  if (size === null) {
    throw new DataContractError(`${path}: No such file or directory; the manifest lists it, so build the store again`);
  }
  if (size < bytes) {
    throw new DataContractError(
      `${path}: truncated at offset ${size}, expected ${bytes} bytes; copy it again or build the store again`,
    );
  }
  if (size > bytes) {
    throw new DataContractError(
      `${path}: ${size} bytes, ${size - bytes} more than expected from offset ${bytes} on; build the store again`,
    );
  }
}

/**
 * The document index, checked: it starts at 0, never falls, and ends at the number of tokens.
 *
 * @param {Folder} folder
 * @param {Manifest} manifest
 */
async function readBounds(folder, { documents, tokens, files }) {
  const bounds = new Float64Array(documents + 1);
  let place = 0;
  let before = 0n;
  /** @param {bigint} begin @param {string} expected */
  const refusal = (begin, expected) =>
    new DataContractError(
      `${folder.name}/documents.bin: offset ${place * 8}: document ${place} begins at token ${begin}, expected ${expected}`,
    );
  for await (const piece of readPieces(folder, "documents.bin", files["documents.bin"].bytes)) {
    for (const begin of new BigUint64Array(piece.buffer, piece.byteOffset, piece.length / 8)) {
      if (!place && begin) throw refusal(begin, "0");
      if (begin < before) throw refusal(begin, `at least ${before}, where the document before it begins`);
      bounds[place++] = Number(begin);
      before = begin;
    }
  }
  place -= 1;
  if (before !== BigInt(tokens)) throw refusal(before, `${tokens}, the number of tokens`);
  return bounds;
}
