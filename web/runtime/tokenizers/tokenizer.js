/**
 * @file What every tokenizer offers, and what they share. Python has the same in `data/tokenizers.py`.
 *
 * Every tokenizer writes itself as a `tokenizer.json` of the `tokenizers` library, and is recognised from that document.
 * May import: errors, contracts.
 */

import { repr, typeName } from "../contracts/names.js";
import { stableHash } from "../contracts/stable_json.js";
import { isObject } from "../contracts/values.js";
import { DataContractError } from "../errors.js";

/**
 * kind: "bytes", "characters" or "bpe". Every id is below vocabularySize. endOfText: the id that ends a document, null
 * where documents are told apart by segment ids alone.
 *
 * @typedef {object} Tokenizer
 * @property {"bytes" | "characters" | "bpe"} kind
 * @property {number} vocabularySize
 * @property {number | null} endOfText
 * @property {string} hash of the document, see `documentHash`
 * @property {(text: string) => readonly number[] | Uint32Array} encode the ids; text that looks like a control token is
 *   encoded as the text it is
 * @property {(ids: Iterable<number>) => string} decode the text; bytes that are not UTF-8 become U+FFFD, control tokens
 *   nothing. DataContractError for an id outside the vocabulary
 * @property {() => TextStream} stream a decoder for ids that come one by one
 * @property {() => string} toJson the text of tokenizer.json
 */

/**
 * Turns ids into text one at a time, holding back what is not certain yet. The pieces joined are the whole.
 *
 * @typedef {object} TextStream
 * @property {(id: number) => string} push the text that became certain with this id; may be empty
 * @property {() => string} finish what is left: U+FFFD for an unfinished character, else nothing
 */

/** Ids stay below this: a larger one in a file is damage, not a vocabulary. */
export const LARGEST_VOCABULARY = 2 ** 24;

// Half of a surrogate pair.
const LONE = /\p{Cs}/gu;

/** @param {string} text @returns {string} with U+FFFD for each half of a surrogate pair */
export function wellFormed(text) {
  return text.replace(LONE, "\ufffd");
}

/**
 * @param {Iterable<number>} ids
 * @param {Pick<Tokenizer, "kind" | "vocabularySize">} tokenizer
 * @returns {number[]} the ids
 * @throws {DataContractError} naming the first one outside the vocabulary
 */
export function checkIds(ids, { kind, vocabularySize }) {
  const values = [...ids];
  const place = values.findIndex((id) => !(Number.isInteger(id) && id >= 0 && id < vocabularySize));
  if (place < 0) return values;
  throw new DataContractError(
    `id ${values[place]} at position ${place} is outside the vocabulary of the ${kind} tokenizer: ` +
      `expected 0..${vocabularySize - 1}`,
  );
}

/** UTF-8 to text, U+FFFD for what is not; a byte order mark is a character like any other. */
export const newDecoder = () => new TextDecoder("utf-8", { ignoreBOM: true });

/**
 * The stream of a tokenizer whose ids have bytes of their own.
 *
 * @param {(id: number) => Uint8Array} bytesOf throws for an id outside the vocabulary
 * @returns {TextStream}
 */
export function byteStream(bytesOf) {
  const decoder = newDecoder();
  return { push: (id) => decoder.decode(bytesOf(id), { stream: true }), finish: () => decoder.decode() };
}

/**
 * sha256 (hex) of the stable JSON of the document, with `model.vocab` as the list of [token, id] by id: independent of
 * the document's layout, and of which tokens may be names in an object of JavaScript.
 *
 * @param {Record<string, any>} document
 * @returns {string}
 */
export function documentHash(document) {
  const { vocab } = document.model;
  /** @type {[string, number][]} */
  const entries = vocab instanceof Map ? [...vocab] : Object.entries(vocab);
  entries.sort((a, b) => a[1] - b[1]);
  return stableHash({ ...document, model: { ...document.model, vocab: entries } });
}

/**
 * @param {string} text
 * @returns {Record<string, any>} the object in it
 * @throws {DataContractError}
 */
export function parseDocument(text) {
  let document;
  try {
    document = JSON.parse(text);
  } catch (error) {
    throw new DataContractError(`tokenizer.json is not JSON: ${error instanceof Error ? error.message : error}`);
  }
  if (isObject(document)) return document;
  throw new DataContractError(`tokenizer.json holds a ${typeName(document)}, expected an object`);
}

/**
 * A document without settings beyond these.
 *
 * @param {unknown} preTokenizer
 * @param {unknown} decoder
 * @param {Record<string, any>} model
 * @returns {Record<string, any>}
 */
export function plainDocument(preTokenizer, decoder, model) {
  return {
    version: "1.0",
    truncation: null,
    padding: null,
    added_tokens: [],
    normalizer: null,
    pre_tokenizer: preTokenizer,
    post_processor: null,
    decoder,
    model,
  };
}

/** @param {string} character @returns {string} for messages */
export function named(character) {
  const code = /** @type {number} */ (character.codePointAt(0));
  return `${repr(character)} (U+${code.toString(16).toUpperCase().padStart(4, "0")})`;
}
