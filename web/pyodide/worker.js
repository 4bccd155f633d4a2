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
  python = await told(TabPython.open({ loadPyodide, library, memory, interrupt, settings }));
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
  return python.runScript(parameters[0], {
    texts: parameters[1],
    openDevice: () => openDevice(),
    print: (line) => globalThis.postMessage({ id, print: line }),
    report: (values) => globalThis.postMessage({ id, report: values }),
    progress,
  });
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
