/** @file WebGPU, and the run that Python prepared, for the tests of whole runs under Node and Deno. */

import { spawnSync } from "node:child_process";
import { existsSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import path from "node:path";
import process from "node:process";
import { fileURLToPath } from "node:url";

import { findHost } from "./host.js";

const ROOT = fileURLToPath(new URL("../../../", import.meta.url));

/** As `findHost`, with the files of `tests/browser/runner_fixtures.py`. Called once per test file. */
export async function findRunHost() {
  const folder = mkdtempSync(path.join(tmpdir(), "hybrid-run-"));
  process.env.HYBRID_PLAN_FIXTURES = folder;
  const found = await findHost();
  const release = () => {
    found.release();
    rmSync(folder, { recursive: true, force: true });
  };
  if (found.missing) return { ...found, release };
  const venv = path.join(ROOT, ".venv/bin/python");
  const python = process.env.HYBRID_PYTHON ?? (existsSync(venv) ? venv : "python3");
  const cwd = path.join(ROOT, "tests");
  const made = spawnSync(python, ["-m", "browser.runner_fixtures", folder], { encoding: "utf8", cwd });
  if (made.status === 0) return { ...found, release };
  release();
  const reason = `${python} could not prepare a run: ${made.error?.message ?? made.stderr.trim().split("\n").pop()}`;
  if ((process.env.HYBRID_REQUIRE ?? "").split(",").includes("webgpu")) throw new Error(reason);
  return { ...found, release: () => {}, missing: reason };
}
