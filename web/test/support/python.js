/** @file Python for tests under Node: packed once for a test file, and opened with the files of the npm package. */

import { spawnSync } from "node:child_process";
import { existsSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import path from "node:path";
import { fileURLToPath } from "node:url";

import { packPython } from "../../build_pyodide.js";
import { TabPython } from "../../pyodide/tab_python.js";

const ROOT = fileURLToPath(new URL("../../../", import.meta.url));
const PYODIDE = path.join(ROOT, "web", "node_modules", "pyodide");

/** What the interpreter of this checkout prints. @param {...string} parameters */
export function askPython(...parameters) {
  const venv = path.join(ROOT, ".venv/bin/python");
  const python = process.env.HYBRID_PYTHON ?? (existsSync(venv) ? venv : "python3");
  const env = { ...process.env, PYTHONPATH: path.join(ROOT, "tests") };
  const asked = spawnSync(python, parameters, { encoding: "utf8", env, maxBuffer: 2 ** 28 });
  if (asked.status !== 0) throw new Error(`${python} ${parameters.join(" ")}: ${asked.error?.message ?? asked.stderr}`);
  return asked.stdout;
}

/** The archives of the bundle in a temporary folder. */
export async function packed() {
  const folder = mkdtempSync(path.join(tmpdir(), "hybrid-python-"));
  await packPython(folder);
  return { folder, remove: () => rmSync(folder, { recursive: true, force: true }) };
}

/** @param {string} folder with the archives @param {Int32Array<SharedArrayBuffer> | null} [interrupt] */
export async function openPython(folder, interrupt = null) {
  const { loadPyodide } = await import(path.join(PYODIDE, "pyodide.mjs"));
  const { info } = JSON.parse(readFileSync(path.join(PYODIDE, "pyodide-lock.json"), "utf8"));
  const settings = {
    indexURL: `${PYODIDE}/`,
    stdLibURL: path.join(folder, "python_stdlib.zip"),
    lockFileContents: { info, packages: {} },
  };
  const library = Promise.resolve(new Uint8Array(readFileSync(path.join(folder, "hybrid.zip"))));
  return TabPython.open({ loadPyodide, library, settings, interrupt });
}
