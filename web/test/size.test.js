/** @file How much a page has to load. */

import assert from "node:assert/strict";
import { readdirSync } from "node:fs";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";

import { build } from "esbuild";

import { bundle } from "../build.js";

const MOST_BYTES = 100_000;
const LIBRARY = "@huggingface/tokenizers";
const RUNTIME = fileURLToPath(new URL("../runtime", import.meta.url));

/** @param {Uint8Array} bytes */
const gzipped = (bytes) => gzipSync(bytes, { level: 9 }).length;

test("all of the runtime, without the tokenizer library, is below 100 kB", async () => {
  const files = readdirSync(RUNTIME, { recursive: true, encoding: "utf8" }).filter((file) => file.endsWith(".js"));
  assert.ok(files.length > 60);
  // Namespaces that are handed on whole: nothing of them can be left out.
  const contents = files.map((file, i) => `import * as m${i} from "./${file}"; use(m${i});`).join("\n");
  const { outputFiles } = await build({
    stdin: { contents, resolveDir: RUNTIME },
    external: [LIBRARY],
    bundle: true,
    minify: true,
    format: "esm",
    target: "es2023",
    write: false,
  });
  const size = gzipped(outputFiles[0].contents);
  assert.ok(size < MOST_BYTES, `${size} bytes`);
  assert.ok(size > MOST_BYTES / 4, `${size} bytes: is anything in it?`);
});

test("the worker of the launch page loads the tokenizer library only where it is needed", async () => {
  const { metafile, outputFiles } = (await bundle(false)).worker;
  const [name, worker] = Object.entries(metafile.outputs).find(([file]) => file.endsWith("/worker.js")) ?? [];
  assert.ok(worker);
  const bytes = outputFiles?.find(({ path }) => path.endsWith("/worker.js"))?.contents;
  assert.ok(bytes && gzipped(bytes) < MOST_BYTES, name);
  const inputs = Object.keys(worker.inputs);
  assert.ok(!inputs.some((file) => file.includes(LIBRARY)));
  const kinds = worker.imports.map(({ kind }) => kind);
  assert.deepEqual(new Set(kinds), new Set(["dynamic-import"]));
});

test("the launch page starts its worker from one small file", async () => {
  const { outputFiles } = (await bundle(false)).page;
  const scripts = outputFiles?.filter(({ path }) => path.endsWith(".js")) ?? [];
  assert.equal(scripts.length, 1);
  assert.ok(gzipped(scripts[0].contents) < MOST_BYTES / 10, `${scripts[0].contents.length} bytes`);
});
