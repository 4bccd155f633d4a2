/**
 * @file The worker that holds Python and the runtime: answers what `client.js` asks. Its files lie beside it.
 */

import { openDevice } from "../runtime/device.js";
import { describe } from "../runtime/errors.js";
import { ScriptError, TabPython } from "./tab_python.js";

/**
 * @typedef {{id: number, ask: "open" | "planFiles" | "estimate" | "runScript" | "stop" | "ping", parameters: any[]}} Request
 */

/** @type {TabPython | null} */
let python = null;

const STAGE = "loading Python";
const PIECES = 3; // of which each tells when it is there
const LINES_MS = 50; // lines that are printed meanwhile go to the page together

/**
 * @param {Int32Array<SharedArrayBuffer> | null} interrupt
 * @param {(what: string, done: number, total: number) => void} progress
 */
async function open(interrupt, progress) {
  const base = new URL("./", globalThis.location.href);
  let done = 0;
  progress(STAGE, done, PIECES);
  /** @template T @param {Promise<T>} piece @returns {Promise<T>} */
  const told = async (piece) => {
    const there = await piece;
    progress(STAGE, ++done, PIECES);
    return there;
  };
  const file = async (/** @type {string} */ name) => {
    const response = await fetch(new URL(name, base));
    if (!response.ok || !response.body) throw new Error(`${response.url} cannot be read: status ${response.status}`);
    return response.body;
  };
  const bytes = (/** @type {ReadableStream} */ stream) => new Response(stream).arrayBuffer();
  const library = told(file("hybrid.zip").then(bytes)).then((buffer) => new Uint8Array(buffer));
  // All of it beside the interpreter, which takes longer.
  const unpack = (/** @type {ReadableStream} */ stream) => bytes(stream.pipeThrough(new DecompressionStream("gzip")));
  const memory = told(file("memory.bin").then(unpack));
  for (const piece of [library, memory]) piece.catch(() => {}); // heard of when it is awaited
  // Not a literal: it is loaded as it lies, and not bundled.
  const { loadPyodide } = await import(new URL("pyodide.mjs", base).href);
  const settings = { indexURL: base.href };
  const ended = (/** @type {string} */ reason) => globalThis.postMessage({ ended: reason });
  // Where a script has it exit, that is all that is heard of it.
  globalThis.addEventListener("unhandledrejection", ({ reason }) => {
    if (reason?.name === "ExitStatus" || reason?.name === "Exit") ended(reason.message);
  });
  python = await told(TabPython.open({ loadPyodide, library, memory, interrupt, settings, ended }));
  return python.version;
}

/** @param {Request} request @returns {Promise<any>} */
async function answer({ id, ask, parameters }) {
  const progress = (/** @type {any[]} */ ...far) => globalThis.postMessage({ id, progress: far });
  if (ask === "open") return open(parameters[0], progress);
  if (ask === "ping") return null; // not busy
  if (!python) throw new Error("Python is not open");
  if (ask === "planFiles") return python.planFiles(parameters[0], parameters[1]);
  if (ask === "estimate") return python.estimate(parameters[0], parameters[1]);
  if (ask === "stop") return python.stop(parameters[0]);
  const lines = gathered((print) => globalThis.postMessage({ id, print }));
  const listeners = {
    texts: parameters[1],
    openDevice: () => openDevice(),
    print: lines.add,
    report: (/** @type {any} */ values) => globalThis.postMessage({ id, report: values }),
    progress,
  };
  return python.runScript(parameters[0], listeners).finally(lines.send);
}

/** Lines, some together: a script prints many more than anybody can be told of one by one. @param {(lines: string[]) => void} tell */
function gathered(tell) {
  /** @type {string[]} */
  let lines = [];
  let sent = 0;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let timer;
  const send = () => {
    clearTimeout(timer);
    if (lines.length) tell(lines);
    lines = [];
    sent = performance.now();
  };
  const add = (/** @type {string} */ line) => {
    lines.push(line);
    // A script that never waits lets no timer run.
    if (performance.now() - sent >= LINES_MS) send();
    else if (lines.length === 1) timer = setTimeout(send, LINES_MS);
  };
  return { add, send };
}

globalThis.addEventListener("message", async ({ data }) => {
  const request = /** @type {Request} */ (data);
  try {
    globalThis.postMessage({ id: request.id, value: await answer(request) });
  } catch (error) {
    const facts =
      error instanceof ScriptError ? { line: error.line, kind: error.kind, traceback: error.traceback } : {};
    globalThis.postMessage({ id: request.id, error: { ...describe(error), ...facts } });
  }
});
