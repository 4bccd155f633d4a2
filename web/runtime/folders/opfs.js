/**
 * @file Folders of the browser's private file system (OPFS), which belongs to this origin and is not seen by the user.
 *
 * In a worker files are written in place through synchronous handles; a page has only `createWritable`, which shows what
 * it wrote once it is flushed. May import: errors.
 */

import { HybridError, LimitExceeded } from "../errors.js";
import { checkName, checkRange, nameProblem, notThere } from "./folder.js";

/** @import { Directory, FileSink } from "./folder.js" */

const NOWHERE =
  "this browser has no private file system here: use a secure context (https or localhost) and no private window";

/**
 * Of `FileSystemFileHandle`, in dedicated workers only.
 *
 * @typedef {object} SyncHandle
 * @property {(bytes: Uint8Array, options: {at: number}) => number} write
 * @property {(size: number) => void} truncate
 * @property {() => number} getSize
 * @property {() => void} flush
 * @property {() => void} close
 */

/** @typedef {FileSystemFileHandle & {createSyncAccessHandle?: () => Promise<SyncHandle>}} FileHandle */

/**
 * A folder of the private file system, made if it is not there.
 *
 * @param {readonly string[]} path from the root
 * @param {Pick<StorageManager, "getDirectory"> | undefined} [storage]
 * @returns {Promise<OpfsDirectory>}
 * @throws {HybridError} where there is no such file system
 */
export async function openOpfs(path, storage = globalThis.navigator?.storage) {
  if (!storage?.getDirectory) {
    throw new HybridError(NOWHERE);
  }
  const root = await storage.getDirectory().catch((error) => {
    if (error?.name === "SecurityError") throw new HybridError(NOWHERE, { cause: error }); // in private windows, say
    throw translated("opfs", error);
  });
  /** @type {OpfsDirectory} */
  let folder = new OpfsDirectory(root, "opfs");
  for (const name of path) folder = await folder.directory(name);
  return folder;
}

/** @implements {Directory} */
export class OpfsDirectory {
  #handle;

  /** @param {FileSystemDirectoryHandle} handle @param {string} name for messages */
  constructor(handle, name) {
    this.#handle = handle;
    this.name = name;
    this.isStored = true;
  }

  list() {
    return this.#names("file");
  }

  folders() {
    return this.#names("directory");
  }

  /** @param {string} file */
  async size(file) {
    return (await this.#file(file))?.size ?? null;
  }

  /** @param {string} file @param {number} [begin] @param {number} [end] */
  async read(file, begin, end) {
    const found = await this.#file(file);
    if (!found) throw notThere(this, file);
    const blob = found.slice(...checkRange(this, file, found.size, begin, end));
    return new Uint8Array(await attempt(`${this.name}/${file}`, () => blob.arrayBuffer()));
  }

  /** @param {string} file */
  create(file) {
    return this.append(file, 0);
  }

  /** @param {string} file @param {number} [at] @returns {Promise<FileSink>} */
  async append(file, at) {
    checkName(this, file);
    const where = `${this.name}/${file}`;
    const [, start] = checkRange(this, file, at === 0 ? 0 : ((await this.size(file)) ?? 0), 0, at);
    /** @type {FileHandle} */
    const handle = await attempt(where, () => this.#handle.getFileHandle(file, { create: true }));
    const open = handle.createSyncAccessHandle ? openInWorker : openOnPage;
    const writer = await attempt(where, () => open(handle, start));
    return {
      write: (bytes) => attempt(where, () => writer.write(bytes)),
      flush: () => attempt(where, () => writer.flush()),
      close: () => attempt(where, () => writer.close()),
      abort: async () => {
        await attempt(where, () => writer.abort());
        if (!start) await this.remove(file);
      },
    };
  }

  /** @param {string} name */
  async remove(name) {
    if (nameProblem(name)) return;
    await found(`${this.name}/${name}`, () => this.#handle.removeEntry(name, { recursive: true }));
  }

  /** @param {string} name @returns {Promise<OpfsDirectory | null>} */
  async open(name) {
    if (nameProblem(name)) return null;
    const path = `${this.name}/${name}`;
    const handle = await found(path, () => this.#handle.getDirectoryHandle(name));
    return handle && new OpfsDirectory(handle, path);
  }

  /** @param {string} name @returns {Promise<OpfsDirectory>} */
  async directory(name) {
    const path = `${this.name}/${checkName(this, name)}`;
    return new OpfsDirectory(await attempt(path, () => this.#handle.getDirectoryHandle(name, { create: true })), path);
  }

  /** @param {"file" | "directory"} kind @returns {Promise<string[]>} */
  #names(kind) {
    return attempt(this.name, async () => {
      const names = [];
      for await (const [name, handle] of this.#handle.entries()) if (handle.kind === kind) names.push(name);
      return names.sort();
    });
  }

  /** @param {string} file @returns {Promise<File | null>} */
  async #file(file) {
    if (nameProblem(file)) return null;
    return found(`${this.name}/${file}`, async () => (await this.#handle.getFileHandle(file)).getFile());
  }
}

/**
 * @typedef {object} Writer
 * @property {(bytes: Uint8Array) => void | Promise<void>} write
 * @property {() => void | Promise<void>} flush
 * @property {() => void | Promise<void>} close
 * @property {() => void | Promise<void>} abort
 */

/** @param {FileHandle} file @param {number} start @returns {Promise<Writer>} */
async function openInWorker(file, start) {
  const handle = await /** @type {() => Promise<SyncHandle>} */ (file.createSyncAccessHandle).call(file);
  let at = start;
  try {
    handle.truncate(start);
  } catch (error) {
    handle.close();
    throw error;
  }
  return {
    write: (bytes) => {
      for (let rest = bytes; rest.length; ) {
        const written = handle.write(rest, { at });
        if (!written) throw new DOMException("no byte more was taken", "QuotaExceededError");
        at += written;
        rest = rest.subarray(written);
      }
    },
    flush: () => handle.flush(),
    close: () => {
      handle.flush();
      handle.close();
    },
    abort: () => {
      handle.truncate(Math.min(start, handle.getSize()));
      handle.close();
    },
  };
}

/** @param {FileHandle} file @param {number} start @returns {Promise<Writer>} */
async function openOnPage(file, start) {
  const open = () => file.createWritable({ keepExistingData: true });
  let stream = await open();
  let at = start;
  await stream.truncate(start);
  return {
    write: async (bytes) => {
      await stream.write({ type: "write", position: at, data: /** @type {Uint8Array<ArrayBuffer>} */ (bytes) });
      at += bytes.length;
    },
    flush: async () => {
      await stream.close();
      stream = await open();
    },
    close: () => stream.close(),
    abort: async () => {
      await stream.abort();
      stream = await open();
      await stream.truncate(start);
      await stream.close();
    },
  };
}

/**
 * @template T
 * @param {string} where
 * @param {() => T | Promise<T>} action
 * @returns {Promise<T | null>} null for what is not there, or is a folder instead of a file or the other way round
 */
async function found(where, action) {
  try {
    return await action();
  } catch (error) {
    const { name } = /** @type {Error} */ (error);
    if (name === "NotFoundError" || name === "TypeMismatchError") return null;
    throw translated(where, error);
  }
}

/**
 * @template T
 * @param {string} where
 * @param {() => T | Promise<T>} action
 * @returns {Promise<T>}
 */
async function attempt(where, action) {
  try {
    return await action();
  } catch (error) {
    throw translated(where, error);
  }
}

/** @param {string} where @param {unknown} error @returns {unknown} */
function translated(where, error) {
  if (!(error instanceof Error) || error instanceof HybridError) return error;
  if (error.name === "QuotaExceededError") {
    return new LimitExceeded(
      `${where}: the browser gives this site no more room: export and delete older runs, keep fewer checkpoints ` +
        "(keepLast), or free disk space",
      { cause: error },
    );
  }
  const busy = error.name === "NoModificationAllowedError" || error.name === "InvalidStateError";
  const reason = busy ? "in use by another tab or worker" : `${error.name}: ${error.message}`;
  return new HybridError(`${where}: ${reason}`, { cause: error });
}
