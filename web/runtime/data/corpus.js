/**
 * @file Text files as documents: dropped on a page, or from anywhere else that gives Blobs. Python has the same in
 * `data/corpus.py`. May import: errors, contracts.
 */

import { repr, typeName } from "../contracts/names.js";
import { isObject } from "../contracts/values.js";
import { DataContractError } from "../errors.js";
import { decodeUtf8 } from "./utf8.js";

/** @import { Document } from "./build.js" */

/** @typedef {Blob & {name?: string}} TextFile */

/**
 * Text files, one document each; JSON Lines files (`.jsonl`), one document a line. Text is UTF-8; a byte order mark is
 * dropped and nothing else is changed. Can be read several times.
 *
 * @param {readonly TextFile[]} files
 * @param {object} [options]
 * @param {string} [options.field] the key of the text in a JSON Lines object
 * @param {number | null} [options.maxBytes] read this many bytes of text (as UTF-8) and no more
 * @returns {AsyncIterable<Document>}
 * @throws {DataContractError} for a file that is not UTF-8, naming file and offset, and for a bad line
 */
export function textDocuments(files, { field = "text", maxBytes = null } = {}) {
  return { [Symbol.asyncIterator]: () => within(all(files, field, maxBytes), maxBytes) };
}

/**
 * What a store's manifest says about them.
 *
 * @param {readonly TextFile[]} files
 * @param {{field?: string, maxBytes?: number | null}} [options]
 */
export function describeSource(files, { field = "text", maxBytes = null } = {}) {
  return { type: "files", paths: files.map(nameOf), field, maxBytes };
}

/** @param {TextFile} file */
const nameOf = (file) => file.name ?? "text";

/**
 * @param {readonly TextFile[]} files
 * @param {string} field
 * @param {number | null} maxBytes
 * @returns {AsyncGenerator<Document, void, void>}
 */
async function* all(files, field, maxBytes) {
  for (const file of files) {
    if (nameOf(file).endsWith(".jsonl")) yield* lines(file, field);
    else yield await whole(file, maxBytes);
  }
}

/** @param {TextFile} file @param {number | null} maxBytes @returns {Promise<Document>} */
async function whole(file, maxBytes) {
  // A little more than what may be used (a mark, an unfinished character), so that a huge file is not read for its
  // beginning.
  const limit = maxBytes === null ? Number.POSITIVE_INFINITY : maxBytes + 8;
  const bytes = unmarked(await bytesOf(file.slice(0, Math.min(file.size, limit))));
  const decoded = decodeUtf8(bytes, file.size < limit);
  if ("text" in decoded) return { name: nameOf(file), text: decoded.text };
  const byte = bytes[decoded.offset].toString(16).toUpperCase().padStart(2, "0");
  throw new DataContractError(
    `${nameOf(file)}: not UTF-8 at offset ${decoded.offset} (byte 0x${byte}); convert the file`,
  );
}

/** @param {TextFile} file @param {string} field @returns {AsyncGenerator<Document, void, void>} */
async function* lines(file, field) {
  let number = 0;
  for await (const raw of rawLines(file)) {
    number += 1;
    const line = number === 1 ? unmarked(raw) : raw;
    if (!line.every((byte) => byte === 0x20 || (byte >= 9 && byte <= 13))) {
      yield { name: `${nameOf(file)}:${number}`, text: textOf(line, field, `${nameOf(file)}, line ${number}`) };
    }
  }
}

/** @param {TextFile} file @returns {AsyncGenerator<Uint8Array, void, void>} lines with their ends */
async function* rawLines(file) {
  let rest = new Uint8Array(0);
  for (let begin = 0; begin < file.size; begin += PIECE_BYTES) {
    const piece = await bytesOf(file.slice(begin, begin + PIECE_BYTES));
    const joined = new Uint8Array(rest.length + piece.length);
    joined.set(rest);
    joined.set(piece, rest.length);
    let at = 0;
    for (let end = joined.indexOf(10); end >= 0; end = joined.indexOf(10, at)) {
      yield joined.subarray(at, end + 1);
      at = end + 1;
    }
    rest = joined.slice(at);
  }
  if (rest.length) yield rest;
}

const PIECE_BYTES = 2 ** 20;

/**
 * @param {Uint8Array} line
 * @param {string} field
 * @param {string} place
 * @returns {string}
 */
function textOf(line, field, place) {
  const decoded = decodeUtf8(line);
  if ("offset" in decoded) throw new DataContractError(`${place}: not UTF-8 at byte ${decoded.offset} of the line`);
  let value;
  try {
    value = JSON.parse(decoded.text);
  } catch (error) {
    throw new DataContractError(`${place}: not JSON: ${error instanceof Error ? error.message : error}`);
  }
  if (!isObject(value)) {
    throw new DataContractError(`${place}: a JSON ${typeName(value)}, expected an object with ${repr(field)}`);
  }
  if (!Object.hasOwn(value, field)) {
    const known = Object.keys(value).sort().slice(0, 10).join(", ") || "none";
    throw new DataContractError(`${place}: no field ${repr(field)}; it has: ${known}`);
  }
  const text = value[field];
  if (typeof text === "string") return text;
  throw new DataContractError(
    `${place}: field ${repr(field)} is ${JSON.stringify(text).slice(0, 80)}, expected a string`,
  );
}

/** @param {Uint8Array} bytes @returns {Uint8Array} without a byte order mark */
function unmarked(bytes) {
  return bytes[0] === 0xef && bytes[1] === 0xbb && bytes[2] === 0xbf ? bytes.subarray(3) : bytes;
}

/** @param {Blob} blob */
const bytesOf = async (blob) => new Uint8Array(await blob.arrayBuffer());

/**
 * The documents up to `maxBytes` of text; the one that crosses the line is cut at a character.
 *
 * @param {AsyncGenerator<Document, void, void>} documents
 * @param {number | null} maxBytes
 * @returns {AsyncGenerator<Document, void, void>}
 */
async function* within(documents, maxBytes) {
  if (maxBytes === null) {
    yield* documents;
    return;
  }
  let room = maxBytes;
  for await (const { name, text } of documents) {
    const bytes = new TextEncoder().encode(text);
    if (bytes.length > room) {
      const kept = decodeUtf8(bytes.subarray(0, room), false);
      if (room && "text" in kept) yield { name, text: kept.text };
      return;
    }
    room -= bytes.length;
    yield { name, text };
  }
}
