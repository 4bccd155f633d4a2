/**
 * @file Python in the tab as the page sees it: a worker that is started when it is first wanted, and asked by messages.
 * Small, so that a page that never asks loads nothing more.
 */

import { errorNamed, HybridError, StopRequested } from "../runtime/errors.js";
import { writeAll } from "../runtime/folders/folder.js";
import { MemoryDirectory } from "../runtime/folders/memory.js";

/** @import { Folder } from "../runtime/folders/folder.js" */
/** @import { Report } from "./script_host.js" */
/** @import { Estimate, PlanRequest, Profile } from "./tab_python.js" */

// How long a script that was asked to stop may go on, before it is interrupted and before its worker is ended.
const INTERRUPT_AFTER_MS = 300;
const END_AFTER_MS = 3000;
const SIGNAL = 2;

/**
 * What the page hears while a script runs.
 *
 * @typedef {object} Listeners
 * @property {(lines: string[]) => void} [print] lines that it printed
 * @property {(values: Report) => void} [report]
 * @property {(what: string, done: number, total: number) => void} [progress]
 */

/** A script's error as the page has it: see ScriptError. @typedef {HybridError & {line?: number | null, kind?: string, traceback?: string}} FromScript */

/** An open question. @typedef {{resolve: (value: any) => void, reject: (error: Error) => void, listeners: Listeners}} Question */

export class PythonWorker {
  #worker;
  #interrupt;
  /** @type {Map<number, Question>} */
  #questions = new Map();
  #asked = 0;
  /** @type {number | null} the question that is a running script */
  #script = null;
  /** @type {string | null} why no more can be asked */
  #ended = null;
  /** @type {ReturnType<typeof setTimeout>[]} */
  #timers = [];

  /** Use `PythonWorker.open`. @param {Worker} worker */
  constructor(worker) {
    this.#worker = worker;
    this.#interrupt = globalThis.crossOriginIsolated ? new Int32Array(new SharedArrayBuffer(4)) : null;
    worker.addEventListener("message", ({ data }) => this.#hear(data));
    worker.addEventListener("error", (event) => {
      event.preventDefault();
      this.#end(new HybridError(`Python in the tab cannot go on: ${event.message || "its worker could not start"}`));
    });
  }

  /**
   * Starts the worker and loads Python into it: about 19 MB, the first time.
   *
   * @param {() => Worker} makeWorker a module worker of dist/pyodide/worker.js
   * @param {Pick<Listeners, "progress">} [listeners] of the loading
   * @returns {Promise<PythonWorker>}
   */
  static async open(makeWorker, listeners) {
    const python = new PythonWorker(makeWorker());
    try {
      await python.#ask("open", [python.#interrupt], listeners);
    } catch (error) {
      python.close();
      throw error;
    }
    return python;
  }

  /**
   * See TabPython.compilePlan.
   *
   * @param {PlanRequest} request
   * @param {Profile} profile
   * @returns {Promise<Folder>}
   */
  async compilePlan(request, profile) {
    const folder = new MemoryDirectory("the compiled plan");
    for (const [name, content] of await this.#ask("planFiles", [request, profile])) {
      await writeAll(folder, name, content);
    }
    return folder;
  }

  /** See TabPython.estimate. @param {PlanRequest} request @param {Profile} profile @returns {Promise<Estimate>} */
  estimate(request, profile) {
    return this.#ask("estimate", [request, profile]);
  }

  /**
   * Runs a script to its end.
   *
   * @param {string} source
   * @param {Listeners & {seconds?: number, texts?: Record<string, string>}} [options] seconds: it is stopped after as
   *   many. texts: files by name that it finds where it runs: open("corpus.txt")
   * @throws {HybridError} a ScriptError with `line` and `kind`, or StopRequested
   */
  async runScript(source, { seconds, texts = {}, ...listeners } = {}) {
    if (this.#script !== null) throw new HybridError("a script is running already: stop it first");
    if (seconds !== undefined) {
      const late = () => this.stop(`it did not end within ${seconds} s`);
      this.#timers.push(setTimeout(late, seconds * 1000));
    }
    const answer = this.#ask("runScript", [source, texts], listeners);
    this.#script = this.#asked;
    try {
      await answer;
    } finally {
      this.#script = null;
      for (const timer of this.#timers.splice(0)) clearTimeout(timer);
      if (this.#interrupt) this.#interrupt[0] = 0;
    }
  }

  /**
   * Stops the script that runs: where it waits; if it does not, by an interrupt; if it minds neither, by ending the
   * worker, after which this object is of no more use (`ended`).
   *
   * @param {string} [reason]
   */
  stop(reason = "asked for on the page") {
    const script = this.#script;
    if (script === null) return;
    /** @param {number} milliseconds @param {() => void} then unless the script has ended by then */
    const later = (milliseconds, then) => {
      const wait = () => this.#script === script && then();
      this.#timers.push(setTimeout(wait, milliseconds));
    };
    // Only who does not answer is busy in the script, and interrupted: anywhere else the interrupt would be lost.
    const ask = (/** @type {string} */ what) => {
      let heard = false;
      const hear = () => {
        heard = true;
      };
      this.#ask(what, [reason]).then(hear, hear);
      later(INTERRUPT_AFTER_MS, () => {
        if (!heard && this.#interrupt) Atomics.store(this.#interrupt, 0, SIGNAL);
        ask("ping");
      });
    };
    ask("stop");
    later(END_AFTER_MS, () => this.#end(new StopRequested(`the script was stopped, and Python with it: ${reason}`)));
  }

  /** Whether the worker is gone: open another one. */
  get ended() {
    return this.#ended !== null;
  }

  close() {
    this.#end(new HybridError("Python in the tab was closed"));
  }

  /** @param {string} ask @param {any[]} parameters @param {Listeners} [listeners] @returns {Promise<any>} */
  #ask(ask, parameters, listeners = {}) {
    if (this.#ended !== null) return Promise.reject(new HybridError(`Python in the tab has ended: ${this.#ended}`));
    const id = ++this.#asked;
    return new Promise((resolve, reject) => {
      this.#questions.set(id, { resolve, reject, listeners });
      this.#worker.postMessage({ id, ask, parameters });
    });
  }

  /** @param {any} answer */
  #hear({ id, value, error, print, report, progress, ended }) {
    if (ended !== undefined) {
      const why = /call stack|recursion/i.test(ended) ? "its calls were nested too deeply" : ended;
      this.#end(new HybridError(`the script has brought Python to an end (${why}); the next one gets another`));
    }
    const question = this.#questions.get(id);
    if (!question) return;
    const { listeners, resolve, reject } = question;
    if (print !== undefined) listeners.print?.(print);
    else if (report) listeners.report?.(report);
    else if (progress) listeners.progress?.(progress[0], progress[1], progress[2]);
    else {
      this.#questions.delete(id);
      if (error) reject(errorFrom(error));
      else resolve(value);
    }
  }

  /** @param {HybridError} error for everybody who waits */
  #end(error) {
    this.#ended ??= error.message;
    this.#worker.terminate();
    for (const { reject } of this.#questions.values()) reject(error);
    this.#questions.clear();
  }
}

/** @param {{name: string, message: string, line?: number | null, kind?: string, traceback?: string}} facts @returns {FromScript} */
function errorFrom({ name, message, ...facts }) {
  const error = errorNamed(name, message);
  if (name === "ScriptError") error.name = name;
  return Object.assign(error, { line: facts.line, kind: facts.kind, traceback: facts.traceback });
}
