/**
 * @file Builds `dist/pyodide/`: Python in the tab. Pyodide's core, its library trimmed and byte-compiled, `hybrid.zip`, its
 * memory as it is once `hybrid` is imported, and the worker. `npm run build:pyodide`.
 */

import { copyFile, mkdir, readFile, rm, writeFile } from "node:fs/promises";
import path from "node:path";
import process from "node:process";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";

import { build } from "esbuild";

import { LIBRARY } from "./pyodide/tab_python.js";

const WEB = fileURLToPath(new URL(".", import.meta.url));
const CHECKOUT = path.dirname(path.resolve(WEB));
const PYODIDE = path.join(WEB, "node_modules", "pyodide");
const CORE = ["pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm"];

/** @param {string} version of Pyodide */
const notice = (version) => `\
pyodide.mjs, pyodide.asm.mjs and pyodide.asm.wasm are Pyodide ${version}, unchanged, under the Mozilla Public License 2.0;
python_stdlib.zip is a part of its Python library, byte-compiled, under the Python Software Foundation License 2.
Their source: https://github.com/pyodide/pyodide/tree/${version}
`;

/**
 * Python has packed the archives with the very interpreter that will read them.
 *
 * @param {string} out a folder that exists
 */
export async function packPython(out) {
  const { loadPyodide } = await import(path.join(PYODIDE, "pyodide.mjs"));
  const python = await loadPyodide({ indexURL: `${PYODIDE}/` });
  const places = { checkout: CHECKOUT, pyodide: PYODIDE, out: path.resolve(out) };
  for (const [name, root] of Object.entries(places)) {
    python.FS.mkdirTree(`/build/${name}`);
    python.FS.mount(python.FS.filesystems.NODEFS, { root }, `/build/${name}`);
  }
  const source = await readFile(path.join(CHECKOUT, "bridge/pyodide/pack.py"), "utf8");
  python.runPython(`${source}\npack("/build/checkout", "/build/pyodide", "/build/out")\n`);
}

// One small plan, so that shaders are read and whatever is worked out once is known.
const WARM_UP = `
import gc
import hybrid_tab.running
from hybrid_tab.compiling import compiled
from hybrid.models.config import ModelConfig
from hybrid.plan.compiler import PlanSettings
from hybrid.plan.profile import DeviceProfile
compiled(PlanSettings(ModelConfig(256, 16, 1, 16, 2, 32), 1, 8), DeviceProfile())
gc.collect()
`;

/**
 * What Python's memory holds once the compiler is imported: who begins with that spares the start of an interpreter and
 * all of its imports. Unlike the other files it is not the same bytes each time.
 *
 * @param {string} folder with the interpreter and the archives
 * @returns {Promise<Uint8Array>}
 */
async function takeSnapshot(folder) {
  const { loadPyodide } = await import(path.join(folder, "pyodide.mjs"));
  const settings = { indexURL: `${folder}/`, packages: [], fullStdLib: false, _makeSnapshot: true };
  // The machine that builds is nobody's business; dictionaries in one order make it nearly the same each time.
  const python = await loadPyodide({ ...settings, env: { HOME: "/home/pyodide", PYTHONHASHSEED: "0" } });
  const library = new Uint8Array(await readFile(path.join(folder, "hybrid.zip")));
  python.unpackArchive(library, "zip", { extractDir: LIBRARY });
  python.runPython(`import sys; sys.path.insert(0, "${LIBRARY}")`);
  python.runPython(WARM_UP, { globals: python.toPy({}) });
  return python.makeMemorySnapshot();
}

/**
 * Everything that the worker loads.
 *
 * @param {string} out the folder, emptied first
 */
export async function buildPyodide(out) {
  await rm(out, { recursive: true, force: true });
  await mkdir(out, { recursive: true });
  await packPython(out);
  for (const file of CORE) await copyFile(path.join(PYODIDE, file), path.join(out, file));
  // Packages from elsewhere are never loaded, so the list of those that exist stays out.
  const lock = JSON.parse(await readFile(path.join(PYODIDE, "pyodide-lock.json"), "utf8"));
  await writeFile(path.join(out, "pyodide-lock.json"), JSON.stringify({ info: lock.info, packages: {} }));
  await writeFile(path.join(out, "memory.bin"), gzipSync(await takeSnapshot(out), { level: 9 }));
  const { version } = JSON.parse(await readFile(path.join(PYODIDE, "package.json"), "utf8"));
  await writeFile(path.join(out, "NOTICE.txt"), notice(version));
  await build({
    absWorkingDir: WEB,
    entryPoints: ["pyodide/worker.js"],
    outdir: out,
    format: "esm",
    target: "es2023",
    bundle: true,
    minify: true,
    legalComments: "linked",
    logLevel: "warning",
  });
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  await buildPyodide(path.join(WEB, "dist", "pyodide"));
  process.exit(0); // Pyodide keeps the process alive
}
