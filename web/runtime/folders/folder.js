/**
 * @file Folders of files with plain names, wherever they lie: memory, OPFS, a server, dropped files, a zip.
 *
 * Names are those that checkpoints allow, so none can leave its folder and every system can hold them. May import:
 * errors, contracts.
 */

import { repr } from "../contracts/names.js";
import { HybridError, LimitExceeded } from "../errors.js";

/**
 * @typedef {object} Folder
 * @property {string} name for messages
 * @property {() => Promise<string[]>} list the files' names, sorted
 * @property {(file: string) => Promise<number | null>} size in bytes; null if it is not there
 * @property {(file: string, begin?: number, end?: number) => Promise<Uint8Array<ArrayBuffer>>} read the bytes from
 *   `begin` to before `end` (all of them without the two), in memory of their own
 */

/**
 * Where a file is written, one writer at a time.
 *
 * @typedef {object} FileSink
 * @property {(bytes: Uint8Array) => Promise<void>} write the next bytes, which are no longer needed once it resolves
 * @property {() => Promise<void>} flush what was written is on disk and can be read
 * @property {() => Promise<void>} close flushed
 * @property {() => Promise<void>} abort a file that was made is removed, one that was appended to is cut again
 */

/**
 * @typedef {object} FolderWriting
 * @property {(file: string) => Promise<FileSink>} create a file, replacing one of that name from this moment on
 * @property {(file: string, at?: number) => Promise<FileSink>} append go on after the first `at` bytes (all of them by
 *   default); what follows is cut off. A file that is not there is made
 * @property {(name: string) => Promise<void>} remove a file, or a folder with all that is in it; nothing if it is not there
 */

/** @typedef {Folder & FolderWriting} WritableFolder */

/**
 * @typedef {object} FolderTree
 * @property {() => Promise<string[]>} folders the names of the folders in it, sorted
 * @property {(name: string) => Promise<Directory | null>} open a folder in it; null if it is not there
 * @property {(name: string) => Promise<Directory>} directory a folder in it, made if it is not there
 */

/**
 * A folder with folders in it, such as that of a run. isStored: other tabs see it too, and it takes of the room that the
 * browser gives this site.
 *
 * @typedef {WritableFolder & FolderTree & {isStored?: boolean}} Directory
 */

/** Bytes that are read or written at once where a whole file is copied. */
export const PIECE_BYTES = 8 * 1024 * 1024;

const NAME = /^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$/;
const DEVICE_NAME = /^(con|prn|aux|nul|com[0-9]|lpt[0-9])(\.|$)/i; // no file on Windows can have these names

/**
 * What is wrong with the name of a file or folder, or null.
 *
 * @param {string} name
 */
export function nameProblem(name) {
  if (NAME.test(name) && !name.endsWith(".") && !DEVICE_NAME.test(name)) return null;
  return "expected a plain file name of letters, digits, '.', '_' and '-'";
}

/**
 * @param {{name: string}} folder
 * @param {string} name of a file or folder in it
 * @returns {string} `name`
 * @throws {HybridError} for a name that no portable file can have
 */
export function checkName(folder, name) {
  const problem = nameProblem(name);
  if (problem) throw new HybridError(`${folder.name}: the name ${repr(name, 200)} is refused: ${problem}`);
  return name;
}

/**
 * The error of a file that was asked for and is not there.
 *
 * @param {{name: string}} folder
 * @param {string} file
 */
export function notThere(folder, file) {
  return new HybridError(`${folder.name}/${file}: not there`);
}

/**
 * @param {Folder} folder
 * @param {string} file
 * @returns {Promise<number>} its bytes
 * @throws {HybridError} if it is not there
 */
export async function sizeOf(folder, file) {
  const size = await folder.size(file);
  if (size === null) throw notThere(folder, file);
  return size;
}

/**
 * The range of a read, made whole.
 *
 * @param {{name: string}} folder
 * @param {string} file
 * @param {number} size of the file
 * @param {number} [begin]
 * @param {number} [end]
 * @returns {[begin: number, end: number]}
 * @throws {HybridError} for bytes that the file does not have
 */
export function checkRange(folder, file, size, begin = 0, end = size) {
  if (0 <= begin && begin <= end && end <= size) return [begin, end];
  throw new HybridError(`${folder.name}/${file}: bytes ${begin} to ${end} of ${size} do not exist`);
}

/**
 * A whole file.
 *
 * @param {Folder} folder
 * @param {string} file
 * @param {number} most bytes that it may have
 * @throws {LimitExceeded} before anything is read, if it has more
 * @throws {HybridError} if it is not there
 */
export async function readAll(folder, file, most) {
  const size = await sizeOf(folder, file);
  if (size > most) throw new LimitExceeded(`${folder.name}/${file}: ${size} bytes; at most ${most} are read`);
  return folder.read(file, 0, size);
}

/**
 * A whole file in pieces.
 *
 * @param {Folder} folder
 * @param {string} file
 * @param {number} [size] of the file, if it is known
 * @returns {AsyncGenerator<Uint8Array<ArrayBuffer>, void, void>}
 */
export async function* readPieces(folder, file, size) {
  const end = size ?? (await sizeOf(folder, file));
  for (let at = 0; at < end; at += PIECE_BYTES) yield await folder.read(file, at, Math.min(end, at + PIECE_BYTES));
}

/**
 * Write a whole file that is in memory.
 *
 * @param {WritableFolder} folder
 * @param {string} file
 * @param {Uint8Array | string} content text is UTF-8
 */
export async function writeAll(folder, file, content) {
  await writePieces(folder, file, [typeof content === "string" ? new TextEncoder().encode(content) : content]);
}

/**
 * Write a whole file that comes in pieces. Nothing of it is left when that fails.
 *
 * @param {WritableFolder} folder
 * @param {string} file
 * @param {Iterable<Uint8Array> | AsyncIterable<Uint8Array>} pieces
 */
export async function writePieces(folder, file, pieces) {
  const sink = await folder.create(file);
  try {
    for await (const piece of pieces) await sink.write(piece);
    await sink.close();
  } catch (error) {
    await sink.abort().catch(() => {});
    throw error;
  }
}
