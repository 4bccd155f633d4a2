/** @file Token stores in a page or a worker: read from the server, built in the private file system. */

import { buildStore } from "../../runtime/data/build.js";
import { describeSource, textDocuments } from "../../runtime/data/corpus.js";
import { BatchPlan, DataLoader } from "../../runtime/data/loader.js";
import { prepareData } from "../../runtime/data/prepare.js";
import { TokenStore } from "../../runtime/data/store.js";
import { HttpFolder } from "../../runtime/folders/http.js";
import { openOpfs } from "../../runtime/folders/opfs.js";
import { openTokenizer } from "../../runtime/tokenizers/open.js";

/** @import { DataSettings } from "../../runtime/data/prepare.js" */

/**
 * Some steps of a run on a store of the server.
 *
 * @param {string} path of the store
 * @param {DataSettings} data
 * @param {number} steps
 */
export async function readStore(path, data, steps) {
  const prepared = await prepareData(new HttpFolder(new URL(path, import.meta.url)), data, { verify: false });
  const { train, tokenizer, fingerprint } = prepared;
  const loader = new DataLoader(train, new BatchPlan({ size: train.size, globalBatch: 4, seed: 3 }), 2);
  const ids = [];
  for (let step = 1; step <= steps; step++) {
    for (const batch of await loader.step(step)) ids.push([...batch.ids]);
  }
  loader.close();
  return { fingerprint, kind: tokenizer.kind, ids };
}

/**
 * What a dropped file becomes: the manifest's text, and the store's first document.
 *
 * @param {string} text of the file
 * @param {string} tokenizer "bytes", "characters", or a document
 */
export async function buildPrivately(text, tokenizer) {
  const root = await openOpfs(["data"]);
  const files = [new File([text], "dropped.txt")];
  const made = tokenizer.startsWith("{") ? await openTokenizer(tokenizer) : tokenizer;
  const options = { source: describeSource(files) };
  const kind = /** @type {"bytes" | "characters"} */ (made);
  await buildStore(textDocuments(files), kind, await root.directory("store"), options);
  const folder = await root.open("store");
  const store = await TokenStore.open(folder);
  await store.verify();
  const manifest = new TextDecoder().decode(await folder?.read("manifest.json"));
  return { manifest, text: (await store.tokenizer()).decode(await store.document(0)) };
}
