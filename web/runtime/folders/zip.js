/**
 * @file Uncompressed zip files as folders, read in place and written as a stream.
 *
 * Reading is strict, because archives come from strangers: plain names, each once, nothing compressed or encrypted, every
 * header saying the same as the table of contents, no two files in the same bytes. Files beyond 4 GiB use zip64. The
 * layout is that of PKWARE's APPNOTE 6.3.3, sections 4.3 to 4.5. May import: errors, contracts.
 */

import { repr } from "../contracts/names.js";
import { CheckpointCorrupt, HybridError } from "../errors.js";
import { readBlob } from "./blob.js";
import { crc32 } from "./crc32.js";
import { checkRange, nameProblem, notThere, readPieces, sizeOf } from "./folder.js";

/** @import { Folder } from "./folder.js" */

/**
 * Something with bytes, such as a file on a disk.
 *
 * @typedef {object} ByteRange
 * @property {number} size
 * @property {(begin: number, end: number) => Promise<Uint8Array>} read
 */

/**
 * One file in a zip. `start`: where its bytes begin.
 *
 * @typedef {object} Entry
 * @property {string} name
 * @property {number} size
 * @property {number} crc
 * @property {number} start
 */

const LOCAL = 0x04034b50;
const CENTRAL = 0x02014b50;
const END = 0x06054b50;
const END64 = 0x06064b50;
const LOCATOR = 0x07064b50;
const ZIP64 = 1; // the extra field with sizes beyond 32 bits
const MAX32 = 0xffffffff;
const MAX16 = 0xffff;
const UTF8_NAME = 0x800;
const VERSION = 20;
const VERSION64 = 45;
const FIRST_DAY = 0x21; // 1980-01-01, the earliest that a zip can say: equal folders give equal archives
const REGULAR_FILE = 0o100644 * 2 ** 16;
const UNIX = 3 << 8;

const MAX_ENTRIES = 64;
const MAX_DIRECTORY_BYTES = 1 << 20;

// --- reading ---------------------------------------------------------------------------------------------------------

/**
 * The files of a zip. A file that is read from its beginning to its end is compared with its checksum.
 *
 * @implements {Folder}
 */
export class ZipFolder {
  #source;
  #entries;
  #checksums = new Checksums();

  /**
   * Use `ZipFolder.open`.
   *
   * @param {string} name
   * @param {ByteRange} source
   * @param {readonly Entry[]} entries
   */
  constructor(name, source, entries) {
    this.name = name;
    this.#source = source;
    this.#entries = new Map(entries.map((entry) => [entry.name, entry]));
  }

  /**
   * @param {Blob | ByteRange} source
   * @param {string} [name] for messages
   * @returns {Promise<ZipFolder>}
   * @throws {CheckpointCorrupt} for what is no zip, or not one of these
   */
  static async open(source, name = source instanceof File ? source.name : "archive") {
    const { size } = source;
    /** @param {number} begin @param {number} end */
    const read = (begin, end) => ("read" in source ? source.read(begin, end) : readBlob(source, name, begin, end));
    return new ZipFolder(name, { size, read }, await readEntries(name, { size, read }));
  }

  async list() {
    return [...this.#entries.keys()].sort();
  }

  /** @param {string} file */
  async size(file) {
    return this.#entries.get(file)?.size ?? null;
  }

  /** @param {string} file @param {number} [begin] @param {number} [end] */
  async read(file, begin, end) {
    const entry = this.#entries.get(file);
    if (!entry) throw notThere(this, file);
    const [first, after] = checkRange(this, file, entry.size, begin, end);
    const bytes = new Uint8Array(await this.#source.read(entry.start + first, entry.start + after));
    const found = this.#checksums.add(file, first, bytes);
    if (after === entry.size && found !== null && found !== entry.crc) {
      throw new CheckpointCorrupt(
        `${this.name}/${file}: CRC-32 ${hex(found)}, but the archive says ${hex(entry.crc)}: it was changed or damaged`,
      );
    }
    return bytes;
  }
}

/** Checksums of files that are read in order. */
export class Checksums {
  /** @type {Map<string, {at: number, crc: number}>} */
  #running = new Map();

  /**
   * @param {string} file
   * @param {number} begin where in the file the bytes are
   * @param {Uint8Array} bytes
   * @returns {number | null} the checksum up to their end; null if something in front of them was not read
   */
  add(file, begin, bytes) {
    const { at, crc } = begin ? (this.#running.get(file) ?? { at: 0, crc: 0 }) : { at: 0, crc: 0 };
    if (begin !== at) return null;
    const found = crc32(bytes, crc);
    this.#running.set(file, { at: at + bytes.length, crc: found });
    return found;
  }

  /** @param {string} file @returns {number} of what was read of it */
  of(file) {
    return this.#running.get(file)?.crc ?? 0;
  }
}

/**
 * @param {string} source the archive in messages
 * @param {ByteRange} range
 * @returns {Promise<Entry[]>}
 */
async function readEntries(source, range) {
  /** @param {string} detail */
  const refuse = (detail) => new CheckpointCorrupt(`${source}: ${detail}`);
  /** @param {number} begin @param {number} length */
  const view = async (begin, length) => {
    if (begin < 0 || begin + length > range.size) throw refuse("a part of it lies beyond its end: cut or damaged");
    return new Bytes(await range.read(begin, begin + length));
  };

  const { count, begin, end } = await findDirectory(range.size, view, refuse);
  if (count > MAX_ENTRIES) throw refuse(`${count} files; at most ${MAX_ENTRIES} are read`);
  if (begin > end || end - begin > MAX_DIRECTORY_BYTES) throw refuse("its table of contents has an impossible size");
  const directory = await view(begin, end - begin);
  const entries = [];
  const names = new Set();
  for (let index = 0; index < count; index++) {
    const entry = readCentral(directory, refuse);
    if (names.has(entry.name.toLowerCase())) throw refuse(`two files have the name ${repr(entry.name)}`);
    names.add(entry.name.toLowerCase());
    entries.push(entry);
  }
  if (directory.left) throw refuse("its table of contents has more in it than files");

  let position = 0;
  for (const entry of entries.sort((a, b) => a.offset - b.offset)) {
    const head = await view(entry.offset, 30);
    const file = `file ${repr(entry.name)}`;
    if (head.u32() !== LOCAL) throw refuse(`${file} is not where the table of contents says`);
    head.skip(2);
    const flags = head.u16();
    const method = head.u16();
    head.skip(4);
    const [crc, packed, size] = [head.u32(), head.u32(), head.u32()];
    const [nameLength, extraLength] = [head.u16(), head.u16()];
    const rest = await view(entry.offset + 30, nameLength + extraLength);
    const name = rest.text(nameLength);
    const [fullSize, fullPacked] = wide(rest.take(extraLength), [size, packed], file, refuse);
    const same = name === entry.name && flags === entry.flags && method === 0 && crc === entry.crc;
    if (!same || fullSize !== entry.size || fullPacked !== entry.size) {
      throw refuse(`${file} has a header that differs from the table of contents`);
    }
    if (entry.offset < position) throw refuse(`${file} begins inside another`);
    entry.start = entry.offset + 30 + nameLength + extraLength;
    position = entry.start + entry.size;
    if (position > begin) throw refuse(`${file} reaches into the table of contents`);
  }
  return entries;
}

/**
 * @param {number} size of the archive
 * @param {(begin: number, length: number) => Promise<Bytes>} view
 * @param {(detail: string) => CheckpointCorrupt} refuse
 * @returns {Promise<{count: number, begin: number, end: number}>} the table of contents
 */
async function findDirectory(size, view, refuse) {
  if (size < 22) throw refuse(`${size} bytes are no archive`);
  const tail = await view(size - 22, 22);
  const signature = tail.u32();
  const [disk, first, here, all] = [tail.u16(), tail.u16(), tail.u16(), tail.u16()];
  const [length, offset] = [tail.u32(), tail.u32()];
  if (signature !== END || tail.u16() || disk || first || here !== all) {
    throw refuse("does not end like a packed checkpoint: it is cut, damaged, or no archive; copy or download it again");
  }
  let [count, begin, bytes, end] = [all, offset, length, size - 22];
  if (count === MAX16 || begin === MAX32 || bytes === MAX32) {
    const locator = await view(size - 42, 20);
    const [mark, part, at, parts] = [locator.u32(), locator.u32(), locator.u64(), locator.u32()];
    end = at;
    if (mark !== LOCATOR || part || parts !== 1 || end + 56 !== size - 42) throw refuse("its zip64 end is damaged");
    const wideEnd = await view(end, 56);
    const [mark64, rest] = [wideEnd.u32(), wideEnd.u64()];
    wideEnd.skip(12);
    const here64 = wideEnd.u64();
    [count, bytes, begin] = [wideEnd.u64(), wideEnd.u64(), wideEnd.u64()];
    if (mark64 !== END64 || rest !== 44 || here64 !== count) throw refuse("its zip64 end is damaged");
  }
  if (begin + bytes !== end) throw refuse("its table of contents is not where its end says: cut or damaged");
  return { count, begin, end };
}

/**
 * @param {Bytes} directory at an entry
 * @param {(detail: string) => CheckpointCorrupt} refuse
 * @returns {Entry & {offset: number, flags: number}}
 */
function readCentral(directory, refuse) {
  if (directory.left < 46 || directory.u32() !== CENTRAL) throw refuse("its table of contents is damaged");
  directory.skip(4);
  const [flags, method] = [directory.u16(), directory.u16()];
  directory.skip(4);
  const [crc, packed, size] = [directory.u32(), directory.u32(), directory.u32()];
  const [nameLength, extraLength, commentLength] = [directory.u16(), directory.u16(), directory.u16()];
  const disk = directory.u16();
  directory.skip(6);
  const offset = directory.u32();
  if (directory.left < nameLength + extraLength + commentLength) throw refuse("its table of contents is damaged");
  const name = directory.text(nameLength);
  const problem = nameProblem(name);
  if (problem) throw refuse(`a file has the name ${repr(name, 200)}: ${problem}`);
  const file = `file ${repr(name)}`;
  const [fullSize, fullPacked, start] = wide(directory.take(extraLength), [size, packed, offset], file, refuse);
  directory.skip(commentLength);
  if (method) throw refuse(`${file} is compressed: archives of checkpoints are not`);
  if (flags & ~UTF8_NAME || disk) throw refuse(`${file} is encrypted, in parts, or without its size in front`);
  if (fullSize !== fullPacked) throw refuse(`${file} has two sizes, ${fullSize} and ${fullPacked}`);
  return { name, size: fullSize, crc, flags, offset: start, start: 0 };
}

/**
 * Values of 32 bits, or what the zip64 extra field says where they are full.
 *
 * @param {Bytes} extra
 * @param {readonly number[]} values
 * @param {string} file
 * @param {(detail: string) => CheckpointCorrupt} refuse
 * @returns {number[]}
 */
function wide(extra, values, file, refuse) {
  /** @type {Bytes | null} */
  let found = null;
  while (extra.left) {
    const [id, length] = extra.left < 4 ? [0, MAX32] : [extra.u16(), extra.u16()];
    if (length > extra.left) throw refuse(`${file} has a damaged extra field`);
    const field = extra.take(length);
    if (id !== ZIP64) continue;
    if (found) throw refuse(`${file} has two zip64 fields`);
    found = field;
  }
  return values.map((value) => {
    if (value !== MAX32) return value;
    const full = found && found.left >= 8 ? found.u64() : Number.NaN;
    if (!Number.isSafeInteger(full)) throw refuse(`${file} lacks a size that fits into a zip64 field`);
    return full;
  });
}

/** Little-endian numbers one after the other. */
class Bytes {
  #bytes;
  #view;
  #at = 0;

  /** @param {Uint8Array} bytes */
  constructor(bytes) {
    this.#bytes = bytes;
    this.#view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  }

  get left() {
    return this.#bytes.length - this.#at;
  }

  u16() {
    this.#at += 2;
    return this.#view.getUint16(this.#at - 2, true);
  }

  u32() {
    this.#at += 4;
    return this.#view.getUint32(this.#at - 4, true);
  }

  /** Beyond 2^53 rounded, and never what anybody expects. */
  u64() {
    return this.u32() + this.u32() * 2 ** 32;
  }

  /** @param {number} count */
  skip(count) {
    this.#at += count;
  }

  /** @param {number} count */
  take(count) {
    this.#at += count;
    return new Bytes(this.#bytes.subarray(this.#at - count, this.#at));
  }

  /** @param {number} count bytes, each a character: names beyond ASCII are refused later */
  text(count) {
    this.#at += count;
    return String.fromCharCode(...this.#bytes.subarray(this.#at - count, this.#at));
  }
}

// --- writing ---------------------------------------------------------------------------------------------------------

/**
 * The bytes around the files: `heads[i]` comes before file i, `tail` after the last one.
 *
 * @param {readonly {name: string, size: number, crc: number}[]} files
 * @returns {{heads: Uint8Array<ArrayBuffer>[], tail: Uint8Array<ArrayBuffer>, size: number}}
 */
export function zipLayout(files) {
  const heads = [];
  /** @type {number[]} */
  const directory = [];
  let position = 0;
  for (const { name, size, crc } of files) {
    const text = Array.from(name, (character) => character.charCodeAt(0));
    const big = size >= MAX32;
    const sizes = big ? [...u64(size), ...u64(size)] : [];
    const short = big ? MAX32 : size;
    const common = [...u16(0), ...u16(0), ...u16(0), ...u16(FIRST_DAY), ...u32(crc), ...u32(short), ...u32(short)];
    const local = extraField(sizes);
    const head = [
      ...u32(LOCAL),
      ...u16(big ? VERSION64 : VERSION),
      ...common,
      ...u16(text.length),
      ...u16(local.length),
    ];
    heads.push(Uint8Array.from([...head, ...text, ...local]));

    const far = position >= MAX32;
    const extra = extraField([...sizes, ...(far ? u64(position) : [])]);
    const version = big || far ? VERSION64 : VERSION;
    directory.push(...u32(CENTRAL), ...u16(UNIX | version), ...u16(version), ...common);
    directory.push(...u16(text.length), ...u16(extra.length), ...u16(0), ...u16(0), ...u16(0), ...u32(REGULAR_FILE));
    directory.push(...u32(far ? MAX32 : position), ...text, ...extra);
    position += heads[heads.length - 1].length + size;
  }
  const end = position + directory.length;
  const wideEnd = position >= MAX32 ? end64(files.length, directory.length, position, end) : [];
  const counts = [...u16(0), ...u16(0), ...u16(files.length), ...u16(files.length)];
  const last = [...u32(directory.length), ...u32(Math.min(position, MAX32)), ...u16(0)];
  const tail = Uint8Array.from([...directory, ...wideEnd, ...u32(END), ...counts, ...last]);
  return { heads, tail, size: position + tail.length };
}

/**
 * @typedef {object} ZipOptions
 * @property {readonly string[]} files of the folder, in this order
 * @property {Checksums} [checksums] of all of them, if they were read in order already
 * @property {AbortSignal} [signal]
 */

/**
 * Some files of a folder as one zip. They are read twice: checksums stand in front of the bytes.
 *
 * @param {Folder} folder
 * @param {ZipOptions} options
 * @returns {Promise<{size: number, stream: () => ReadableStream<Uint8Array<ArrayBuffer>>}>} the size of the zip in bytes
 */
export async function zipFolder(folder, { files, checksums, signal }) {
  const known = checksums ?? new Checksums();
  /** @type {{name: string, size: number, crc: number}[]} */
  const entries = [];
  for (const name of files) {
    const size = await sizeOf(folder, name);
    let at = 0;
    if (!checksums) {
      for await (const piece of readPieces(folder, name, size)) {
        signal?.throwIfAborted();
        known.add(name, at, piece);
        at += piece.length;
      }
    }
    entries.push({ name, size, crc: known.of(name) });
  }
  const { heads, tail, size } = zipLayout(entries);

  async function* pieces() {
    for (const [index, { name, size: length, crc }] of entries.entries()) {
      yield heads[index];
      let found = 0;
      for await (const piece of readPieces(folder, name, length)) {
        signal?.throwIfAborted();
        found = crc32(piece, found);
        yield piece;
      }
      if (found !== crc) throw new HybridError(`${folder.name}/${name}: changed while it was packed: pack it again`);
    }
    yield tail;
  }
  return { size, stream: () => streamOf(pieces()) };
}

/**
 * @param {AsyncGenerator<Uint8Array<ArrayBuffer>>} pieces
 * @returns {ReadableStream<Uint8Array<ArrayBuffer>>}
 */
function streamOf(pieces) {
  return new ReadableStream(
    {
      async pull(controller) {
        const { value, done } = await pieces.next();
        if (done) controller.close();
        else controller.enqueue(value);
      },
      async cancel() {
        await pieces.return(undefined);
      },
    },
    { highWaterMark: 0 },
  );
}

/** @param {number} count @param {number} bytes @param {number} begin @param {number} end of the table of contents */
function end64(count, bytes, begin, end) {
  const versions = [...u16(UNIX | VERSION64), ...u16(VERSION64)];
  const record = [...u64(44), ...versions, ...u32(0), ...u32(0), ...u64(count), ...u64(count), ...u64(bytes)];
  return [...u32(END64), ...record, ...u64(begin), ...u32(LOCATOR), ...u32(0), ...u64(end), ...u32(1)];
}

/** @param {readonly number[]} content @returns {number[]} the zip64 extra field; nothing without content */
function extraField(content) {
  return content.length ? [...u16(ZIP64), ...u16(content.length), ...content] : [];
}

/** @param {number} value */
function u16(value) {
  return [value & 255, (value >>> 8) & 255];
}

/** @param {number} value */
function u32(value) {
  return [...u16(value & MAX16), ...u16(value >>> 16)];
}

/** @param {number} value */
function u64(value) {
  return [...u32(value % 2 ** 32), ...u32(Math.floor(value / 2 ** 32))];
}

/** @param {number} crc */
function hex(crc) {
  return crc.toString(16).padStart(8, "0");
}
