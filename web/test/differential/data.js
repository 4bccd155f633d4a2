/** @file What `answer.js` can be asked about tokenizers, token stores and batches. */

import { Buffer } from "node:buffer";
import { buildStore } from "../../runtime/data/build.js";
import { textDocuments } from "../../runtime/data/corpus.js";
import { BatchPlan, DataLoader, evaluationBatches } from "../../runtime/data/loader.js";
import { PackedDataset } from "../../runtime/data/packing.js";
import { prepareData } from "../../runtime/data/prepare.js";
import { TokenStore } from "../../runtime/data/store.js";
import { decodeUtf8 } from "../../runtime/data/utf8.js";
import { WindowDataset } from "../../runtime/data/windows.js";
import { MemoryDirectory } from "../../runtime/folders/memory.js";
import { CharacterSet } from "../../runtime/tokenizers/characters.js";
import { jsonText } from "../../runtime/tokenizers/json_text.js";
import { openTokenizer } from "../../runtime/tokenizers/open.js";
import { diskFolder } from "../support/disk.js";

/** @import { Batch } from "../../runtime/batch.js" */

/** @param {Batch} batch */
const rowsOf = ({ shape, ids, targets, positions, segmentIds, sampleIds, targetTokens }) => [
  [...shape],
  ...[ids, targets, positions, segmentIds, sampleIds].map((array) => [...array]),
  targetTokens,
];

/** @param {MemoryDirectory} folder */
const filesOf = async (folder) =>
  Object.fromEntries(
    await Promise.all(
      (await folder.list()).map(async (file) => [file, Buffer.from(await folder.read(file)).toString("base64")]),
    ),
  );

/** @type {Record<string, (one: any) => unknown>} */
export const DATA_TASKS = {
  json_text: ({ value, indent }) => jsonText(value, indent ?? undefined),
  tokenizer: async ({ document, texts, ids, characters }) => {
    let tokenizer;
    if (characters) {
      const set = new CharacterSet();
      for (const text of texts) set.add(text);
      tokenizer = set.tokenizer();
    } else {
      tokenizer = await openTokenizer(document);
    }
    /** @param {() => unknown} work */
    const answer = (work) => {
      try {
        return work();
      } catch (error) {
        return String(error);
      }
    };
    const { kind, vocabularySize, endOfText, hash } = tokenizer;
    return {
      about: [kind, vocabularySize, endOfText, hash],
      document: Buffer.from(tokenizer.toJson()).toString("base64"),
      encoded: texts.map((/** @type {string} */ text) => answer(() => [...tokenizer.encode(text)])),
      decoded: ids.map((/** @type {number[]} */ list) => answer(() => tokenizer.decode(list))),
      streamed: ids.map((/** @type {number[]} */ list) =>
        answer(() => {
          const stream = tokenizer.stream();
          return list.map((id) => stream.push(id)).join("") + stream.finish();
        }),
      ),
    };
  },
  utf8: (text) => decodeUtf8(new Uint8Array(Buffer.from(text, "base64"))),
  build_store: async ({ documents, tokenizer, split, source, path }) => {
    const folder = new MemoryDirectory(path);
    const made = tokenizer.startsWith("{") ? await openTokenizer(tokenizer) : tokenizer;
    const store = await buildStore(documents, made, folder, { split, source });
    return { files: await filesOf(folder), fingerprint: store.fingerprint, hash: store.manifest.manifestHash };
  },
  open_store: async ({ path }) => {
    const store = await TokenStore.open(diskFolder(path));
    await store.verify();
    return store.manifest;
  },
  sample_sets: async ({ path, rule, part, sequence, mode, stride, isolate, indices }) => {
    const store = await TokenStore.open(diskFolder(path));
    const view = store.split(part, rule);
    const options = { stride, isolateDocuments: isolate };
    const dataset = mode === "packed" ? new PackedDataset(view, sequence) : new WindowDataset(view, sequence, options);
    const chosen = indices.map((/** @type {number} */ index) => index % dataset.size);
    const samples = [];
    for (const index of chosen) {
      const { ids, targets, positions, segmentIds } = await dataset.sample(index);
      samples.push([ids, targets, positions, segmentIds].map((row) => [...row]));
    }
    const stream = await view.read(0, view.length);
    return [dataset.describe(), dataset.fingerprint, [...dataset.targetCounts(chosen)], samples, [...stream]];
  },
  batches: async ({ path, data, plan, microbatch, prefetch, steps, evaluation }) => {
    const { train, validation, fingerprint, tokenizer } = await prepareData(diskFolder(path), data);
    const batches = new BatchPlan({ ...plan, size: train.size });
    const loader = new DataLoader(train, batches, microbatch, { prefetch });
    const made = [];
    for (const step of steps) {
      const microbatches = await loader.step(step);
      made.push([loader.targetTokens(step), loader.cursor(step), batches.indices(step), microbatches.map(rowsOf)]);
    }
    loader.close();
    const evaluated = [];
    for await (const batch of evaluationBatches(validation ?? train, evaluation[0], evaluation[1]))
      evaluated.push(rowsOf(batch));
    return [fingerprint, validation?.fingerprint ?? null, tokenizer.kind, batches.steps, made, evaluated];
  },
  corpus: async ({ files, field, maxBytes }) => {
    const blobs = files.map((/** @type {[string, string]} */ [name, bytes]) => {
      return Object.assign(new Blob([Buffer.from(bytes, "base64")]), { name });
    });
    const found = [];
    for await (const { name, text } of textDocuments(blobs, { field, maxBytes })) found.push([name, text]);
    return found;
  },
};
