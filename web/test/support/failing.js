/** @file Folders that fail, and folders that tell how much is read and written at once. */

import { HybridError } from "../../runtime/errors.js";

/** @import { Directory, FileSink, WritableFolder } from "../../runtime/folders/folder.js" */

/**
 * A directory whose operation number `at` (1 is the first) fails: it alone, or with all that follow, and "half-way" means
 * that it has had its effect, or half of it.
 *
 * @param {Directory} inner
 * @param {number} at
 * @param {"stops for good" | "fails once" | "stops half-way"} how
 * @param {() => Error} [error]
 * @returns {{directory: Directory, operations: () => number}}
 */
export function failing(inner, at, how, error = () => new HybridError("the power went off")) {
  let count = 0;
  /**
   * @template T
   * @param {() => Promise<T>} work
   * @param {() => Promise<unknown>} [half]
   * @returns {Promise<T>}
   */
  const operation = async (work, half = work) => {
    count++;
    if (count === at && how === "stops half-way") await half();
    if (count === at || (count > at && how !== "fails once")) throw error();
    return work();
  };
  /** @param {FileSink} sink @returns {FileSink} */
  const wrapSink = (sink) => ({
    write: (bytes) =>
      operation(
        () => sink.write(bytes),
        () => sink.write(bytes.subarray(0, bytes.length / 2)),
      ),
    flush: () => operation(() => sink.flush()),
    close: () => operation(() => sink.close()),
    abort: () => operation(() => sink.abort()),
  });
  /** @param {Directory} directory @returns {Directory} */
  const wrap = (directory) => ({
    name: directory.name,
    list: () => directory.list(),
    size: (file) => directory.size(file),
    read: (file, begin, end) => directory.read(file, begin, end),
    create: async (file) => wrapSink(await operation(() => directory.create(file))),
    append: async (file, start) => wrapSink(await operation(() => directory.append(file, start))),
    remove: (name) =>
      operation(
        () => directory.remove(name),
        // Half of a folder: whichever files the system took first.
        async () => {
          const folder = await directory.open(name);
          for (const file of (await folder?.list()) ?? []) if (file > "d") await folder?.remove(file);
        },
      ),
    folders: () => directory.folders(),
    open: async (name) => {
      const found = await directory.open(name);
      return found && wrap(found);
    },
    directory: async (name) => wrap(await operation(() => directory.directory(name))),
  });
  return { directory: wrap(inner), operations: () => count };
}

/**
 * @param {WritableFolder} inner
 * @returns {{folder: WritableFolder, bytesRead: () => number, largestRead: () => number,
 *   largestWrite: () => number}}
 */
export function tracing(inner) {
  let [total, read, written] = [0, 0, 0];
  /** @param {FileSink} sink @returns {FileSink} */
  const wrapSink = (sink) => ({
    ...sink,
    write: (bytes) => {
      written = Math.max(written, bytes.length);
      return sink.write(bytes);
    },
  });
  const folder = {
    name: inner.name,
    list: () => inner.list(),
    size: (/** @type {string} */ file) => inner.size(file),
    read: async (
      /** @type {string} */ file,
      /** @type {number} */ begin = 0,
      /** @type {number | undefined} */ end = undefined,
    ) => {
      const bytes = await inner.read(file, begin, end);
      total += bytes.length;
      read = Math.max(read, bytes.length);
      return bytes;
    },
    create: async (/** @type {string} */ file) => wrapSink(await inner.create(file)),
    append: async (/** @type {string} */ file, /** @type {number | undefined} */ at) =>
      wrapSink(await inner.append(file, at)),
    remove: (/** @type {string} */ name) => inner.remove(name),
  };
  return { folder, bytesRead: () => total, largestRead: () => read, largestWrite: () => written };
}
