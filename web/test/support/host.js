/**
 * @file Where WebGPU and the fixtures come from under Node and Deno, or why there are none.
 *
 * A test that lacks something is skipped with the reason. HYBRID_REQUIRE=webgpu (as for pytest) makes that a failure.
 */

import { spawnSync } from "node:child_process";
import { existsSync, mkdtempSync, rmSync } from "node:fs";
import { readFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import path from "node:path";
import { fileURLToPath } from "node:url";

import { openDevice } from "../../runtime/device.js";
import { describe } from "../../runtime/errors.js";

/** @import {Host} from "./scenarios.js" */

const ROOT = fileURLToPath(new URL("../../../", import.meta.url));
const SWIFTSHADER = [
  "/usr/lib/chromium/vk_swiftshader_icd.json",
  "/usr/lib/chromium-browser/vk_swiftshader_icd.json",
  "/opt/google/chrome/vk_swiftshader_icd.json",
];

export const isDeno = "Deno" in globalThis;

/**
 * Dawn refuses the old Mesa of Debian 12, so that Chromium's SwiftShader is the driver unless the caller names one.
 *
 * @returns {Promise<GPU | null>}
 */
export async function findGpu() {
  if (isDeno) return navigator.gpu;
  process.env.XDG_RUNTIME_DIR ??= tmpdir();
  const driver = SWIFTSHADER.find((file) => existsSync(file));
  if (driver) process.env.VK_ICD_FILENAMES ??= driver;
  const name = "webgpu"; // not a literal: the package is optional, and its absence no type error
  const { create, globals } = await import(name);
  Object.assign(globalThis, globals);
  return create([]);
}

/**
 * @typedef {object} Found
 * @property {Host} host
 * @property {ReadonlySet<string>} features of the adapter
 * @property {false | string} missing why nothing can be tested
 */

/**
 * The host of the scenarios, with the files that a Python module writes. Called once per test file; `release` removes them.
 *
 * @param {string} [fixtures] the module, below tests/
 * @returns {Promise<Found & {release: () => void}>}
 */
export async function findHost(fixtures = "browser.plan_fixtures") {
  /** @param {string} reason */
  const none = (reason) => {
    if ((process.env.HYBRID_REQUIRE ?? "").split(",").includes("webgpu"))
      throw new Error(`webgpu is required: ${reason}`);
    const read = () => Promise.reject(new Error(reason));
    return { host: { gpu: null, read }, features: new Set(""), missing: reason, release: () => {} };
  };
  let gpu = null;
  let features = new Set([""]);
  try {
    gpu = await findGpu();
    const device = await openDevice({ gpu });
    features = new Set(device.features);
    device.destroy();
  } catch (error) {
    return none(`no WebGPU here (${describe(error).message})`);
  }
  const folder = mkdtempSync(path.join(tmpdir(), "hybrid-fixtures-"));
  const release = () => rmSync(folder, { recursive: true, force: true });
  const venv = path.join(ROOT, ".venv/bin/python");
  const python = process.env.HYBRID_PYTHON ?? (existsSync(venv) ? venv : "python3");
  const env = { ...process.env, PYTHONPATH: path.join(ROOT, "tests") };
  const made = spawnSync(python, ["-m", fixtures, folder], { encoding: "utf8", env });
  if (made.status !== 0) {
    release();
    return none(
      `${python} could not write the fixtures: ${made.error?.message ?? made.stderr.trim().split("\n").pop()}`,
    );
  }
  /** @param {string} name */
  const read = async (name) => new Uint8Array(await readFile(path.join(folder, name)));
  return { host: { gpu, read }, features, missing: false, release };
}
