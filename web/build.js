/**
 * @file Builds `dist/`: the launch page, its worker with the runtime in it, and the chunks that the worker loads on demand
 * (the tokenizer library). `npm run build`.
 */

import { copyFile, rm } from "node:fs/promises";
import process from "node:process";
import { fileURLToPath } from "node:url";

import { build } from "esbuild";

const DIST = fileURLToPath(new URL("dist", import.meta.url));

/**
 * @param {boolean} write to `dist/`; otherwise the files are only returned
 * @returns {Promise<import("esbuild").BuildResult<{metafile: true}>>}
 */
export function bundle(write) {
  return build({
    absWorkingDir: fileURLToPath(new URL(".", import.meta.url)),
    entryPoints: ["launch/launch.js", "launch/worker.js", "launch/launch.css"],
    outdir: "dist",
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
  await rm(DIST, { recursive: true, force: true });
  await bundle(true);
  for (const file of ["launch.html", "icon.svg"]) {
    await copyFile(new URL(`launch/${file}`, import.meta.url), new URL(`dist/${file}`, import.meta.url));
  }
}
