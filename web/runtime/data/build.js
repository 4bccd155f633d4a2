/**
 * @file From texts to a token store, the same files byte for byte as Python's `build_store` makes.
 *
 * May import: errors, contracts, digests, folders, tokenizers.
 */

import { ExactFloat, repr } from "../contracts/names.js";
import { CHUNK_BYTES, Digester } from "../digests.js";
import { ConfigError, DataContractError } from "../errors.js";
import { ByteTokenizer } from "../tokenizers/bytes.js";
import { CharacterSet } from "../tokenizers/characters.js";
import { jsonText } from "../tokenizers/json_text.js";
import { FORMAT, seal, VERSION } from "./manifest.js";
import { splitRule } from "./split.js";
import { stopIf, TokenStore } from "./store.js";

/** @import { WritableFolder } from "../folders/folder.js" */
/** @import { Tokenizer } from "../tokenizers/tokenizer.js" */
/** @import { FileRecord } from "./manifest.js" */
/** @import { SplitRule } from "./split.js" */
/** @import { Watched } from "./store.js" */

/** One text and the name by which errors call it. @typedef {{name: string, text: string}} Document */
/** @typedef {Iterable<Document> | AsyncIterable<Document>} Documents */

// Documents are encoded in groups of about this many characters; between two of them others have their turn.
const GROUP_CHARACTERS = 2 ** 20;
const GROUP_DOCUMENTS = 1024;

/**
 * Encode documents into a new store in an empty folder. `manifest.json` is written last, so the store is there whole or
 * not at all; after an error nothing is left.
 *
 * @param {Documents} documents read twice for "characters"
 * @param {Tokenizer | "bytes" | "characters"} tokenizer
 * @param {WritableFolder} target
 * @param {object} [options]
 * @param {Partial<SplitRule>} [options.split] written into the manifest
 * @param {Record<string, unknown>} [options.source] a description for the manifest, plain JSON
 * @param {Watched["progress"]} [options.progress] progress("tokens", tokens so far, null); before that "documents"
 * @param {AbortSignal} [options.signal]
 * @returns {Promise<TokenStore>}
 * @throws {DataContractError} for a corpus without tokens, text that the tokenizer refuses (naming the document), or a
 *   folder that holds a store
 * @throws {StopRequested}
 */
export async function buildStore(documents, tokenizer, target, { split, source = {}, progress, signal } = {}) {
  if ((await target.size("manifest.json")) !== null) {
    throw new DataContractError(
      `${target.name} exists already; choose another folder, remove it, or ask to replace it`,
    );
  }
  const rule = splitRule(split);
  const made = await chosen(tokenizer, documents, { progress, signal });
  /** @type {string[]} */
  const written = [];
  try {
    /** @param {string} name @returns {Promise<Writer>} */
    const create = async (name) => {
      written.push(name);
      return new Writer(await target.create(name));
    };
    /** @param {string} name @param {Uint8Array} bytes */
    const write = async (name, bytes) => (await create(name)).whole(bytes);
    /** @param {string} text */
    const utf8 = (text) => new TextEncoder().encode(text);
    const what = `building the token store ${target.name}`;
    const { record, bounds } = await writeTokens(await create("tokens.bin"), documents, made, source, {
      // Between groups.
      progress: (stage, done, total) => {
        progress?.(stage, done, total);
        stopIf(signal, what);
      },
    });
    /** @type {Record<string, FileRecord>} */
    const files = { "tokens.bin": record };
    files["documents.bin"] = await write("documents.bin", new Uint8Array(BigUint64Array.from(bounds, BigInt).buffer));
    files["tokenizer.json"] = await write("tokenizer.json", utf8(made.toJson()));
    const manifest = seal({
      format: FORMAT,
      version: VERSION,
      vocabularySize: made.vocabularySize,
      tokenType: made.vocabularySize <= 2 ** 16 ? "uint16" : "uint32",
      endOfText: made.endOfText,
      tokenizer: { kind: made.kind, hash: made.hash },
      documents: bounds.length - 1,
      tokens: bounds[bounds.length - 1],
      chunkBytes: CHUNK_BYTES,
      files,
      split: rule,
      source,
    });
    stopIf(signal, what);
    // The share is a float in Python, also a share of 0.
    const shown = { ...manifest, split: { ...rule, validationShare: new ExactFloat(rule.validationShare) } };
    await write("manifest.json", utf8(`${jsonText(shown, 1)}\n`));
    return await TokenStore.open(target);
  } catch (error) {
    for (const name of written.reverse()) await target.remove(name).catch(() => {});
    throw error;
  }
}

/**
 * @param {Tokenizer | "bytes" | "characters"} tokenizer
 * @param {Documents} documents
 * @param {Watched} watched
 * @returns {Promise<Tokenizer>}
 */
async function chosen(tokenizer, documents, { progress, signal }) {
  if (typeof tokenizer !== "string") return tokenizer;
  if (tokenizer === "bytes") return new ByteTokenizer();
  if (tokenizer !== "characters") {
    throw new ConfigError(`the tokenizer is ${repr(tokenizer)}, expected "bytes", "characters" or a tokenizer`);
  }
  if ("next" in documents) {
    throw new ConfigError(
      "a character tokenizer reads the documents twice: give a list, or what begins anew each time",
    );
  }
  const found = new CharacterSet();
  let number = 0;
  for await (const { text } of documents) {
    stopIf(signal, "reading the corpus");
    found.add(text);
    progress?.("documents", ++number, null);
  }
  return found.tokenizer();
}

/**
 * @param {Writer} writer
 * @param {Documents} documents
 * @param {Tokenizer} tokenizer
 * @param {Record<string, unknown>} source
 * @param {Required<Pick<Watched, "progress">>} watched called after each group
 * @returns {Promise<{record: FileRecord, bounds: number[]}>}
 */
async function writeTokens(writer, documents, tokenizer, source, { progress }) {
  const bounds = [0];
  let empty = 0;
  let characters = 0;
  /** @type {ArrayLike<number>[]} */
  let group = [];
  const end = async () => {
    await writer.write(packed(group, tokenizer.vocabularySize));
    progress("tokens", bounds[bounds.length - 1], null);
    group = [];
    characters = 0;
    await new Promise((resolve) => setTimeout(resolve)); // a message with a stop, say
  };
  try {
    for await (const { name, text } of documents) {
      const ids = encoded(tokenizer, name, text);
      const last = tokenizer.endOfText;
      group.push(ids, last === null ? [] : [last]);
      empty += Number(!ids.length);
      bounds.push(bounds[bounds.length - 1] + ids.length + Number(last !== null));
      characters += text.length;
      if (characters >= GROUP_CHARACTERS || group.length >= 2 * GROUP_DOCUMENTS) await end();
    }
    if (group.length) await end();
    if (bounds.length - 1 === empty) throw new DataContractError(emptyCorpus(empty, source));
    return { record: await writer.finish(), bounds };
  } catch (error) {
    await writer.abort();
    throw error;
  }
}

/**
 * @param {Tokenizer} tokenizer
 * @param {string} name
 * @param {string} text
 * @returns {ArrayLike<number>}
 */
function encoded(tokenizer, name, text) {
  let ids;
  try {
    ids = tokenizer.encode(text);
  } catch (error) {
    if (error instanceof DataContractError) throw new DataContractError(`document ${name}: ${error.message}`);
    throw error;
  }
  for (let place = 0; place < ids.length; place++) {
    if (ids[place] >= tokenizer.vocabularySize) {
      throw new DataContractError(
        `document ${name}: id ${ids[place]} at token ${place} is outside the vocabulary of the ${tokenizer.kind} ` +
          `tokenizer: expected 0..${tokenizer.vocabularySize - 1}`,
      );
    }
  }
  return ids;
}

/** @param {readonly ArrayLike<number>[]} group @param {number} vocabularySize @returns {Uint8Array} as in tokens.bin */
function packed(group, vocabularySize) {
  const count = group.reduce((sum, ids) => sum + ids.length, 0);
  const all = vocabularySize <= 2 ** 16 ? new Uint16Array(count) : new Uint32Array(count);
  let at = 0;
  for (const ids of group) {
    all.set(ids, at);
    at += ids.length;
  }
  return new Uint8Array(all.buffer);
}

/** @param {number} documents @param {Record<string, unknown>} source */
function emptyCorpus(documents, source) {
  const found = ["no document", "one document without text"][documents] ?? `${documents} documents, all of them empty`;
  const where = Array.isArray(source.paths) && source.paths.length ? ` in ${source.paths.join(", ")}` : "";
  return `the corpus is empty: ${found}${where}; name a source that holds text`;
}

/** Writes a file and makes its record. */
class Writer {
  #sink;
  #digester = new Digester();

  /** @param {import("../folders/folder.js").FileSink} sink */
  constructor(sink) {
    this.#sink = sink;
  }

  /** @param {Uint8Array} bytes */
  async write(bytes) {
    await this.#digester.update(bytes);
    await this.#sink.write(bytes);
  }

  /** @returns {Promise<FileRecord>} */
  async finish() {
    await this.#sink.close();
    const { size, sha256, chunks } = await this.#digester.result();
    return { bytes: size, sha256, chunks };
  }

  /** @param {Uint8Array} bytes a whole file */
  async whole(bytes) {
    try {
      await this.write(bytes);
      return await this.finish();
    } catch (error) {
      await this.abort();
      throw error;
    }
  }

  abort() {
    return this.#sink.abort().catch(() => {});
  }
}
