/**
 * @file A run that lies in a folder: of the browser's private file system, say, or in memory.
 *
 *   run.json  metrics.jsonl  validation.jsonl  checkpoints/step-00000500/ ...
 *
 * May import: errors, contracts, checkpoint, folders.
 */

import { askForPersistence, requireRoom } from "../checkpoint/room.js";
import { CheckpointStore, holdRunLock } from "../checkpoint/store.js";
import { repr } from "../contracts/names.js";
import { isObject, isoTime } from "../contracts/values.js";
import { ConfigError } from "../errors.js";
import { readAll, writeAll } from "../folders/folder.js";
import { JsonLines } from "./json_lines.js";

/** @import { Directory } from "../folders/folder.js" */
/** @import { Settings } from "./job.js" */
/** @import { Facts, RunPlace } from "./place.js" */

const RUN_FILE = "run.json";
const NEXT_RUN_FILE = "run.next.json";
const FORMAT = "hybrid.run";
const VERSION = 1;
const MOST_BYTES = 64 * 1024 * 1024;
const NOTHING_SAID = () => null;

/**
 * watch: told of each event. stop: why a stop is wanted, or null. now: milliseconds since 1970. isLocked: the run's lock
 * (`withRunLock`) is held already.
 *
 * @typedef {object} FolderRunOptions
 * @property {(kind: string, facts: Facts) => void} [watch]
 * @property {() => string | null} [stop]
 * @property {() => number} [now]
 * @property {boolean} [isLocked]
 */

/**
 * Made by `open`, and released by `close`. A run in the browser's storage is locked meanwhile, so that no other tab trains
 * in it, and asks for room before each save.
 *
 * @implements {RunPlace}
 */
export class FolderRunPlace {
  #folder;
  #now;
  #unlock;

  /**
   * @param {Directory} folder
   * @param {Directory} checkpoints
   * @param {Facts | null} facts
   * @param {Settings} config
   * @param {FolderRunOptions} options
   * @param {() => void} unlock
   */
  constructor(folder, checkpoints, facts, config, options, unlock) {
    const { watch = NOTHING_SAID, stop = NOTHING_SAID, now = Date.now } = options;
    const { keepLast, keepEvery, keepHours } = config.checkpoint;
    this.#folder = folder;
    this.#now = now;
    this.#unlock = unlock;
    this.location = folder.name;
    this.again = "start it again to go on";
    this.facts = facts;
    this.checkpoints = new CheckpointStore(checkpoints, {
      keepLast: keepLast || null,
      keepEvery: keepEvery || null,
      keepHours: keepHours ?? null,
      now,
      room: folder.isStored ? requireRoom : undefined,
    });
    this.metrics = new JsonLines(folder, "metrics.jsonl", "metrics.discarded.jsonl");
    this.validation = new JsonLines(folder, "validation.jsonl", "validation.discarded.jsonl");
    this.event = watch;
    this.stop = stop;
  }

  /**
   * @param {Directory} folder of the run; an empty one begins a run
   * @param {Settings} config resolved
   * @param {FolderRunOptions} [options]
   * @returns {Promise<FolderRunPlace>}
   * @throws {ConfigError} when there is a run.json that cannot be read, or another tab trains in it
   */
  static async open(folder, config, options = {}) {
    let unlock = () => {};
    if (folder.isStored) {
      if (!options.isLocked) unlock = await holdRunLock(folder.name.split("/").at(-1) ?? folder.name);
      // Only a page can ask; the page of a worker does it there. Whatever is promised, the run goes on.
      askForPersistence().catch(() => {});
    }
    try {
      const checkpoints = await folder.directory("checkpoints");
      return new FolderRunPlace(folder, checkpoints, await readRunFile(folder), config, options, unlock);
    } catch (error) {
      unlock();
      throw error;
    }
  }

  /** @param {Facts} facts */
  async record(facts) {
    const createdAt = isoTime(this.#now());
    this.facts = { format: FORMAT, version: VERSION, createdAt, ...this.facts, ...facts };
    const text = `${JSON.stringify(this.facts, null, 2)}\n`;
    // Nothing can be renamed here: whoever is ended by force while one of the two is written leaves the other.
    await writeAll(this.#folder, NEXT_RUN_FILE, text);
    await writeAll(this.#folder, RUN_FILE, text);
  }

  /** Release the files and the lock. */
  async close() {
    try {
      await this.metrics.close();
      await this.validation.close();
    } finally {
      this.#unlock();
    }
  }
}

/**
 * @param {Directory} folder
 * @returns {Promise<Facts | null>} null if there is no record
 */
async function readRunFile(folder) {
  let found = null;
  for (const file of [RUN_FILE, NEXT_RUN_FILE]) {
    if ((await folder.size(file)) === null) continue;
    found = file;
    try {
      const facts = JSON.parse(new TextDecoder().decode(await readAll(folder, file, MOST_BYTES)));
      if (isObject(facts) && facts.format === FORMAT && facts.version === VERSION) return facts;
    } catch (error) {
      if (!(error instanceof SyntaxError)) throw error;
    }
  }
  if (found === null) return null;
  throw new ConfigError(
    `${folder.name}/${found}: expected an object with format ${repr(FORMAT)} and version ${VERSION}; restore it, or ` +
      "choose another folder",
  );
}
