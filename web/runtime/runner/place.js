/**
 * @file Where a run lies: its checkpoints, its rows, its record, and who watches it.
 *
 * `place_folder.js` keeps a run in a folder (the browser's private file system, say), `place_launch.js` hands everything
 * to the program that opened the page. May import: nothing.
 */

/** @import { Folder } from "../folders/folder.js" */
/** @import { Snapshot } from "../checkpoint/snapshot.js" */
/** @import { CheckpointRef } from "./job.js" */

/** @typedef {Record<string, unknown>} Facts */

/**
 * @typedef {object} Checkpoints
 * @property {() => Promise<CheckpointRef | null>} latest the newest one; CheckpointCorrupt for a damaged newer one
 * @property {(name: string) => Promise<Folder>} open CheckpointNotFound if it is not there
 * @property {(manifest: {checkpointHash: string}) => void} continueFrom the next save descends from this checkpoint
 * @property {(snapshot: Snapshot) => Promise<CheckpointRef>} save
 * @property {() => Promise<unknown>} clean remove what an interrupted save left behind
 */

/**
 * Rows that have a `step`, in step order.
 *
 * @typedef {object} Rows
 * @property {(row: Facts) => Promise<void>} append
 * @property {(step: number) => Promise<number>} cut move the rows after `step` away; how many there were
 * @property {() => Promise<number>} last the step of the newest row; 0 without any
 */

/**
 * location: what messages call the run's folder. again: how a stopped run is started again, for messages. facts: the
 * record as an earlier process left it, or null.
 *
 * @typedef {object} RunPlace
 * @property {string} location
 * @property {string} again
 * @property {Facts | null} facts
 * @property {Checkpoints} checkpoints
 * @property {Rows} metrics
 * @property {Rows} validation
 * @property {(facts: Facts) => Promise<void>} record set members of the record (run.json)
 * @property {(kind: string, facts: Facts) => void} event tell whoever watches; docs/cli.md lists kinds and facts
 * @property {() => string | null} stop why a stop is wanted; null while it is not
 */

export {};
