/**
 * @file safetensors files, read strictly. `safetensors_writer.js` writes them.
 *
 * A file is an 8-byte little-endian length, that many bytes of JSON header, then the tensors' raw little-endian bytes
 * without a gap:
 *
 *     {"__metadata__": {"format": "pt"}, "model.norm.weight": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}}
 *
 * Reading checks the whole header against the file's size before it allocates for a single tensor, and each chunk
 * against its digest before a byte of it is used. Hosts of JavaScript are little-endian: elements are stored as typed
 * arrays hold them. `docs/formats/checkpoint.md` lists what is refused. May import: errors, contracts, digests.
 */

import { compareText, repr, typeName } from "./contracts/names.js";
import { CHUNK_BYTES, expectChunk, expectSize } from "./digests.js";
import { CheckpointCorrupt, HybridError } from "./errors.js";
import { halvesToFloats } from "./half.js";
import { subtleSha256 } from "./sha256.js";
import { hasLoneSurrogate, parseExact, StrictJsonError } from "./strict_json.js";

/** @import { FileDigest } from "./digests.js" */

export const MAX_HEADER_BYTES = 100_000_000; // the format's own limit

/** Stored type -> bytes of an element. Types narrower than a byte and F8 are refused. */
export const ITEM_BYTES = new Map([
  ...["BOOL", "U8", "I8"].map((name) => /** @type {const} */ ([name, 1])),
  ...["U16", "I16", "F16", "BF16"].map((name) => /** @type {const} */ ([name, 2])),
  ...["U32", "I32", "F32"].map((name) => /** @type {const} */ ([name, 4])),
  ...["U64", "I64", "F64", "C64"].map((name) => /** @type {const} */ ([name, 8])),
]);

/** A file that breaks the format. `category` names the rule (the list is in docs/formats/checkpoint.md). */
export class SafetensorsError extends CheckpointCorrupt {
  static title = "SafetensorsError";

  /**
   * @param {string} source the file's name in messages
   * @param {string} category
   * @param {string} detail
   */
  constructor(source, category, detail) {
    super(`${source}: ${detail}`);
    this.category = category;
  }
}

/**
 * One tensor of a header: stored dtype name, shape, and its byte range within the data part.
 *
 * @typedef {object} TensorEntry
 * @property {string} name
 * @property {string} dtype
 * @property {readonly number[]} shape
 * @property {number} start
 * @property {number} end
 */

/**
 * A checked header. `entries` are in the order of their bytes; `dataStart` is where the data part begins.
 *
 * @typedef {object} Header
 * @property {readonly TensorEntry[]} entries
 * @property {Map<string, string> | null} metadata
 * @property {number} dataStart
 * @property {number} dataSize
 */

/** @typedef {Uint8Array | Int8Array | Uint16Array | Int16Array | Uint32Array | Int32Array | Float32Array} SmallArray */
/** @typedef {SmallArray | Float64Array | BigUint64Array | BigInt64Array} TensorArray */

// --- the header ------------------------------------------------------------------------------------------------------

/**
 * The length of the header from the first 8 bytes of a file of `fileSize` bytes.
 *
 * @param {string} source the file's name in messages
 * @param {Uint8Array} prefix
 * @param {number} fileSize
 * @returns {number}
 * @throws {SafetensorsError}
 */
export function headerLength(source, prefix, fileSize) {
  if (fileSize < 8 || prefix.length < 8) {
    throw new SafetensorsError(source, "file_too_small", `${fileSize} bytes, but a safetensors file has at least 8`);
  }
  const length = new DataView(prefix.buffer, prefix.byteOffset).getBigUint64(0, true);
  if (length > MAX_HEADER_BYTES) {
    const detail = `the header claims ${length} bytes; at most ${MAX_HEADER_BYTES} are allowed`;
    throw new SafetensorsError(source, "header_too_large", detail);
  }
  if (8 + Number(length) > fileSize) {
    const detail = `the header claims ${length} bytes, but ${fileSize - 8} follow: truncated?`;
    throw new SafetensorsError(source, "header_beyond_file", detail);
  }
  return Number(length);
}

/**
 * Check a header against the size of the data part behind it. Allocates nothing of that size.
 *
 * @param {string} source the file's name in messages
 * @param {Uint8Array} header
 * @param {number} dataSize
 * @returns {Header}
 * @throws {SafetensorsError}
 */
export function parseHeader(source, header, dataSize) {
  if ([0x20, 0x09, 0x0a, 0x0d].includes(header[0])) {
    throw new SafetensorsError(source, "header_start", "the header must begin with '{', not with white space");
  }
  const document = readJson(source, header);
  if (!(document instanceof Map)) {
    throw new SafetensorsError(source, "header_not_object", "the header must be a JSON object");
  }
  const metadata = document.has("__metadata__") ? checkMetadata(source, document.get("__metadata__")) : null;
  document.delete("__metadata__");
  const entries = [...document].map(([name, info]) => checkEntry(source, name, info, dataSize));
  entries.sort((a, b) => a.start - b.start || a.end - b.end);
  let position = 0;
  for (const entry of entries) {
    if (entry.start < position) {
      const detail = `tensor ${repr(entry.name)} begins at byte ${entry.start}, inside its neighbour`;
      throw new SafetensorsError(source, "offsets_overlap", detail);
    }
    if (entry.start > position) {
      const detail = `bytes ${position} to ${entry.start - 1} before tensor ${repr(entry.name)} belong to none`;
      throw new SafetensorsError(source, "hole", detail);
    }
    position = entry.end;
  }
  if (position !== dataSize) {
    throw new SafetensorsError(source, "trailing_bytes", `${dataSize - position} bytes follow the last tensor`);
  }
  return { entries, metadata, dataStart: 8 + header.length, dataSize };
}

/** @param {string} source @param {Uint8Array} header @returns {unknown} */
function readJson(source, header) {
  try {
    return parseExact(header);
  } catch (error) {
    if (!(error instanceof StrictJsonError)) throw error;
    const category = { utf8: "header_not_utf8", syntax: "header_not_json", duplicate: "duplicate_name" }[error.kind];
    throw new SafetensorsError(source, category, `the header is refused: ${error.message}`);
  }
}

/** @param {string} source @param {unknown} value @returns {Map<string, string>} */
function checkMetadata(source, value) {
  if (!(value instanceof Map)) {
    throw new SafetensorsError(source, "metadata_not_string", "__metadata__ must be an object of strings");
  }
  for (const [key, text] of value) {
    if (typeof text !== "string" || hasLoneSurrogate(text)) {
      const detail = `__metadata__.${key} must be a string, not ${repr(text, 60)}`;
      throw new SafetensorsError(source, "metadata_not_string", detail);
    }
  }
  return value;
}

/**
 * @param {string} source
 * @param {string} name
 * @param {unknown} info
 * @param {number} dataSize
 * @returns {TensorEntry}
 */
function checkEntry(source, name, info, dataSize) {
  /** @param {string} category @param {string} detail */
  const refuse = (category, detail) => new SafetensorsError(source, category, `tensor ${repr(name, 200)}: ${detail}`);

  if (!name) throw refuse("name_empty", "a tensor needs a name");
  const keys = info instanceof Map ? [...info.keys()].sort(compareText) : typeName(info);
  if (!(info instanceof Map) || String(keys) !== "data_offsets,dtype,shape") {
    throw refuse("tensor_info_schema", `expected dtype, shape and data_offsets, found ${repr(keys, 200)}`);
  }
  const [dtype, shape, offsets] = ["dtype", "shape", "data_offsets"].map((key) => info.get(key));
  const itemBytes = typeof dtype === "string" ? ITEM_BYTES.get(dtype) : undefined;
  if (itemBytes === undefined) {
    throw refuse("dtype_unknown", `dtype ${repr(dtype, 60)} is none of ${[...ITEM_BYTES.keys()].join(", ")}`);
  }
  if (!Array.isArray(shape) || !shape.every(isSize)) {
    throw refuse("shape_invalid", `shape ${repr(shape, 120)} must be a list of integers of at least 0`);
  }
  if (!Array.isArray(offsets) || offsets.length !== 2 || !offsets.every(isSize)) {
    throw refuse("offsets_invalid", `data_offsets ${repr(offsets, 120)} must be two integers of at least 0`);
  }
  const [start, end] = /** @type {bigint[]} */ (offsets);
  if (start > end) throw refuse("offsets_invalid", `data_offsets ${repr(offsets)} run backwards`);
  // The dimensions other than 0 must make sense by themselves: array libraries multiply them before they notice the 0.
  let size = BigInt(itemBytes);
  for (const dimension of shape) {
    size *= dimension || 1n;
    if (size > Number.MAX_SAFE_INTEGER) {
      const detail = `${dtype} of shape ${repr(shape)} is more than ${Number.MAX_SAFE_INTEGER} bytes`;
      throw refuse("size_overflow", detail);
    }
  }
  if (shape.includes(0n)) size = 0n;
  if (size !== end - start) {
    const found = `data_offsets ${repr(offsets)} give ${end - start}`;
    throw refuse("shape_size_mismatch", `${dtype} of shape ${repr(shape)} takes ${size} bytes, but ${found}`);
  }
  if (end > dataSize) {
    const detail = `data_offsets ${repr(offsets)} lie beyond the ${dataSize} bytes of data: truncated?`;
    throw refuse("offsets_beyond_data", detail);
  }
  return { name, dtype, shape: shape.map(Number), start: Number(start), end: Number(end) };
}

/** @param {unknown} value @returns {boolean} */
function isSize(value) {
  return typeof value === "bigint" && value >= 0n;
}

// --- reading ---------------------------------------------------------------------------------------------------------

/** @typedef {ReadableStream<Uint8Array> | AsyncIterable<Uint8Array> | Iterable<Uint8Array>} ByteSource */

/**
 * A piece of one tensor's raw bytes. `offset`, and except in a tensor's last piece the length too, are multiples of 8,
 * so that pieces can be decoded or written to a GPU buffer as they come. The bytes stay valid.
 *
 * @typedef {object} Piece
 * @property {TensorEntry} entry
 * @property {number} offset within the tensor
 * @property {Uint8Array<ArrayBuffer>} bytes
 */

/**
 * A file of which the header has been read and checked. Take `pieces()` once, to its end: only then is the file whole.
 */
export class OpenFile {
  #chunks;
  #rest;

  /**
   * @param {Header} header
   * @param {AsyncGenerator<Uint8Array<ArrayBuffer>>} chunks
   * @param {Uint8Array<ArrayBuffer>} rest what was read of the data part already
   */
  constructor(header, chunks, rest) {
    this.header = header;
    this.#chunks = chunks;
    this.#rest = rest;
  }

  /**
   * The tensors' bytes in the order of the file. Tensors without elements give one empty piece.
   *
   * @returns {AsyncGenerator<Piece>}
   * @throws {CheckpointCorrupt} when the file ends early, is longer than it should be, or a chunk is not the expected
   *   one
   */
  async *pieces() {
    try {
      for (const entry of this.header.entries) {
        const length = entry.end - entry.start;
        let offset = 0;
        do {
          if (!this.#rest.length && offset < length) await this.#readOn();
          let take = Math.min(this.#rest.length, length - offset);
          if (offset + take < length && take % 8) {
            // The chunk ends inside an element (data parts of other writers begin anywhere): join it with the next one.
            if (take < 8) {
              await this.#readOn();
              continue;
            }
            take -= take % 8;
          }
          const bytes = this.#rest.subarray(0, take);
          this.#rest = this.#rest.subarray(take);
          yield { entry, offset, bytes };
          offset += take;
        } while (offset < length);
      }
      await this.#chunks.next(); // complains when more follows
    } finally {
      await this.#chunks.return(undefined);
    }
  }

  async #readOn() {
    const { value, done } = await this.#chunks.next();
    if (done) throw new HybridError("the pieces of a tensor file can be taken only once: open it again");
    this.#rest = joined(this.#rest, value);
  }
}

/**
 * Read and check the header of a file of `size` bytes that comes in pieces of any length.
 *
 * With `expected`, the size and every 8 MiB chunk must be what the manifest says, before a byte of the chunk is used.
 * (The digest of the whole file is not computed: it would be slow here, and size and chunks leave nothing open.)
 *
 * @param {string} source the file's name in messages
 * @param {ByteSource} stream
 * @param {number} size
 * @param {FileDigest | null} [expected]
 * @returns {Promise<OpenFile>}
 * @throws {SafetensorsError}
 * @throws {CheckpointCorrupt} for another size or digest
 */
export async function openStream(source, stream, size, expected = null) {
  if (expected) expectSize(source, size, expected);
  const plain = chunked(source, stream, size);
  const chunks = expected ? verified(source, plain, expected) : plain;
  /** @type {Uint8Array<ArrayBuffer>} */
  let read = new Uint8Array(0);
  /** @param {number} length at most `size` */
  const need = async (length) => {
    while (read.length < length) read = joined(read, (await chunks.next()).value);
  };
  try {
    await need(Math.min(8, size));
    const length = headerLength(source, read.subarray(0, 8), size);
    await need(8 + length);
    const header = parseHeader(source, read.subarray(8, 8 + length), size - 8 - length);
    return new OpenFile(header, chunks, read.subarray(8 + length));
  } catch (error) {
    await chunks.return(undefined);
    throw error;
  }
}

/**
 * A whole file in memory.
 *
 * @typedef {object} TensorFile
 * @property {Map<string, TensorArray>} tensors by name, as `decode` gives them, in the order of the file
 * @property {Map<string, string>} sha256 of each tensor's raw bytes as stored
 * @property {Header} header dtypes and shapes as stored
 */

/**
 * Every tensor of a file; the parameters are those of `openStream`.
 *
 * @param {string} source
 * @param {ByteSource} stream
 * @param {number} size
 * @param {FileDigest | null} [expected]
 * @returns {Promise<TensorFile>}
 */
export async function readStream(source, stream, size, expected = null) {
  const file = await openStream(source, stream, size, expected);
  /** @type {Map<string, TensorArray>} */
  const tensors = new Map();
  /** @type {Map<string, string>} */
  const digests = new Map();
  let raw = new Uint8Array(0);
  for await (const { entry, offset, bytes } of file.pieces()) {
    const length = entry.end - entry.start;
    if (offset === 0) raw = new Uint8Array(length);
    raw.set(bytes, offset);
    if (offset + bytes.length < length) continue;
    tensors.set(entry.name, decode(source, entry, raw));
    digests.set(entry.name, await subtleSha256(raw));
  }
  return { tensors, sha256: digests, header: file.header };
}

/**
 * Every tensor of a file that is in memory.
 *
 * @param {string} source
 * @param {Uint8Array} data
 * @param {FileDigest | null} [expected]
 * @returns {Promise<TensorFile>}
 */
export function readBytes(source, data, expected = null) {
  return readStream(source, [data], data.length, expected);
}

/**
 * The elements of one tensor from its raw bytes: the stored type, except that F16 and BF16 are widened to float32
 * (exactly), BOOL is bytes of 0 and 1, and C64 is pairs of float32. A copy only where the bytes are not aligned.
 *
 * @param {string} source
 * @param {{name: string, dtype: string}} entry
 * @param {Uint8Array<ArrayBuffer>} raw
 * @returns {TensorArray}
 */
export function decode(source, { name, dtype }, raw) {
  const itemBytes = dtype === "C64" ? 4 : (ITEM_BYTES.get(dtype) ?? 1);
  const { buffer, byteOffset, length } = raw.byteOffset % itemBytes ? raw.slice() : raw;
  const count = length / itemBytes;
  switch (dtype) {
    case "BOOL":
      if (raw.some((byte) => byte > 1)) {
        throw new SafetensorsError(source, "bool_invalid", `tensor ${repr(name)}: a BOOL byte is neither 0 nor 1`);
      }
      return raw;
    case "U8":
      return raw;
    case "I8":
      return new Int8Array(buffer, byteOffset, count);
    case "U16":
      return new Uint16Array(buffer, byteOffset, count);
    case "I16":
      return new Int16Array(buffer, byteOffset, count);
    case "F16":
      return halvesToFloats(new Uint16Array(buffer, byteOffset, count));
    case "BF16": {
      const bits = Uint32Array.from(new Uint16Array(buffer, byteOffset, count), (half) => half << 16);
      return new Float32Array(bits.buffer);
    }
    case "U32":
      return new Uint32Array(buffer, byteOffset, count);
    case "I32":
      return new Int32Array(buffer, byteOffset, count);
    case "F32":
    case "C64":
      return new Float32Array(buffer, byteOffset, count);
    case "U64":
      return new BigUint64Array(buffer, byteOffset, count);
    case "I64":
      return new BigInt64Array(buffer, byteOffset, count);
    case "F64":
      return new Float64Array(buffer, byteOffset, count);
    default:
      throw new HybridError(`tensor ${repr(name)}: dtype ${repr(dtype)} is none of safetensors'`);
  }
}

/**
 * The stream in chunks of CHUNK_BYTES, each in memory of its own; the last may be shorter.
 *
 * @param {string} source
 * @param {ByteSource} stream
 * @param {number} size
 * @returns {AsyncGenerator<Uint8Array<ArrayBuffer>>}
 * @throws {CheckpointCorrupt} for a stream that is longer or shorter than `size`
 */
async function* chunked(source, stream, size) {
  let done = 0;
  let chunk = new Uint8Array(Math.min(CHUNK_BYTES, size));
  let used = 0;
  for await (const piece of iterate(stream)) {
    if (done + piece.length > size) {
      throw new CheckpointCorrupt(`${source}: longer than the ${size} bytes it should have`);
    }
    for (let rest = piece; rest.length; ) {
      const part = rest.subarray(0, chunk.length - used);
      chunk.set(part, used);
      used += part.length;
      done += part.length;
      rest = rest.subarray(part.length);
      if (used === chunk.length) {
        yield chunk;
        chunk = new Uint8Array(Math.min(CHUNK_BYTES, size - done));
        used = 0;
      }
    }
  }
  if (done < size) throw new SafetensorsError(source, "truncated", `ends after ${done} of its ${size} bytes`);
}

/**
 * The chunks, each after its digest was found to be the expected one. While one is hashed the next one is read.
 *
 * @param {string} source
 * @param {AsyncGenerator<Uint8Array<ArrayBuffer>>} chunks
 * @param {FileDigest} expected
 * @returns {AsyncGenerator<Uint8Array<ArrayBuffer>>}
 */
async function* verified(source, chunks, expected) {
  try {
    let current = await chunks.next();
    for (let index = 0; !current.done; index++) {
      const digest = subtleSha256(current.value);
      const next = await chunks.next();
      expectChunk(source, index, await digest, expected);
      yield current.value;
      current = next;
    }
  } finally {
    await chunks.return(undefined);
  }
}

/** @param {ByteSource} stream @returns {AsyncGenerator<Uint8Array>} */
async function* iterate(stream) {
  if (!("getReader" in stream)) {
    yield* stream;
    return;
  }
  // Not every browser can iterate over a ReadableStream.
  const reader = stream.getReader();
  try {
    for (let read = await reader.read(); !read.done; read = await reader.read()) yield read.value;
  } finally {
    await reader.cancel();
  }
}

/**
 * @param {Uint8Array<ArrayBuffer>} first
 * @param {Uint8Array<ArrayBuffer>} second
 * @returns {Uint8Array<ArrayBuffer>} not a copy where `first` is empty
 */
function joined(first, second) {
  if (!first.length) return second;
  const both = new Uint8Array(first.length + second.length);
  both.set(first);
  both.set(second, first.length);
  return both;
}
