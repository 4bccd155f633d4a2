/**
 * @file `manifest.json` of a token store: reading, checking, sealing. Every key is required and no other is allowed.
 *
 * Checks and messages are those of Python's `data/manifest.py`. May import: errors, contracts, digests, strict_json,
 * folders, tokenizers.
 */

import { ExactFloat } from "../contracts/names.js";
import { stableHash } from "../contracts/stable_json.js";
import { CHUNK_BYTES } from "../digests.js";
import { DataContractError } from "../errors.js";
import { readAll } from "../folders/folder.js";
import { parseExact, StrictJsonError } from "../strict_json.js";
import { jsonText } from "../tokenizers/json_text.js";
import { LARGEST_VOCABULARY } from "../tokenizers/tokenizer.js";
import { decodeUtf8 } from "./utf8.js";

/** @import { Folder } from "../folders/folder.js" */

export const FORMAT = "hybrid.tokens";
export const VERSION = 1;
const FILES = ["tokens.bin", "documents.bin", "tokenizer.json"];
const SHA256 = /^[0-9a-f]{64}$/;

/** A manifest that is larger lists the chunks of more than ten terabytes. */
const LARGEST_MANIFEST = 2 ** 27;

/**
 * @typedef {object} FileRecord
 * @property {number} bytes
 * @property {string} sha256
 * @property {readonly string[]} chunks
 */

/**
 * @typedef {object} Manifest
 * @property {string} format
 * @property {number} version
 * @property {number} vocabularySize
 * @property {"uint16" | "uint32"} tokenType
 * @property {number | null} endOfText
 * @property {{kind: string, hash: string}} tokenizer
 * @property {number} documents
 * @property {number} tokens
 * @property {number} chunkBytes
 * @property {Record<string, FileRecord>} files
 * @property {{by: "document" | "share", validationShare: number, seed: number}} split
 * @property {Record<string, unknown>} source
 * @property {string} fingerprint
 * @property {string} manifestHash
 */

/**
 * What identifies the data: ids, document borders and tokenizer. Not where it came from, nor how it is split.
 *
 * @param {Omit<Manifest, "fingerprint" | "manifestHash">} manifest
 * @returns {string}
 */
export function contentFingerprint({
  format,
  version,
  vocabularySize,
  tokenizer,
  endOfText,
  documents,
  tokens,
  files,
}) {
  return stableHash({
    format,
    version,
    vocabularySize,
    tokenizerHash: tokenizer.hash,
    endOfText,
    documents,
    tokens,
    tokensSha256: files["tokens.bin"].sha256,
    documentsSha256: files["documents.bin"].sha256,
  });
}

/**
 * The manifest with `fingerprint` and `manifestHash`, the stable hash of all its other fields.
 *
 * @param {Omit<Manifest, "fingerprint" | "manifestHash"> & {manifestHash?: string}} manifest
 * @returns {Manifest}
 */
export function seal({ manifestHash: _, ...manifest }) {
  const body = { ...manifest, fingerprint: contentFingerprint(manifest) };
  return { ...body, manifestHash: stableHash(body) };
}

/**
 * The checked manifest of the store in `folder`.
 *
 * @param {Folder} folder
 * @returns {Promise<Manifest>}
 * @throws {DataContractError} saying which field is wrong and what it should be
 */
export async function readManifest(folder) {
  const path = `${folder.name}/manifest.json`;
  if ((await folder.size("manifest.json")) === null) {
    throw new DataContractError(`${folder.name}: no manifest.json, so this folder is not a token store`);
  }
  const data = await readAll(folder, "manifest.json", LARGEST_MANIFEST);
  const decoded = decodeUtf8(data);
  if ("offset" in decoded) throw new DataContractError(`${path}: not UTF-8 at offset ${decoded.offset}`);
  let value;
  try {
    value = parseExact(data);
  } catch (error) {
    if (!(error instanceof StrictJsonError)) throw error;
    const found = /^not JSON: (.*) at character ([0-9]+)$/s.exec(error.message);
    throw new DataContractError(
      found
        ? `${path}: not JSON at offset ${found[2]}: ${found[1]}`
        : `${path}: not JSON that can be read: ${error.message}`,
    );
  }
  return new Checker(path).manifest(value);
}

/** @param {unknown} value of the exact reader @returns {any} the same as JSON.parse would have it */
function plain(value) {
  if (typeof value === "bigint") return Number(value);
  if (value instanceof ExactFloat) return value.value;
  if (Array.isArray(value)) return value.map(plain);
  if (value instanceof Map) return Object.fromEntries([...value].map(([key, item]) => [key, plain(item)]));
  return value;
}

/** @typedef {(name: string, value: any) => void} Check */

/** Walks the manifest in the order of docs/formats/token_store.md and refuses the first thing that is wrong. */
class Checker {
  #path;

  /** @param {string} path */
  constructor(path) {
    this.#path = path;
  }

  /** @param {unknown} exact @returns {Manifest} */
  manifest(exact) {
    const known = exact instanceof Map ? exact : new Map();
    if (known.get("format") !== FORMAT) {
      this.#refuse("format", exact instanceof Map ? known.get("format") : exact, `"${FORMAT}"`);
    }
    if (plain(known.get("version")) !== VERSION) {
      this.#refuse("version", known.get("version"), `${VERSION}, the version that this program reads`);
    }
    const count = this.#whole(1, Number.MAX_SAFE_INTEGER);
    this.#fields("", exact, {
      format: () => {},
      version: () => {},
      vocabularySize: this.#whole(1, LARGEST_VOCABULARY),
      tokenType: this.#oneOf("uint16", "uint32"),
      endOfText: (name, value) => value === null || this.#whole(0, LARGEST_VOCABULARY)(name, value),
      tokenizer: this.#object({ kind: this.#oneOf("bytes", "characters", "bpe"), hash: this.#digest }),
      documents: count,
      tokens: count,
      chunkBytes: this.#whole(CHUNK_BYTES, CHUNK_BYTES),
      files: this.#object(Object.fromEntries(FILES.map((name) => [name, this.#file]))),
      split: this.#object({
        by: this.#oneOf("document", "share"),
        validationShare: this.#share,
        seed: this.#whole(0, Number.MAX_SAFE_INTEGER),
      }),
      source: this.#object(null),
      fingerprint: this.#digest,
      manifestHash: this.#digest,
    });
    /** @type {Manifest} */
    const manifest = plain(exact);
    const { vocabularySize, tokenType, endOfText, tokens, documents, files, ...rest } = manifest;
    const width = vocabularySize <= 2 ** 16 ? 2 : 4;
    const type = `"uint${8 * width}"`;
    if (`"${tokenType}"` !== type)
      this.#refuse("tokenType", tokenType, `${type} for a vocabulary of ${vocabularySize}`);
    if (endOfText !== null && endOfText >= vocabularySize) {
      this.#refuse("endOfText", endOfText, `an id below ${vocabularySize}`);
    }
    for (const [name, size] of Object.entries({ "tokens.bin": tokens * width, "documents.bin": (documents + 1) * 8 })) {
      const { bytes } = files[name];
      if (bytes !== size) this.#refuse(`files.${name}.bytes`, bytes, `${size}, as the counts say`);
    }
    const fingerprint = contentFingerprint(manifest);
    if (rest.fingerprint !== fingerprint) {
      this.#refuse("fingerprint", rest.fingerprint, `${fingerprint}, the hash of what it covers`);
    }
    const { manifestHash } = seal(manifest);
    if (rest.manifestHash !== manifestHash) {
      this.#refuse("manifestHash", rest.manifestHash, `${manifestHash}: the manifest was changed after it was written`);
    }
    return manifest;
  }

  /** @type {Check} */
  #file = (name, value) => {
    /** @type {Check} */
    const list = (field, chunks) => {
      if (!Array.isArray(chunks)) this.#refuse(field, chunks, "a list");
    };
    const bytes = this.#whole(1, Number.MAX_SAFE_INTEGER);
    this.#object({ bytes, sha256: this.#digest, chunks: list })(name, value);
    const chunks = value.get("chunks");
    const count = Math.ceil(Number(value.get("bytes")) / CHUNK_BYTES);
    if (chunks.length !== count) {
      this.#refuse(`${name}.chunks`, `${chunks.length} digests`, `${count}, one for each 8 MiB`);
    }
    for (const [number, digest] of chunks.entries()) this.#digest(`${name}.chunks[${number}]`, digest);
  };

  /**
   * @param {Record<string, Check> | null} checks of its fields; null where any are allowed
   * @returns {Check}
   */
  #object(checks) {
    return (name, value) => {
      if (!(value instanceof Map)) this.#refuse(name, value, "an object");
      if (checks) this.#fields(`${name}.`, value, checks);
    };
  }

  /** @param {string} prefix @param {any} value a Map @param {Record<string, Check>} checks */
  #fields(prefix, value, checks) {
    for (const key of Object.keys(checks)) {
      if (!value.has(key)) throw new DataContractError(`${this.#path}: ${prefix}${key} is missing`);
    }
    for (const key of value.keys()) {
      if (!Object.hasOwn(checks, key)) {
        throw new DataContractError(`${this.#path}: ${prefix}${key} is not a field of version ${VERSION}`);
      }
    }
    for (const [key, check] of Object.entries(checks)) check(prefix + key, value.get(key));
  }

  /** @param {number} least @param {number} most @returns {Check} */
  #whole(least, most) {
    return (name, value) => {
      if (typeof value === "bigint" && value >= least && value <= most) return;
      this.#refuse(name, value, least === most ? String(least) : `a whole number from ${least} to ${most}`);
    };
  }

  /** @type {Check} */
  #share = (name, value) => {
    const number = plain(value);
    if (typeof number !== "number" || !(number >= 0 && number < 1)) {
      this.#refuse(name, value, "a number from 0 to below 1");
    }
  };

  /** @param {readonly string[]} choices @returns {Check} */
  #oneOf(...choices) {
    return (name, value) => {
      if (!choices.includes(value)) this.#refuse(name, value, choices.map((choice) => `"${choice}"`).join(" or "));
    };
  }

  /** @type {Check} */
  #digest = (name, value) => {
    if (typeof value !== "string" || !SHA256.test(value)) {
      this.#refuse(name, value, "64 lower-case hexadecimal digits");
    }
  };

  /**
   * @param {string} name
   * @param {unknown} value
   * @param {string} expected
   * @returns {never}
   */
  #refuse(name, value, expected) {
    const shown = jsonText(value === undefined ? null : value).slice(0, 200);
    throw new DataContractError(`${this.#path}: ${name} is ${shown}, expected ${expected}`);
  }
}
