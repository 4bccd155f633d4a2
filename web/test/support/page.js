/** @file The scenarios for a page or a worker: fixtures come from the server that the module came from. */

import { fetchFiles } from "../../runtime/plan.js";
import { privateStorage } from "../../runtime/storage.js";
import * as scenarios from "./scenarios.js";

/**
 * Run a scenario by name.
 *
 * @param {keyof typeof scenarios} name
 * @param {...any} parameters
 * @returns {Promise<any>}
 */
export function runScenario(name, ...parameters) {
  const host = { gpu: null, read: fetchFiles(new URL("/plans/", import.meta.url)) };
  const all = /** @type {Record<string, (host: scenarios.Host, ...parameters: any[]) => Promise<any>>} */ ({
    ...scenarios,
  });
  return all[name](host, ...parameters);
}

/** What is stored once is there the next time, also for a second handle. @returns {Promise<(string | null)[]>} */
export async function storeAndRead() {
  const storage = await privateStorage("hybrid-test");
  const before = await storage.read("a.json");
  await storage.write("a.json", "long first text");
  await storage.write("a.json", "short");
  return [before, await storage.read("a.json"), await (await privateStorage("hybrid-test")).read("a.json")];
}
