/**
 * @file A run that belongs to the program which opened the page: everything goes to its small server.
 *
 * What happens is queued and sent several times a second, with or without news: the server takes a long silence as the
 * end of the tab, and its answer may be a request to stop. Checkpoints are uploaded in pieces and verified there. May
 * import: errors, checkpoint, folders.
 */

import { MANIFEST_NAME } from "../checkpoint/manifest.js";
import { writeCheckpoint } from "../checkpoint/snapshot.js";
import { stepFolderName } from "../checkpoint/store.js";
import { CheckpointNotFound } from "../errors.js";
import { PIECE_BYTES } from "../folders/folder.js";
import { refusal } from "./launch_server.js";

/** @import { Snapshot } from "../checkpoint/snapshot.js" */
/** @import { FileSink, WritableFolder } from "../folders/folder.js" */
/** @import { CheckpointRef, Job } from "./job.js" */
/** @import { LaunchServer } from "./launch_server.js" */
/** @import { Checkpoints, Facts, Rows, RunPlace } from "./place.js" */

const BEAT_MS = 200;
const MOST_EVENTS = 500; // of one message
const MOST_QUEUED = 2000; // then whoever appends waits
const CONFLICT = 409;

/** @implements {RunPlace} */
export class LaunchRunPlace {
  #server;
  #now;
  /** @type {Facts[]} */
  #queue = [];
  #sequence = 0;
  /** @type {Promise<void>} the last message */
  #sending = Promise.resolve();
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #timer;
  #ended = false; // nothing may follow the end of a run
  /** @type {string | null} */
  #stop = null;
  /** @type {unknown} why the server cannot be reached any more */
  #failure = null;

  /** @type {CheckpointRef | null} */
  #latest;
  /** @type {string | null} what the next save descends from */
  #parent = null;
  #lastSequence;

  /**
   * @param {LaunchServer} server
   * @param {Job} job
   * @param {{now?: () => number}} [options] milliseconds since 1970
   */
  constructor(server, job, { now = Date.now } = {}) {
    this.#server = server;
    this.#now = now;
    this.#latest = job.resume;
    this.#lastSequence = job.lastSequence;
    this.location = job.runDir ?? "the run folder";
    this.again = `start it again with --run-dir ${this.location}`;
    /** The program has seen to it that something is left to do. @type {Facts} */
    this.facts = { status: "running" };
    /** @type {Rows} */
    this.metrics = this.#rows("metrics", 0);
    /** @type {Rows} */
    this.validation = this.#rows("validation", job.lastValidation ?? 0);
    /** @type {Checkpoints} */
    this.checkpoints = {
      latest: async () => this.#latest,
      open: async (name) => {
        if (name !== this.#latest?.name) {
          throw new CheckpointNotFound(`${this.location}: there is no checkpoint ${name} to go on from`);
        }
        return server.folder(`checkpoints/${name}/`, `${this.location}: ${name}`);
      },
      continueFrom: (manifest) => {
        this.#parent = manifest.checkpointHash;
      },
      save: (snapshot) => this.#save(snapshot),
      clean: async () => {},
    };
    this.#beat();
  }

  /** @param {string} kind @param {Facts} facts */
  event(kind, facts) {
    if (kind === "validation") this.#add({ kind, row: facts });
    else if (kind === "end") {
      const { runDir: _, ...rest } = facts;
      this.#add({ kind, ...rest });
    } else if (kind === "error") {
      const { error: name, ...rest } = facts;
      this.#add({ kind, name, ...rest });
    } else this.#add({ kind, ...facts });
    this.#ended ||= kind === "end" || kind === "error";
  }

  /** @param {Facts} facts */
  async record(facts) {
    this.#add({ kind: "record", facts });
  }

  /** Also throws what keeps the server from being reached. */
  stop() {
    if (this.#failure) throw this.#failure;
    return this.#stop;
  }

  /** Resolves when the server has everything that happened so far. */
  async flush() {
    do await this.#send();
    while (this.#queue.length);
  }

  /** Send what is left, and fall silent. */
  async close() {
    this.#ended = true;
    clearTimeout(this.#timer);
    await this.#sending;
    if (this.#queue.length) await this.flush();
  }

  /** @param {Facts} event */
  #add(event) {
    if (!this.#ended) this.#queue.push(event);
  }

  #beat() {
    const next = () => {
      if (!this.#ended) this.#timer = setTimeout(() => this.#beat(), BEAT_MS);
    };
    this.#send().then(next, () => {}); // the failure is kept, and meets whoever asks next
  }

  /** One message after the other; the server ignores one that it has seen. */
  #send() {
    const sent = this.#sending.then(async () => {
      if (this.#failure) throw this.#failure;
      if (this.#ended && !this.#queue.length) return;
      const events = this.#queue.splice(0, MOST_EVENTS);
      try {
        const { stop } = await this.#server.post("events", { sequence: ++this.#sequence, events });
        if (typeof stop === "string") this.#stop ??= stop;
      } catch (error) {
        this.#failure = error;
        throw error;
      }
    });
    this.#sending = sent.catch(() => {});
    return sent;
  }

  /**
   * @param {"metrics" | "validation"} file
   * @param {number} last the step of the newest row there
   * @returns {Rows}
   */
  #rows(file, last) {
    const steps = [last]; // and those of this process; of the metrics, nobody asks
    return {
      append: async (row) => {
        // A validation row is an event of its own, which carries it to the file as well.
        if (file === "metrics") this.#add({ kind: "entry", row });
        else steps.push(Number(row.step));
        if (this.#failure) throw this.#failure;
        if (this.#queue.length > MOST_QUEUED) await this.flush();
      },
      cut: async (step) => {
        this.#add({ kind: "cut", step, file });
        while (steps.length > 1 && steps[steps.length - 1] > step) steps.pop();
        return 0; // the server knows how many there were, and says so
      },
      last: async () => steps[steps.length - 1],
    };
  }

  /** @param {Snapshot} snapshot @returns {Promise<CheckpointRef>} */
  async #save(snapshot) {
    await this.flush(); // a checkpoint never knows of a step that the metrics do not have
    const { step } = snapshot.progress;
    const name = stepFolderName(step);
    const { checkpointHash, lineage } = await writeCheckpoint(this.#upload(name), snapshot, {
      sequence: this.#lastSequence + 1,
      previousCheckpointHash: this.#parent,
      now: this.#now,
    });
    this.#lastSequence = lineage.sequence;
    this.#parent = checkpointHash;
    this.#latest = { name, step, sequence: lineage.sequence, checkpointHash };
    return this.#latest;
  }

  /**
   * A folder at the server that can be written only. Its manifest makes a checkpoint of it, once everything is verified.
   *
   * @param {string} name
   * @returns {WritableFolder}
   */
  #upload(name) {
    const upload = {
      name: `${this.location}/checkpoints/${name}`,
      create: async (/** @type {string} */ file) =>
        file === MANIFEST_NAME ? this.#commit(name) : this.#sink(`checkpoints/${name}/${file}`),
    };
    return /** @type {WritableFolder} */ (/** @type {unknown} */ (upload));
  }

  /** @param {string} path @returns {FileSink} */
  #sink(path) {
    let size = 0;
    /** @param {Uint8Array} piece */
    const put = async (piece) => {
      const body = /** @type {Uint8Array<ArrayBuffer>} */ (piece);
      const response = await this.#server.ask(`${path}?offset=${size}`, { method: "PUT", body });
      // The answer to a piece may be lost; sent again, the piece is there already.
      const there = response.status === CONFLICT && (await response.clone().json()).size === size + piece.length;
      if (!response.ok && !there) throw await refusal(response, path);
      size += piece.length;
    };
    return {
      write: async (bytes) => {
        for (let at = 0; at < bytes.length; at += PIECE_BYTES) await put(bytes.subarray(at, at + PIECE_BYTES));
      },
      flush: async () => {},
      close: async () => {
        if (!size) await put(new Uint8Array(0));
      },
      abort: async () => {},
    };
  }

  /** @param {string} name @returns {FileSink} */
  #commit(name) {
    /** @type {BlobPart[]} */
    const pieces = [];
    return {
      write: async (bytes) => void pieces.push(bytes.slice()),
      flush: async () => {},
      close: async () => {
        const headers = { "Content-Type": "application/json" };
        await this.#server.request(`checkpoints/${name}/commit`, { method: "POST", body: new Blob(pieces), headers });
      },
      abort: async () => {},
    };
  }
}
