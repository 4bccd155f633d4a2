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

/** @param {Int32Array<SharedArrayBuffer> | null} interrupt */
async function open(interrupt) {
  const base = new URL("./", globalThis.location.href);
  const library = fetch(new URL("hybrid.zip", base)).then(async (response) => {
    if (!response.ok) throw new Error(`${response.url} cannot be read: status ${response.status}`);
    return new Uint8Array(await response.arrayBuffer());
  });
  library.catch(() => {}); // heard of when it is awaited
  // Not a literal: it is loaded as it lies, and not bundled.
  const { loadPyodide } = await import(new URL("pyodide.mjs", base).href);
  python = await TabPython.open({ loadPyodide, library, interrupt, settings: { indexURL: base.href } });
  return python.version;
}

/** @param {Request} request @returns {Promise<any>} */
async function answer({ id, ask, parameters }) {
  if (ask === "open") return open(parameters[0]);
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
    progress: (what, done, total) => globalThis.postMessage({ id, progress: [what, done, total] }),
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
