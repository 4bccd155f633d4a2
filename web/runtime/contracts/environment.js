/**
 * @file Where a run runs: runtime, platform, GPU adapter. Only listed fields are kept, so that nothing private slips in.
 */

import { isFiniteNumber, isObject, isSet, objectOrEmpty, optionalText } from "./values.js";

export const ADAPTER_FIELDS = [
  "name",
  "vendor",
  "vendorId",
  "architecture",
  "device",
  "deviceId",
  "description",
  "driver",
  "backend",
  "adapterType",
  "isFallbackAdapter",
];
/** @type {Record<string, string[]>} */
const ALIASES = { name: ["name", "adapterName"] };

/**
 * The listed fields of an adapter description that are text, numbers or booleans; null when there are none.
 *
 * Each field is looked for in `info` itself, then in its members `adapter` and `gpu`. A `GPUAdapterInfo` will do.
 *
 * @param {unknown} info
 * @returns {Record<string, string | number | boolean> | null}
 */
export function gpuAdapter(info) {
  if (!isObject(info)) return null;
  const sources = [info, info.adapter, info.gpu].filter(isObject);
  /** @type {Record<string, string | number | boolean>} */
  const kept = {};
  for (const field of ADAPTER_FIELDS) {
    const value = sources
      .flatMap((source) => (ALIASES[field] ?? [field]).map((alias) => source[alias]))
      .find((found) => ["string", "boolean", "number"].includes(typeof found));
    if (value !== undefined) kept[field] = /** @type {string | number | boolean} */ (value);
  }
  return isSet(kept) ? kept : null;
}

/**
 * The environment of a JavaScript runtime. `runtime` is "node" when the process names a Node version, else "browser".
 *
 * @param {Record<string, unknown>} options command, surface, gpuAdapterInfo
 * @param {Record<string, unknown> | null} processFacts `process`, or null where there is none
 * @param {Record<string, unknown> | null} navigatorFacts `navigator`, or null where there is none
 * @returns {Record<string, unknown>}
 */
export function javascriptEnvironment(options, processFacts, navigatorFacts) {
  const versions = objectOrEmpty(processFacts?.versions);
  /** @type {Record<string, unknown>} */
  const facts = { runtime: isSet(versions.node) ? "node" : "browser" };
  for (const name of ["command", "surface"]) {
    const text = optionalText(options[name]);
    if (text) facts[name] = text;
  }
  if (processFacts && isSet(versions.node)) {
    facts.nodeVersion = versions.node;
    facts.platform = processFacts.platform ?? null;
    facts.arch = processFacts.arch ?? null;
  }
  if (navigatorFacts) {
    const threads = navigatorFacts.hardwareConcurrency;
    facts.userAgent = optionalText(navigatorFacts.userAgent);
    facts.hardwareConcurrency = isFiniteNumber(threads) ? threads : null;
  }
  const adapter = gpuAdapter(options.gpuAdapterInfo);
  if (adapter) facts.gpuAdapter = adapter;
  return facts;
}

/**
 * The environment of the runtime that this is: a page, a worker, Node or Deno (which calls itself "deno", though it has
 * a `process`).
 *
 * @param {Record<string, unknown>} options command, surface, gpuAdapterInfo
 * @returns {Record<string, unknown>}
 */
export function currentEnvironment(options) {
  const here = /** @type {Record<string, unknown>} */ (/** @type {unknown} */ (globalThis));
  const processFacts = isObject(here.process) ? here.process : null;
  const facts = javascriptEnvironment(options, processFacts, isObject(here.navigator) ? here.navigator : null);
  const deno = objectOrEmpty(objectOrEmpty(here.Deno).version).deno;
  return isSet(deno) ? { ...facts, runtime: "deno", denoVersion: deno } : facts;
}
