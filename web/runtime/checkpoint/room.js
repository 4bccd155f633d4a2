/** @file Whether the browser has room for a checkpoint, and whether it will keep it. May import: errors. */

import { LimitExceeded } from "../errors.js";

/** @typedef {Pick<StorageManager, "estimate" | "persist" | "persisted">} Storage */

/**
 * Refuse a save that does not fit, before it begins. Nothing is refused where nothing is known; browsers that tell every
 * site the same large number refuse the writing itself.
 *
 * @param {number} bytes that will be written
 * @param {Storage | undefined} [storage]
 * @throws {LimitExceeded} naming what is needed, what is free, and what to do
 */
export async function requireRoom(bytes, storage = globalThis.navigator?.storage) {
  const { quota, usage = 0 } = (await storage?.estimate?.()) ?? {};
  if (quota === undefined || quota - usage >= bytes) return;
  throw new LimitExceeded(
    `the checkpoint needs ${bytes} bytes, but this browser has ${Math.max(0, quota - usage)} left of the ${quota} that ` +
      "it gives this site: export and delete older runs, keep fewer checkpoints (keepLast), or free disk space",
  );
}

/**
 * Ask the browser not to delete this site's files when disk space runs out.
 *
 * @param {Storage | undefined} [storage]
 * @returns {Promise<boolean>} whether it promises that
 */
export async function askForPersistence(storage = globalThis.navigator?.storage) {
  return (await storage?.persisted?.()) || (await storage?.persist?.()) || false;
}
