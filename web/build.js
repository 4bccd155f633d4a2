/**
 * @file Builds `dist/`: the launch page, its worker with the runtime in it, and the chunks that the worker loads on demand
 * (the tokenizer library); and `dist/app/`, the same for the page where anybody trains. `npm run build`.
 */

import { copyFile, mkdir, readdir, rm } from "node:fs/promises";
import path from "node:path";
import process from "node:process";
import { fileURLToPath } from "node:url";

import { build } from "esbuild";

const DIST = fileURLToPath(new URL("dist", import.meta.url));
const PYTHON = "pyodide"; // what `build_pyodide.js` has put there, which takes longer and is seldom another

/**
 * The launch page. What it shares with its worker is in both: neither waits for another file, and the page can say that the
 * worker is broken.
 *
 * @param {boolean} write to `dist/`; otherwise the files are only returned
 */
export async function bundle(write) {
  const page = await bundled(["launch/launch.js", "launch/launch.css"], "dist", write);
  return { page, worker: await bundled(["launch/worker.js"], "dist", write) };
}

/**
 * The page where anybody trains. It shares no chunk with the launch page, so its folder can be served alone.
 *
 * @param {boolean} write to `dist/app/`; otherwise the files are only returned
 */
export function bundleApp(write) {
  return bundled(["app/app.js", "app/app_worker.js", "app/app.css"], "dist/app", write);
}

/**
 * The page that watches the runs of the machine that serves it.
 *
 * @param {boolean} write to `dist/watch/`; otherwise the files are only returned
 */
export function bundleWatch(write) {
  return bundled(["app/watch.js", "app/watch.css"], "dist/watch", write);
}

/**
 * @param {string[]} entryPoints
 * @param {string} outdir
 * @param {boolean} write
 * @returns {Promise<import("esbuild").BuildResult<{metafile: true}>>}
 */
function bundled(entryPoints, outdir, write) {
  return build({
    absWorkingDir: fileURLToPath(new URL(".", import.meta.url)),
    entryPoints,
    outdir,
    chunkNames: "[name]-[hash]",
    format: "esm",
    target: "es2023",
    bundle: true,
    splitting: true,
    minify: true,
    legalComments: "linked",
    metafile: true,
    write,
    logLevel: "warning",
  });
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  await mkdir(DIST, { recursive: true });
  for (const name of await readdir(DIST)) {
    if (name !== PYTHON) await rm(path.join(DIST, name), { recursive: true, force: true });
  }
  await bundle(true);
  await bundleApp(true);
  await bundleWatch(true);
  const files = {
    "launch.html": "launch/launch.html",
    "icon.svg": "launch/icon.svg",
    "app/index.html": "app/app.html",
    "app/icon.svg": "app/icon.svg",
    "watch/index.html": "app/watch.html",
    "watch/icon.svg": "app/icon.svg",
  };
  for (const [to, from] of Object.entries(files)) {
    await copyFile(new URL(from, import.meta.url), new URL(`dist/${to}`, import.meta.url));
  }
}
