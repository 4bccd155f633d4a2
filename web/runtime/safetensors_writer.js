/**
 * @file safetensors files, written deterministically: the same tensors always give the same bytes. The format and what
 * reads it are in `safetensors.js`. May import: errors, contracts, digests, safetensors.
 */

import { compareText, repr } from "./contracts/names.js";
import { Digester } from "./digests.js";
import { HybridError } from "./errors.js";
import { ITEM_BYTES, MAX_HEADER_BYTES } from "./safetensors.js";
import { subtleSha256 } from "./sha256.js";
import { hasLoneSurrogate } from "./strict_json.js";

/** @import { FileDigest } from "./digests.js" */
/** @import { TensorEntry } from "./safetensors.js" */

/**
 * @typedef {object} TensorSpec
 * @property {string} name
 * @property {string} dtype stored type, such as "F32"
 * @property {readonly number[]} shape
 */

/**
 * Where everything of a file lies.
 *
 * @typedef {object} Layout
 * @property {Uint8Array<ArrayBuffer>} head the length and the header: the bytes before the first tensor
 * @property {readonly TensorEntry[]} entries in the order of their bytes
 * @property {number} size of the whole file
 */

/**
 * The layout of a file: write `head`, then the bytes of each entry in order.
 *
 * The same tensors always give the same bytes: entries are ordered by item size (largest first, so that every tensor is
 * aligned), then by name.
 *
 * @param {Iterable<TensorSpec>} tensors
 * @param {Record<string, string> | null} [metadata]
 * @returns {Layout}
 * @throws {HybridError} naming the tensor, for an unknown dtype, an empty or reserved name, or a name given twice
 */
export function layout(tensors, metadata = null) {
  const specs = [...tensors].map((spec) => ({ ...spec, itemBytes: storedBytes(spec) }));
  specs.sort((a, b) => b.itemBytes - a.itemBytes || compareText(a.name, b.name));
  /** @type {TensorEntry[]} */
  const entries = [];
  const members = [];
  const names = new Set(["__metadata__"]);
  if (metadata) {
    const pairs = Object.keys(metadata)
      .sort(compareText)
      .map((key) => `${JSON.stringify(key)}:${JSON.stringify(metadata[key])}`);
    members.push(`"__metadata__":{${pairs.join(",")}}`);
  }
  let position = 0;
  for (const { name, dtype, shape, itemBytes } of specs) {
    if (!name || names.has(name) || hasLoneSurrogate(name)) {
      throw new HybridError(`a tensor cannot be named ${repr(name)}`);
    }
    names.add(name);
    const end = position + shape.reduce((product, dimension) => product * dimension, itemBytes);
    entries.push({ name, dtype, shape, start: position, end });
    const info = `"dtype":"${dtype}","shape":[${shape.join(",")}],"data_offsets":[${position},${end}]`;
    members.push(`${JSON.stringify(name)}:{${info}}`);
    position = end;
  }
  const text = new TextEncoder().encode(`{${members.join(",")}}`);
  const length = Math.ceil(text.length / 8) * 8;
  if (length > MAX_HEADER_BYTES) {
    throw new HybridError(
      `a header of ${length} bytes for ${specs.length} tensors: the format allows ${MAX_HEADER_BYTES}`,
    );
  }
  const head = new Uint8Array(8 + length).fill(0x20);
  new DataView(head.buffer).setBigUint64(0, BigInt(length), true);
  head.set(text, 8);
  return { head, entries, size: head.length + position };
}

/**
 * Write a file of tensors that are in memory through `sink`, piece by piece.
 *
 * @param {(bytes: Uint8Array) => void | Promise<void>} sink
 * @param {Iterable<TensorSpec & {bytes: Uint8Array<ArrayBuffer>}>} tensors raw little-endian bytes, which no two may share
 * @param {Record<string, string> | null} [metadata]
 * @returns {Promise<{digest: FileDigest, sha256: Map<string, string>}>} of the file, and of each tensor's raw bytes
 * @throws {HybridError} as `layout`; for bytes that are not those of the shape; and for two tensors that are one piece of
 *   memory: a tied tensor is saved once
 */
export async function write(sink, tensors, metadata = null) {
  const given = [...tensors];
  const { head, entries } = layout(given, metadata);
  const bytesOf = new Map(given.map(({ name, bytes }) => [name, bytes]));
  /** @type {Map<string, string>} */
  const memory = new Map();
  const buffers = [...new Set(given.map(({ bytes }) => bytes.buffer))];
  for (const entry of entries) {
    const { name, start, end } = entry;
    const bytes = /** @type {Uint8Array<ArrayBuffer>} */ (bytesOf.get(name));
    if (bytes.length !== end - start) {
      throw new HybridError(
        `tensor ${repr(name)}: ${bytes.length} bytes, but ${entry.dtype} of shape ${repr(entry.shape)} takes ${end - start}`,
      );
    }
    const place = `${buffers.indexOf(bytes.buffer)} ${bytes.byteOffset} ${bytes.length}`;
    const other = memory.get(place);
    if (bytes.length && other !== undefined) {
      throw new HybridError(
        `tensors ${repr(other)} and ${repr(name)} are the same memory: a tied tensor is saved once`,
      );
    }
    memory.set(place, name);
  }
  const digester = new Digester();
  await digester.update(head);
  await sink(head);
  /** @type {Map<string, string>} */
  const digests = new Map();
  for (const { name } of entries) {
    const bytes = /** @type {Uint8Array<ArrayBuffer>} */ (bytesOf.get(name));
    digests.set(name, await subtleSha256(bytes));
    await digester.update(bytes);
    await sink(bytes);
  }
  return { digest: await digester.result(), sha256: digests };
}

/** @param {TensorSpec} spec @returns {number} bytes of an element */
function storedBytes({ name, dtype }) {
  const size = ITEM_BYTES.get(dtype);
  if (size === undefined) {
    const expected = [...ITEM_BYTES.keys()].join(", ");
    throw new HybridError(`tensor ${repr(name)}: dtype ${dtype} has no safetensors form; expected one of ${expected}`);
  }
  return size;
}
