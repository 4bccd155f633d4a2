/**
 * @file The one text of a JSON document: stable JSON with two spaces of indentation and a newline at the end.
 *
 * A document that must have this text has no byte that could change unnoticed, white space included. May import: errors,
 * contracts, strict_json.
 */

import { repr } from "../contracts/names.js";
import { stableJson } from "../contracts/stable_json.js";
import { isObject } from "../contracts/values.js";
import { CheckpointCorrupt, HybridError } from "../errors.js";
import { parse, StrictJsonError } from "../strict_json.js";

/** @typedef {Record<string, unknown>} Document */

const MAX_DEPTH = 64;
const UTF8 = new TextEncoder();

/**
 * `value` as reading it back would give it: NaN and infinities become null.
 *
 * @param {unknown} value
 * @param {string} path for messages
 * @returns {any}
 * @throws {HybridError} for what JSON cannot carry: other types, and bigints beyond 2^53
 */
export function plain(value, path) {
  walk(value, path, (where, part) => {
    if (typeof part === "bigint" && !Number.isSafeInteger(Number(part))) {
      throw new HybridError(`${where} is ${part}: JSON carries integers exactly only up to ${Number.MAX_SAFE_INTEGER}`);
    }
  });
  try {
    return JSON.parse(stableJson(value));
  } catch (error) {
    throw new HybridError(`${path} cannot be saved: ${/** @type {Error} */ (error).message}`, { cause: error });
  }
}

/**
 * The text of a document.
 *
 * @param {unknown} value
 * @returns {Uint8Array<ArrayBuffer>} UTF-8
 * @throws {HybridError} for more than 64 levels, and as `stableJson`
 */
export function render(value) {
  walk(value, "$", () => {});
  return UTF8.encode(`${stableJson(value, "  ")}\n`);
}

/**
 * The value of a document that has its one text.
 *
 * @param {string} source the file's name in messages
 * @param {Uint8Array} data
 * @returns {unknown}
 * @throws {CheckpointCorrupt} saying what is wrong
 */
export function parseDocument(source, data) {
  try {
    const value = parse(data);
    const text = render(value);
    const shared = Math.min(text.length, data.length);
    let at = 0;
    while (at < shared && text[at] === data[at]) at++;
    if (at < text.length || at < data.length) {
      throw new HybridError(`not in canonical form at byte ${at}: it was edited or damaged`);
    }
    return value;
  } catch (error) {
    if (!(error instanceof StrictJsonError || error instanceof HybridError)) throw error;
    throw new CheckpointCorrupt(`${source}: ${error.message}`);
  }
}

/**
 * @param {unknown} value
 * @param {string} path
 * @param {(path: string, part: unknown) => void} visit
 * @param {number} [depth]
 */
function walk(value, path, visit, depth = 0) {
  if (depth > MAX_DEPTH) throw new HybridError(`${path.slice(0, 200)} is nested more than ${MAX_DEPTH} levels deep`);
  visit(path, value);
  if (Array.isArray(value)) {
    for (const [index, item] of value.entries()) walk(item, `${path}[${index}]`, visit, depth + 1);
  } else if (isObject(value)) {
    for (const [key, item] of Object.entries(value)) walk(item, `${path}.${key}`, visit, depth + 1);
  }
}

const SHA256 = /^[0-9a-f]{64}$/;

/** @param {unknown} value @returns {value is string} */
export function isSha256(value) {
  return typeof value === "string" && SHA256.test(value);
}

/** The members of one object of a document, read with their types checked. */
export class Members {
  #path;

  /**
   * @param {string} source
   * @param {string} path
   * @param {unknown} value
   */
  constructor(source, path, value) {
    if (!isObject(value)) {
      throw new CheckpointCorrupt(`${source}: ${path || "the document"} is ${repr(value, 80)}: expected an object`);
    }
    this.source = source;
    this.values = value;
    this.#path = path;
  }

  /**
   * Refuse missing and unknown members.
   *
   * @param {readonly string[]} keys
   * @returns {this}
   */
  exactly(keys) {
    const where = this.#path || "the document";
    const missing = keys.filter((key) => !Object.hasOwn(this.values, key)).sort();
    if (missing.length) throw new CheckpointCorrupt(`${this.source}: ${where} lacks ${missing.join(", ")}`);
    const extra = Object.keys(this.values)
      .filter((key) => !keys.includes(key))
      .sort();
    if (extra.length) {
      throw new CheckpointCorrupt(`${this.source}: ${where} has the unknown member ${repr(extra[0], 200)}`);
    }
    return this;
  }

  /** @param {string} key */
  path(key) {
    return this.#path ? `${this.#path}.${key}` : key;
  }

  /** @param {string} key @param {string} expected */
  wrong(key, expected) {
    return new CheckpointCorrupt(`${this.source}: ${this.path(key)} is ${repr(this.get(key), 80)}: ${expected}`);
  }

  /** @param {string} key @returns {unknown} */
  get(key) {
    return Object.hasOwn(this.values, key) ? this.values[key] : undefined;
  }

  /** @param {string} key @returns {boolean} */
  isNull(key) {
    return this.get(key) === null;
  }

  /** @param {string} key @param {number} [minimum] @returns {number} */
  integer(key, minimum = 0) {
    const value = this.get(key);
    if (!Number.isSafeInteger(value) || /** @type {number} */ (value) < minimum) {
      throw this.wrong(key, `expected an integer from ${minimum} to 2^53 - 1`);
    }
    return /** @type {number} */ (value);
  }

  /** @param {string} key @returns {string} */
  text(key) {
    const value = this.get(key);
    if (typeof value !== "string" || !value) throw this.wrong(key, "expected a text that is not empty");
    return value;
  }

  /** @param {string} key @returns {string} */
  sha256(key) {
    const value = this.get(key);
    if (!isSha256(value)) throw this.wrong(key, "expected a sha256 in 64 hex digits");
    return value;
  }

  /** @param {string} key @returns {unknown[]} */
  list(key) {
    const value = this.get(key);
    if (!Array.isArray(value)) throw this.wrong(key, "expected a list");
    return value;
  }

  /** @param {string} key @returns {Members} */
  members(key) {
    if (!isObject(this.get(key))) throw this.wrong(key, "expected an object");
    return new Members(this.source, this.path(key), this.get(key));
  }
}
