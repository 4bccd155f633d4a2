/**
 * @file Saving and keeping checkpoints of one run, where folders cannot be renamed.
 *
 * A save makes an empty file `unfinished` in the step's folder, writes everything, the manifest last, and removes it
 * again. A folder with that mark, or without a manifest, is no checkpoint, so the newest finished one is whole at every
 * moment. Deleting begins with the manifest. A step whose folder is taken by another state gets a folder with one more
 * zero in front of the step, and is deleted only when that one is whole. May import: errors, contracts, folders.
 */

import { repr } from "../contracts/names.js";
import { CheckpointCorrupt, CheckpointNotFound, ConfigError, HybridError } from "../errors.js";
import { readPieces, writeAll, writePieces } from "../folders/folder.js";
import { readManifest, verifyCheckpoint } from "./loading.js";
import { MANIFEST_NAME } from "./manifest.js";
import { checkSnapshot, snapshotBytes, snapshotHash, writeCheckpoint } from "./snapshot.js";

/** @import { Directory, Folder, WritableFolder } from "../folders/folder.js" */
/** @import { Manifest } from "./manifest.js" */
/** @import { Snapshot } from "./snapshot.js" */

/**
 * A checkpoint whose manifest was read. sequence: its place in the run's history (the newest has the largest).
 *
 * @typedef {object} CheckpointRef
 * @property {string} name of its folder
 * @property {number} step
 * @property {number} sequence
 * @property {string} checkpointHash
 * @property {string} stateHash
 * @property {number} unixMs
 * @property {number} size bytes of the listed files
 */

/**
 * One step folder. `ref` if it is complete, `detail` why it is not.
 *
 * @typedef {object} CheckpointStatus
 * @property {string} name
 * @property {number} step
 * @property {"complete" | "unfinished" | "damaged" | "set aside"} status
 * @property {string} detail
 * @property {CheckpointRef | null} ref
 */

/**
 * keepLast: how many of the newest to keep (null: all). keepEvery: also keep steps divisible by it.
 * keepHours: also keep the first one, and each that is so many hours younger than the one kept before it. now: Unix time in
 * milliseconds. room: called with the bytes that a save is about to take; throws when they are not there.
 *
 * @typedef {object} StoreOptions
 * @property {number | null} [keepLast]
 * @property {number | null} [keepEvery]
 * @property {number | null} [keepHours]
 * @property {() => number} [now]
 * @property {(bytes: number) => Promise<void>} [room]
 */

export const UNFINISHED = "unfinished"; // the mark of a save under way
export const DAMAGED = "damaged"; // the mark of a checkpoint that could not be read when its step was saved again
const STEP = /^step-([0-9]{8,15})$/;
const WIDEST = 15; // digits of a step folder's name

/** @param {number} step @param {number} [digits] at least */
export function stepFolderName(step, digits = 8) {
  return `step-${String(step).padStart(digits, "0")}`;
}

/** The checkpoints in one directory, such as `checkpoints` of a run folder. One saves; any number may read. */
export class CheckpointStore {
  #directory;
  #keepLast;
  #keepEvery;
  #keepHours;
  #now;
  #room;
  /** @type {string | null | undefined} checkpointHash of what the next save was trained from; undefined: not known */
  #parent;
  /** @type {number | null} of the last save of this object */
  #sequence = null;
  /** @type {Map<string, string>} saved by this object: folder name to state hash */
  #written = new Map();

  /**
   * @param {Directory} directory
   * @param {StoreOptions} [options]
   * @throws {ConfigError} for settings below 1
   */
  constructor(directory, { keepLast = null, keepEvery = null, keepHours = null, now = Date.now, room } = {}) {
    for (const [name, value] of Object.entries({ keepLast, keepEvery })) {
      if (value !== null && !(value >= 1)) {
        throw new ConfigError(`checkpoint.${name} is ${value}: expected at least 1, or none`);
      }
    }
    if (keepHours !== null && !(keepHours > 0)) {
      throw new ConfigError(`checkpoint.keepHours is ${keepHours}: expected a number above 0, or none`);
    }
    this.#directory = directory;
    this.#keepLast = keepLast;
    this.#keepEvery = keepEvery;
    this.#keepHours = keepHours;
    this.#now = now;
    this.#room = room;
  }

  // Reading

  /**
   * Every step folder: unfinished and damaged ones first, then the complete ones by sequence, newest last.
   *
   * @returns {Promise<CheckpointStatus[]>}
   */
  async list() {
    /** @type {CheckpointStatus[]} */
    const statuses = [];
    for (const name of await this.#directory.folders()) {
      const match = STEP.exec(name);
      if (match) statuses.push(await this.#status(name, Number(match[1])));
    }
    /** @param {CheckpointStatus} status */
    const order = ({ ref, step }) => (ref ? [ref.sequence, ref.step] : [0, step]);
    return statuses.sort((a, b) => order(a)[0] - order(b)[0] || order(a)[1] - order(b)[1]);
  }

  /**
   * The newest complete checkpoint; null if there is none of any kind. Newest means latest in the history of the run (its
   * sequence), not the largest step.
   *
   * @returns {Promise<CheckpointRef | null>}
   * @throws {CheckpointCorrupt} naming a damaged one that may be newer
   */
  async latest() {
    const statuses = await this.list();
    const best = statuses.at(-1)?.ref ?? null;
    for (const { status, step, name, detail } of statuses) {
      if (status === "damaged" && (best === null || step > best.step)) {
        const where = this.#directory.name;
        const instead = best ? `resume from ${where}/${best.name} by name` : "start a new run";
        throw new CheckpointCorrupt(
          `${detail} (a checkpoint is there but cannot be used; restore it, or move ${where}/${name} away, or ${instead})`,
        );
      }
    }
    return best;
  }

  /**
   * The folder of a checkpoint, for `loadCheckpoint` and its like.
   *
   * @param {CheckpointRef | string} ref or its name
   * @returns {Promise<Folder>}
   * @throws {CheckpointNotFound}
   * @throws {CheckpointCorrupt} when its manifest is not what it should be
   */
  async open(ref) {
    const name = typeof ref === "string" ? ref : ref.name;
    const folder = await this.#directory.open(name);
    if (!folder) throw new CheckpointNotFound(`${this.#directory.name}/${name}: there is no such folder`);
    await readRef(folder, name);
    return folder;
  }

  // Saving

  /**
   * The next save descends from this checkpoint, which need not be the newest, nor lie here.
   *
   * @param {{checkpointHash: string}} manifest
   */
  continueFrom({ checkpointHash }) {
    this.#parent = checkpointHash;
  }

  /**
   * Save. The same state at the same step is not saved twice.
   *
   * @param {Snapshot} snapshot
   * @returns {Promise<CheckpointRef>}
   * @throws {HybridError} when the snapshot is wrong or the storage refuses; what was saved before is untouched
   */
  async save(snapshot) {
    checkSnapshot(snapshot);
    const { step } = snapshot.progress;
    const statuses = await this.list();
    const same = statuses.filter((status) => status.step === step);
    const held = await this.#holding(same, snapshot, newestSequence(statuses));
    if (held) {
      await this.#pruneAfterSave(held);
      return held;
    }
    await this.#room?.(snapshotBytes(snapshot));
    const refs = complete(statuses);
    const parent = this.#parent !== undefined ? this.#parent : (refs.at(-1)?.checkpointHash ?? null);
    const sequence = Math.max(this.#sequence ?? 0, newestSequence(statuses)) + 1;
    const ref = await this.#fill(step, same, (folder) =>
      writeCheckpoint(folder, snapshot, { sequence, previousCheckpointHash: parent, now: this.#now }),
    );
    this.#parent = ref.checkpointHash;
    this.#sequence = sequence;
    this.#written.set(ref.name, ref.stateHash);
    await this.#pruneAfterSave(ref, complete(same));
    return ref;
  }

  /**
   * Take in a checkpoint from elsewhere, as it is; every byte is verified on the way.
   *
   * @param {Folder} source
   * @param {{progress?: (done: number, total: number) => void, signal?: AbortSignal}} [options]
   * @returns {Promise<CheckpointRef>}
   * @throws {CheckpointCorrupt}
   * @throws {HybridError} when the run here is further than the checkpoint
   */
  async adopt(source, options = {}) {
    const manifest = await readManifest(source);
    const statuses = await this.list();
    const refs = complete(statuses);
    const known = refs.find((ref) => ref.checkpointHash === manifest.checkpointHash);
    if (known) return known;
    const newest = refs.at(-1);
    if (newest && newest.sequence >= manifest.lineage.sequence) {
      throw new HybridError(
        `${this.#directory.name}: its checkpoint ${newest.sequence} is not older than ${source.name}, which is number ` +
          `${manifest.lineage.sequence} of its run: import that as a run of its own`,
      );
    }
    const files = [...Object.keys(manifest.files), MANIFEST_NAME];
    await this.#room?.(Object.values(manifest.files).reduce((sum, { size }) => sum + size, 1 << 20));
    const { step } = manifest.progress;
    const same = statuses.filter((status) => status.step === step);
    return this.#fill(step, same, async (folder) => {
      for (const file of files) await writePieces(folder, file, readPieces(source, file));
      return (await verifyCheckpoint(folder, options)).manifest;
    });
  }

  /**
   * Remove what an interrupted save or deletion left behind: unfinished folders, and states that another of the same step
   * has replaced. For the one who trains here, at its start.
   *
   * @returns {Promise<string[]>} the names of the folders that were removed
   */
  async clean() {
    const statuses = await this.list();
    /** @param {CheckpointStatus} status @param {number} index */
    const left = ({ status, step }, index) =>
      status === "unfinished" || complete(statuses.slice(index + 1)).some((later) => later.step === step);
    const leftovers = statuses.filter(
      (status, at) => (status.ref || status.status === "unfinished") && left(status, at),
    );
    const names = leftovers.map(({ name }) => name);
    for (const name of names) await this.#discard(name);
    return names;
  }

  /**
   * Delete what retention does not keep; damaged and unfinished folders stay for someone to look at.
   *
   * @param {CheckpointRef | null} [trusted] a checkpoint known to be good. Without one, checkpoints are read from the
   *   newest on until one proves good, and none of those is deleted: the only good one is never lost
   * @returns {Promise<string[]>} the names of what was removed
   */
  async prune(trusted = null) {
    if (this.#keepLast === null) return [];
    const refs = complete(await this.list());
    const every = this.#keepEvery;
    const kept = new Set(refs.slice(-this.#keepLast).map(({ name }) => name));
    for (const { name, step } of refs) if (every !== null && step % every === 0) kept.add(name);
    let after = this.#keepHours === null ? Number.POSITIVE_INFINITY : Number.NEGATIVE_INFINITY;
    for (const { name, unixMs } of refs) {
      if (unixMs < after) continue;
      kept.add(name);
      after = unixMs + Number(this.#keepHours) * 3_600_000;
    }
    if (!trusted || !kept.has(trusted.name)) {
      for (const { name } of refs.toReversed()) {
        kept.add(name);
        if (await this.#proves(name)) break;
      }
    }
    const removed = refs.map(({ name }) => name).filter((name) => !kept.has(name));
    for (const name of removed) await this.#discard(name);
    return removed;
  }

  // How

  /** @param {string} name @param {number} step @returns {Promise<CheckpointStatus>} */
  async #status(name, step) {
    /** @param {CheckpointStatus["status"]} status @param {string} detail @param {CheckpointRef | null} [ref] */
    const found = (status, detail, ref = null) => ({ name, step, status, detail, ref });
    const folder = await this.#directory.open(name);
    if (!folder || (await folder.size(UNFINISHED)) !== null) {
      return found("unfinished", "a save or deletion in progress, or interrupted");
    }
    if ((await folder.size(DAMAGED)) !== null) {
      return found("set aside", "could not be read when its step was saved again");
    }
    try {
      return found("complete", "", await readRef(folder, name));
    } catch (error) {
      if (error instanceof CheckpointNotFound) {
        return found("unfinished", `no ${MANIFEST_NAME}: its save never finished`);
      }
      if (error instanceof CheckpointCorrupt) return found("damaged", error.message);
      throw error;
    }
  }

  /**
   * The checkpoint among those of the step that already is a good one of this very state. A damaged one is set aside,
   * never overwritten.
   *
   * @param {readonly CheckpointStatus[]} same
   * @param {Snapshot} snapshot
   * @param {number} newest sequence of all; an older checkpoint of this state, gone back to, is not the newest
   */
  async #holding(same, snapshot, newest) {
    const candidates = same.filter(({ ref }) => ref && ref.sequence >= newest);
    if (!candidates.length) return null;
    const hash = await snapshotHash(snapshot);
    for (const status of candidates) {
      const { ref, name } = status;
      if (ref?.stateHash !== hash) continue;
      if (this.#written.get(name) === hash || (await this.#proves(name))) return ref;
      await writeAll(await this.#directory.directory(name), DAMAGED, "");
      status.status = "set aside";
      status.ref = null;
    }
    return null;
  }

  /**
   * Fill a free folder of the step. Unfinished ones make way; complete and damaged ones stay until the new one is whole.
   *
   * @param {number} step
   * @param {readonly CheckpointStatus[]} same the folders of the step
   * @param {(folder: WritableFolder) => Promise<Manifest>} fill
   * @returns {Promise<CheckpointRef>}
   */
  async #fill(step, same, fill) {
    const taken = new Set(same.filter(({ status }) => status !== "unfinished").map(({ name }) => name));
    let name = stepFolderName(step);
    for (let digits = 9; taken.has(name); digits++) {
      if (digits > WIDEST) {
        throw new HybridError(`${this.#directory.name}: no name is free for step ${step}: move damaged folders away`);
      }
      name = stepFolderName(step, digits);
    }
    const where = `${this.#directory.name}/${name}`;
    try {
      await this.#discard(name);
      const folder = await this.#directory.directory(name);
      await writeAll(folder, UNFINISHED, "");
      const manifest = await fill(folder);
      await folder.remove(UNFINISHED);
      return refOf(name, manifest);
    } catch (error) {
      await this.#discard(name).catch(() => {});
      const passed = error instanceof CheckpointCorrupt || !(error instanceof Error) || error.name === "AbortError";
      if (passed) throw error;
      const Kind = /** @type {typeof HybridError} */ (error instanceof HybridError ? error.constructor : HybridError);
      throw new Kind(`${where}: could not be saved: ${error.message}; earlier checkpoints are untouched`, {
        cause: error,
      });
    }
  }

  /** Delete a folder so that a reader never takes half of it for a checkpoint. @param {string} name */
  async #discard(name) {
    const folder = await this.#directory.open(name);
    if (!folder) return;
    this.#written.delete(name);
    await folder.remove(MANIFEST_NAME);
    await this.#directory.remove(name);
  }

  /** @param {string} name @returns {Promise<boolean>} whether every byte of it is right */
  async #proves(name) {
    try {
      await verifyCheckpoint(await this.open(name));
      return true;
    } catch (error) {
      if (error instanceof CheckpointCorrupt || error instanceof CheckpointNotFound) return false;
      throw error;
    }
  }

  /** @param {CheckpointRef} ref @param {readonly CheckpointRef[]} [replaced] older states of its step */
  async #pruneAfterSave(ref, replaced = []) {
    try {
      for (const { name } of replaced) await this.#discard(name);
      await this.prune(ref);
    } catch (error) {
      const where = `${this.#directory.name}/${ref.name}`;
      const { message } = /** @type {Error} */ (error);
      throw new HybridError(`${where} is saved, but older checkpoints could not be removed: ${message}`, {
        cause: error,
      });
    }
  }
}

/** @param {readonly CheckpointStatus[]} statuses @returns {CheckpointRef[]} */
function complete(statuses) {
  return statuses.flatMap(({ ref }) => ref ?? []);
}

/** @param {readonly CheckpointStatus[]} statuses */
function newestSequence(statuses) {
  return Math.max(0, ...complete(statuses).map(({ sequence }) => sequence));
}

/**
 * The checkpoint in a folder.
 *
 * @param {Folder} folder
 * @param {string} name of the folder; one like `step-00000500` must hold that step
 * @returns {Promise<CheckpointRef>}
 */
async function readRef(folder, name) {
  const manifest = await readManifest(folder);
  const match = STEP.exec(name);
  if (match && Number(match[1]) !== manifest.progress.step) {
    throw new CheckpointCorrupt(
      `${folder.name}/${MANIFEST_NAME}: progress.step is ${manifest.progress.step}, but the folder says ` +
        `${Number(match[1])}`,
    );
  }
  return refOf(name, manifest);
}

/** @param {string} name @param {Manifest} manifest @returns {CheckpointRef} */
function refOf(name, { progress, lineage, checkpointHash, stateHash, timestamp, files }) {
  const size = Object.values(files).reduce((sum, file) => sum + file.size, 0);
  const { step } = progress;
  return { name, step, sequence: lineage.sequence, checkpointHash, stateHash, unixMs: timestamp.unixMs, size };
}

/**
 * Hold a run's lock while `work` is done, so that no second tab trains in it. Where there are no locks (Node) it is just
 * done.
 *
 * @template T
 * @param {string} name of the run
 * @param {() => Promise<T>} work
 * @param {Pick<LockManager, "request"> | undefined} [locks]
 * @returns {Promise<T>}
 * @throws {ConfigError} if another tab or worker holds it
 */
export async function withRunLock(name, work, locks = globalThis.navigator?.locks) {
  if (!locks) return work();
  return locks.request(`hybrid/run/${name}`, { ifAvailable: true }, (lock) => {
    if (lock) return work();
    throw new ConfigError(`run ${repr(name)}: another tab is training it; close that tab, or choose another name`);
  });
}

/**
 * Take a run's lock; what gives it back. Otherwise as `withRunLock`.
 *
 * @param {string} name
 * @returns {Promise<() => void>}
 */
export function holdRunLock(name) {
  return new Promise((taken, refused) => {
    withRunLock(name, () => new Promise((release) => taken(() => release(undefined)))).catch(refused);
  });
}
