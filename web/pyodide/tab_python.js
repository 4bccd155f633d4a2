/**
 * @file Python in this worker: compiles plans, and runs scripts that compile and drive their own. No DOM and no Node API.
 *
 * `loadPyodide` comes from outside: a worker imports it from beside itself, Node from the package.
 */

import { errorNamed, HybridError, StopRequested } from "../runtime/errors.js";
import { checkName, writeAll } from "../runtime/folders/folder.js";
import { MemoryDirectory } from "../runtime/folders/memory.js";
import { ScriptHost } from "./script_host.js";

/** @import { Folder } from "../runtime/folders/folder.js" */
/** @import { HostOptions } from "./script_host.js" */

/** What of Pyodide is used. @typedef {any} Pyodide */
/** What `deviceProfile` says of a device. @typedef {Awaited<ReturnType<typeof import("../runtime/subgroups.js").deviceProfile>>} Profile */

/**
 * What a plan is compiled for: `PlanSettings` of python/hybrid/plan/compiler.py, in camelCase; `model` as in a plan and
 * `optimizer` as in a configuration.
 *
 * @typedef {{model: Record<string, unknown>, batchSize: number, sequenceLength: number} & Record<string, unknown>} PlanRequest
 */

/** Parameters, and bytes by arena with their `total`. @typedef {{parameters: number, memory: Record<string, number>}} Estimate */

/**
 * print: a line that it printed. texts: files by name, which it finds in the folder where it runs: open("corpus.txt").
 *
 * @typedef {{print?: (line: string) => void, texts?: Record<string, string>}} ScriptOptions
 */

/** Where the library lies in Python's file system. */
export const LIBRARY = "/lib/hybrid";
const STOP_SIGNAL = 2; // SIGINT
const FOLDERS = "/scripts"; // where scripts run, each in a folder of its own

/** What a script did wrong: a sentence with the line; `kind` is the class of Python's error, `line` null where there is none. */
export class ScriptError extends HybridError {
  static title = "ScriptError";

  /** @param {{kind: string, message: string, line: number | null, text: string, traceback: string}} facts */
  constructor({ kind, message, line, text, traceback }) {
    const place = line === null ? "the script" : `line ${line} of the script`;
    super(`${place}: ${kind}${message && `: ${message}`}${text && ` (in “${text}”)`}`);
    this.kind = kind;
    this.line = line;
    this.traceback = traceback;
  }
}

export class TabPython {
  #python;
  #compiling;
  #running;
  #scripts = 0;
  #ended;
  /** @type {ScriptHost | null} of the script that runs */
  #host = null;

  /**
   * Use `TabPython.open`.
   *
   * @param {Pyodide} python with the library in it
   * @param {(reason: string) => void} ended
   */
  constructor(python, ended) {
    this.#python = python;
    this.#ended = ended;
    this.#compiling = python.pyimport("hybrid_tab.compiling");
    this.#running = python.pyimport("hybrid_tab.running");
    /** Python's version. @type {string} */
    this.version = python.version;
  }

  /**
   * @param {object} options
   * @param {(options: Record<string, unknown>) => Promise<Pyodide>} options.loadPyodide
   * @param {Promise<Uint8Array>} options.library hybrid.zip
   * @param {Promise<ArrayBuffer>} [options.memory] of an interpreter that has imported it: begin with that
   * @param {Record<string, unknown>} [options.settings] for `loadPyodide`: where its files are
   * @param {Int32Array<SharedArrayBuffer> | null} [options.interrupt] through which another thread can stop a script
   *   that never waits: `interrupt[0] = 2`
   * @param {(reason: string) => void} [options.ended] called when a script has brought Python itself to an end: what
   *   runs never comes back, and nothing can be asked any more
   */
  static async open({ loadPyodide, library, memory, settings = {}, interrupt = null, ended = () => {} }) {
    const start = memory ? { _loadSnapshot: memory } : {};
    const python = await loadPyodide({ ...settings, ...start, packages: [], fullStdLib: false });
    // Files are no part of the memory.
    python.unpackArchive(await library, "zip", { extractDir: LIBRARY });
    if (!memory) python.runPython(`import sys; sys.path.insert(0, "${LIBRARY}")`);
    if (interrupt) python.setInterruptBuffer(interrupt);
    python._api.on_fatal = (/** @type {any} */ error) => ended(String(error?.message ?? error));
    return new TabPython(python, ended);
  }

  /**
   * The folder of a plan, as `write_plan` writes it on the desktop: the same bytes.
   *
   * @param {PlanRequest} request
   * @param {Profile} profile of the device
   * @returns {Promise<Folder>}
   * @throws {HybridError} ConfigError or LimitExceeded, as on the desktop
   */
  async compilePlan(request, profile) {
    const folder = new MemoryDirectory("the compiled plan");
    for (const [name, content] of this.planFiles(request, profile)) await writeAll(folder, name, content);
    return folder;
  }

  /** The files of that folder by name. @param {PlanRequest} request @param {Profile} profile @returns {Map<string, Uint8Array>} */
  planFiles(request, profile) {
    const files = this.#ask("compile_files", request, profile);
    const found = new Map();
    for (const name of ["plan.json", ...[...files.keys()].filter((key) => key !== "plan.json")]) {
      const bytes = files.get(name);
      found.set(name, bytes.toJs());
      bytes.destroy();
    }
    files.destroy();
    return found;
  }

  /** What a plan would need, without a device. @param {PlanRequest} request @param {Profile} profile @returns {Estimate} */
  estimate(request, profile) {
    return JSON.parse(this.#ask("estimate", request, profile));
  }

  /** @param {string} name @param {PlanRequest} request @param {Profile} profile */
  #ask(name, request, profile) {
    try {
      return this.#compiling[name](JSON.stringify(request), JSON.stringify(profile));
    } catch (error) {
      throw pythonError(error);
    }
  }

  /**
   * Runs a script to its end. One at a time.
   *
   * @param {string} source
   * @param {HostOptions & ScriptOptions} options
   * @throws {ScriptError} for what the script did wrong
   * @throws {StopRequested} when it was stopped
   */
  async runScript(source, { print = () => {}, texts = {}, ...options }) {
    if (this.#host) throw new HybridError("a script is running already: stop it first");
    for (const name of Object.keys(texts)) checkName({ name: "the script's folder" }, name);
    const host = new ScriptHost(options);
    this.#host = host;
    const python = this.#python;
    const folder = `${FOLDERS}/${++this.#scripts}`;
    try {
      for (const stream of ["setStdout", "setStderr"]) python[stream]({ batched: print });
      python.FS.mkdirTree(folder);
      python.FS.chdir(folder);
      for (const [name, text] of Object.entries(texts)) python.FS.writeFile(name, text);
      const outcome = JSON.parse(await this.#running.run(source, host));
      if (!outcome.kind) return;
      if (outcome.kind === "Stopped" || outcome.kind === "StopRequested") {
        const place = outcome.line === null ? "" : ` at line ${outcome.line}`;
        throw new StopRequested(`the script was stopped${place}: ${host.stopping ?? "it was interrupted"}`);
      }
      throw new ScriptError(outcome);
    } finally {
      this.#host = null;
      try {
        for (const stream of ["setStdout", "setStderr"]) python[stream]();
        python.FS.chdir("/");
      } catch {
        this.#ended("it closed what it prints to");
      }
      removeTree(python.FS, folder);
      await host.close();
    }
  }

  /** Stop the script that runs where it waits next. @param {string} reason */
  stop(reason) {
    if (!this.#host) return;
    this.#host.stopping ??= reason;
    this.#running.stop();
  }
}

/** As much of a folder as can be removed. @param {any} files Python's file system @param {string} path */
function removeTree(files, path) {
  try {
    if (!files.isDir(files.lstat(path).mode)) return files.unlink(path);
    for (const name of files.readdir(path)) if (name !== "." && name !== "..") removeTree(files, `${path}/${name}`);
    files.rmdir(path);
  } catch {
    // the script has made something of it that cannot be removed, or has removed it
  }
}

/** Ask a script that never waits to end, from another thread. @param {Int32Array<SharedArrayBuffer>} interrupt */
export function interruptScript(interrupt) {
  Atomics.store(interrupt, 0, STOP_SIGNAL);
}

/** An error of Python's as the error of the same name, with its message alone. @param {unknown} error */
function pythonError(error) {
  const { type, message } = /** @type {{type?: string, message?: string}} */ (error ?? {});
  if (!type || !message) return error;
  // The last line of the traceback: `hybrid.errors.ConfigError: the message`, which may go on over more lines.
  const at = message.lastIndexOf(`${type}: `);
  return errorNamed(type, at < 0 ? message : message.slice(at + type.length + 2).trim());
}
