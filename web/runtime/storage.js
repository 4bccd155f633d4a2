/**
 * @file Small texts that outlive a run, such as which kernels are fastest here: in OPFS, or in memory.
 *
 * Losing them costs a second at the next start and nothing else, so nothing here throws. May import: nothing.
 */

/**
 * @typedef {object} Storage
 * @property {(name: string) => Promise<string | null>} read the text, or null
 * @property {(name: string, text: string) => Promise<void>} write
 */

/**
 * A storage that lasts as long as this object.
 *
 * @param {Record<string, string>} [initial]
 * @returns {Storage}
 */
export function memoryStorage(initial = {}) {
  const texts = new Map(Object.entries(initial));
  return {
    read: async (name) => texts.get(name) ?? null,
    write: async (name, text) => void texts.set(name, text),
  };
}

/**
 * A folder of the origin's private file system; in memory where there is none (Node, Deno, private windows).
 *
 * @param {string} folder
 * @returns {Promise<Storage>}
 */
export async function privateStorage(folder) {
  try {
    const root = await globalThis.navigator.storage.getDirectory();
    const directory = await root.getDirectoryHandle(folder, { create: true });
    return { read: (name) => readFile(directory, name), write: (name, text) => writeFile(directory, name, text) };
  } catch {
    return memoryStorage();
  }
}

/**
 * @param {FileSystemDirectoryHandle} directory
 * @param {string} name
 */
async function readFile(directory, name) {
  try {
    const file = await (await directory.getFileHandle(name)).getFile();
    return await file.text();
  } catch {
    return null;
  }
}

/**
 * @param {FileSystemDirectoryHandle} directory
 * @param {string} name
 * @param {string} text
 */
async function writeFile(directory, name, text) {
  try {
    const handle = await directory.getFileHandle(name, { create: true });
    const stream = await handle.createWritable();
    await stream.write(text);
    await stream.close();
  } catch {
    return;
  }
}
