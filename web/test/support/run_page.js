/** @file Whole runs in a worker of a page: the files come from the server that the module came from. */

import { openOpfs } from "../../runtime/folders/opfs.js";
import { fetchFiles } from "../../runtime/plan.js";
import { trainInParts, trainWithLosses } from "./runs.js";

const host = { gpu: null, read: fetchFiles(new URL("/plans/run/", import.meta.url)) };

/** The same run in one piece and in two, in the private file system. */
export async function partsInOpfs() {
  const whole = await trainInParts(host, [20], await openOpfs(["runs", "whole"]));
  const folder = await openOpfs(["runs", "parts"]);
  const parts = await trainInParts(host, [10, 20], folder);
  const files = [...(await folder.list()), ...(await folder.folders())];
  return { whole, parts, files, checkpoints: await (await folder.directory("checkpoints")).folders() };
}

/** A run whose device is destroyed twice, and an undisturbed one. */
export async function losses() {
  const { stateHash, outcome, notes } = await trainWithLosses(host);
  return { stateHash, outcome, notes, undisturbed: (await trainInParts(host, [20])).stateHash };
}
