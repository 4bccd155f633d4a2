/**
 * @file Byte-pair encoding: a BPE `tokenizer.json`, byte-level or with byte fallback, through `@huggingface/tokenizers`.
 *
 * Control tokens are the added tokens marked `special`. They are left out of the encoder, so that their text inside a
 * document or message is ordinary text. Truncation, padding and post-processing of the document are not applied. Python
 * has the same in `data/bpe.py`, and gives the same ids where both know a character: what is a letter depends on the
 * Unicode version of each. May import: contracts, errors.
 */

import { repr } from "../contracts/names.js";
import { isObject } from "../contracts/values.js";
import { DataContractError, MissingDependency } from "../errors.js";
import { finder, numbered } from "./added_tokens.js";
import { BYTE_ALPHABET } from "./bytes.js";
import { decoderOf, normalizerOf, spelledBytes, splitterOf } from "./pipeline.js";
import { byteStream, checkIds, documentHash, LARGEST_VOCABULARY, newDecoder, wellFormed } from "./tokenizer.js";

/** @import { AddedToken } from "./added_tokens.js" */
/** @import { TextStream, Tokenizer } from "./tokenizer.js" */

// Which control token ends a document, when a file has several: the first of these that it has.
const END_OF_TEXT_NAMES = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>"];

const LIBRARY = "@huggingface/tokenizers";
const UTF8 = new TextEncoder();

// Words whose ids are remembered.
const MOST_WORDS = 2 ** 16;
const LONGEST_WORD = 64; // characters

/** @implements {Tokenizer} */
export class BpeTokenizer {
  /** @type {"bpe"} */
  kind = "bpe";
  #text;
  #document;
  #encode;
  /** @type {Uint8Array[] | null} */
  #pieces;
  /** @type {(ids: number[]) => string} */
  #decode;

  /**
   * @param {string} text of the document, kept verbatim for `toJson`
   * @param {Record<string, any>} document what it says
   * @param {typeof import("@huggingface/tokenizers")} library
   */
  constructor(text, document, library) {
    requireSupported(document);
    requireWhole(document);
    const model = new Map(Object.entries(document.model.vocab));
    const added = numbered(document.added_tokens ?? [], model);
    const vocabulary = new Map(model);
    for (const { content, id } of added.values()) vocabulary.set(content, id);
    if (!vocabulary.size) throw new DataContractError("tokenizer.json: the vocabulary is empty");
    const tokens = new Map([...vocabulary].map(([token, id]) => [id, token]));
    if (tokens.size < vocabulary.size) {
      throw new DataContractError("tokenizer.json: two tokens share one id, expected an id of its own for each");
    }
    let largest = 0;
    for (const id of tokens.keys()) largest = Math.max(largest, id);
    this.vocabularySize = largest + 1;
    if (this.vocabularySize > LARGEST_VOCABULARY) {
      throw new DataContractError(`tokenizer.json: id ${largest} is too large, expected below ${LARGEST_VOCABULARY}`);
    }
    requireLossless(document, vocabulary);
    /** @type {Map<string, number>} */
    this.controlTokens = new Map();
    for (const { content, id, special } of added.values()) if (special) this.controlTokens.set(content, id);
    const end = END_OF_TEXT_NAMES.find((name) => this.controlTokens.has(name)) ?? "";
    this.endOfText = this.controlTokens.get(end) ?? null;
    this.#text = text;
    this.#document = document;
    try {
      this.#encode = encoder(document, vocabulary, added, library);
    } catch (error) {
      if (error instanceof DataContractError) throw error;
      throw unreadable(error instanceof Error ? error.message : String(error));
    }
    this.#pieces = isByteLevel(document) ? bytePieces(vocabulary, added, this.vocabularySize) : null;
    const decode = this.#pieces ? null : decoderOf(document.decoder);
    this.#decode = (ids) => {
      const known = ids.map((id) => tokens.get(id)).filter((token) => token !== undefined);
      return decode?.(known.filter((token) => !this.controlTokens.has(token))).join("") ?? "";
    };
  }

  get hash() {
    return documentHash(this.#document);
  }

  /** @param {string} text @returns {number[]} */
  encode(text) {
    return this.#encode(wellFormed(text));
  }

  /** @param {Iterable<number>} ids */
  decode(ids) {
    const values = checkIds(ids, this);
    const pieces = this.#pieces;
    if (!pieces) return this.#decode(values);
    const bytes = new Uint8Array(values.reduce((sum, id) => sum + pieces[id].length, 0));
    let at = 0;
    for (const id of values) {
      bytes.set(pieces[id], at);
      at += pieces[id].length;
    }
    return newDecoder().decode(bytes);
  }

  stream() {
    const pieces = this.#pieces;
    return pieces ? byteStream((id) => pieces[checkIds([id], this)[0]]) : redecodingStream(this);
  }

  toJson() {
    return this.#text;
  }
}

/**
 * @param {string} text
 * @param {Record<string, any>} document
 * @returns {Promise<BpeTokenizer>}
 */
export async function openBpe(text, document) {
  requireSupported(document); // before the library is fetched
  let library;
  try {
    library = await import("@huggingface/tokenizers");
  } catch {
    throw new MissingDependency(LIBRARY, `npm install ${LIBRARY}`);
  }
  return new BpeTokenizer(text, document, library);
}

/**
 * For vocabularies whose tokens have no bytes of their own (SentencePiece style): decodes the last tokens again with each
 * new one, and gives out what was added. A character spans at most four byte tokens, so no more than that is held back.
 *
 * @param {BpeTokenizer} tokenizer
 * @returns {TextStream}
 */
function redecodingStream(tokenizer) {
  /** @type {number[]} */
  const all = [];
  let start = 0; // decoding begins here: far enough back for the decoder to see what precedes the new tokens
  let given = 0; // tokens whose text is out
  /** @param {boolean} last */
  const advance = (last) => {
    const before = tokenizer.decode(all.slice(start, given));
    const now = tokenizer.decode(all.slice(start));
    if (!last && now.endsWith("\ufffd") && all.length - given < 4) return "";
    [start, given] = [given, all.length];
    // Python counts characters.
    return [...now].slice([...before].length).join("");
  };
  return {
    push: (id) => {
      all.push(id);
      return advance(false);
    },
    finish: () => advance(true),
  };
}

/** @param {Record<string, any>} document */
function requireSupported(document) {
  const model = isObject(document.model) ? document.model : {};
  if (model.type !== "BPE") {
    throw new DataContractError(
      `tokenizer.json: model type ${repr(model.type)} is not supported: expected "BPE", ` +
        "or a bytes or characters tokenizer of hybrid",
    );
  }
  if (model.dropout) {
    throw new DataContractError("tokenizer.json: model.dropout makes encoding random; set it to null");
  }
}

/** @param {string} problem */
function unreadable(problem) {
  return new DataContractError(`tokenizer.json is not a tokenizer that the tokenizers library can open: ${problem}`);
}

/**
 * The npm library believes what it reads.
 *
 * @param {Record<string, any>} document
 */
function requireWhole({ model, added_tokens: added }) {
  if (!isObject(model.vocab)) throw unreadable('"model.vocab" is no object');
  for (const [token, id] of Object.entries(model.vocab)) {
    if (!(typeof id === "number" && Number.isInteger(id) && id >= 0 && id < 2 ** 32)) {
      throw unreadable(`the id of ${repr(token)} is ${repr(id)}`);
    }
  }
  if (!Array.isArray(model.merges)) throw unreadable('"model.merges" is no list');
  for (const merge of model.merges) {
    const pair = pairOf(merge);
    const known = pair.length === 2 && [...pair, pair.join("")].every((token) => Object.hasOwn(model.vocab, token));
    if (!known) throw unreadable(`the merge ${repr(merge, 80)} is not of two tokens that make a third`);
  }
  for (const name of ["continuing_subword_prefix", "end_of_word_suffix"]) {
    if (model[name]) throw new DataContractError(`tokenizer.json: model.${name} is not supported in JavaScript`);
  }
  if (added !== null && added !== undefined && !Array.isArray(added)) throw unreadable('"added_tokens" is no list');
  for (const token of added ?? []) {
    const flags = ["special", "normalized", "single_word", "lstrip", "rstrip"];
    const fits = isObject(token) && typeof token.content === "string" && Number.isInteger(token.id);
    if (!fits || flags.some((name) => typeof token[name] !== "boolean")) {
      throw unreadable(`the added token ${repr(token, 200)} lacks a field`);
    }
  }
}

/** @param {unknown} merge a list of two, or a text with a space between @returns {string[]} */
function pairOf(merge) {
  return typeof merge === "string" ? merge.split(" ") : Array.isArray(merge) ? merge : [];
}

/**
 * What a vocabulary cannot express would be dropped without a word; so it must be able to express every byte.
 *
 * @param {Record<string, any>} document
 * @param {ReadonlyMap<string, number>} vocabulary
 */
function requireLossless(document, vocabulary) {
  const { model } = document;
  let names = BYTE_ALPHABET;
  let remedy = "train it with the whole byte alphabet";
  if (!isByteLevel(document)) {
    if (model.byte_fallback) {
      names = BYTE_ALPHABET.map((_, byte) => `<0x${hex(byte)}>`);
      remedy = "its vocabulary needs all of <0x00>..<0xFF>";
    } else if (vocabulary.has(model.unk_token)) {
      return;
    } else {
      throw new DataContractError(
        "tokenizer.json: neither byte-level nor with byte fallback or an unknown token: text would be lost silently",
      );
    }
  }
  const lacking = names.flatMap((name, byte) => (vocabulary.has(name) ? [] : [byte]));
  if (!lacking.length) return;
  throw new DataContractError(
    `tokenizer.json: ${lacking.length} of the 256 bytes have no token (the first is 0x${hex(lacking[0])}), ` +
      `so text would be lost silently; ${remedy}`,
  );
}

/** @param {number} byte */
const hex = (byte) => byte.toString(16).toUpperCase().padStart(2, "0");

/**
 * Whether each token is the bytes it spells, which takes both ends: the pre-tokenizer that makes it so and the decoder.
 *
 * @param {Record<string, any>} document
 */
function isByteLevel(document) {
  /** @param {any} part @param {string} inner */
  const kinds = (part, inner) => {
    if (!isObject(part)) return [];
    if (part.type !== "Sequence") return [part.type];
    const parts = Array.isArray(part[inner]) ? part[inner] : [];
    return parts.filter(isObject).map((piece) => piece.type);
  };
  const decoders = kinds(document.decoder, "decoders");
  return (
    kinds(document.pre_tokenizer, "pretokenizers").includes("ByteLevel") &&
    decoders.length > 0 &&
    decoders.every((kind) => kind === "ByteLevel")
  );
}

/**
 * From well-formed text to ids. No control token can come out of it, and every other token keeps its id.
 *
 * @param {Record<string, any>} document
 * @param {ReadonlyMap<string, number>} vocabulary
 * @param {ReadonlyMap<string, AddedToken>} added
 * @param {typeof import("@huggingface/tokenizers")} library
 * @returns {(text: string) => number[]}
 */
function encoder(document, vocabulary, added, { BPE, SplitPreTokenizer }) {
  const control = new Set([...added.values()].flatMap(({ content, special }) => (special ? [content] : [])));
  const kept = [...added.values()].filter(({ special }) => !special);
  const vocab = Object.fromEntries([...vocabulary].filter(([token]) => !control.has(token)));
  const merges = document.model.merges.map(pairOf);
  const spelling = new BPE({
    ...document.model,
    vocab,
    merges: merges.filter((/** @type {string[]} */ [a, b]) => ![a, b, a + b].some((token) => control.has(token))),
  });
  const split = splitterOf(document.pre_tokenizer, (pattern, matchesOnly) => {
    const given = "Regex" in pattern ? { Regex: withoutCase(pattern.Regex) } : { String: pattern.String };
    const splitter = new SplitPreTokenizer({
      type: "Split",
      pattern: given,
      behavior: "Isolated",
      invert: matchesOnly,
    });
    return (text) => splitter.pre_tokenize_text(text);
  });
  const normalize = normalizerOf(document.normalizer);
  const inText = finder(kept.filter(({ normalized }) => !normalized).map((token) => [token.content, token]));
  const inNormalized = finder(
    kept.filter(({ normalized }) => normalized).map((token) => [normalize(token.content), token]),
  );
  const { fuse_unk: fuse, ignore_merges: wholeWords, unk_token: unknown } = document.model;
  /** @param {string} piece @returns {string[]} its tokens; of neighbours that are unknown, one */
  const fused = (piece) => {
    if (wholeWords && Object.hasOwn(vocab, piece)) return [piece];
    const tokens = spelling.bpe(piece).map((token) => (Object.hasOwn(vocab, token) ? token : null));
    return tokens
      .filter((token, place) => token !== null || !place || tokens[place - 1] !== null)
      .map((token) => token ?? unknown);
  };
  const tokensOf =
    fuse && !document.model.byte_fallback ? fused : (/** @type {string} */ piece) => spelling.encode([piece]);
  /** @type {Map<string, number[]>} */
  const recent = new Map(); // the npm library's own memory of words is slower than most words are long
  /** @param {string} piece */
  const idsOf = (piece) => {
    const known = recent.get(piece);
    if (known) return known;
    const ids = tokensOf(piece).map((token) => {
      // The unknown token may be a control token too, which text must not become.
      if (control.has(token)) throw new DataContractError(`${repr(piece, 80)} cannot be expressed with this tokenizer`);
      return /** @type {number} */ (vocabulary.get(token));
    });
    if (recent.size >= MOST_WORDS) recent.clear();
    if (piece.length < LONGEST_WORD) recent.set(piece, ids);
    return ids;
  };
  return (text) => {
    /** @type {number[]} */
    const ids = [];
    let atStart = true;
    for (const outer of inText(text)) {
      for (const section of typeof outer === "string" ? inNormalized(normalize(outer)) : [outer]) {
        if (typeof section !== "string") {
          ids.push(section.id);
        } else {
          for (const piece of split(section, atStart)) {
            for (const id of idsOf(piece)) ids.push(id);
          }
        }
        atStart = false;
      }
    }
    return ids;
  };
}

/**
 * `(?i:'s|'t)` with each letter as the set of letters that are the same but for their case, which is more than the npm
 * library thinks.
 *
 * @param {string} pattern
 */
function withoutCase(pattern) {
  return pattern.replace(/\(\?i:([A-Za-z'|]*)\)/g, (_, /** @type {string} */ inner) => {
    const others = { s: "\u017f", k: "\u212a" };
    const sets = inner.replace(/[A-Za-z]/g, (letter) => {
      const low = letter.toLowerCase();
      return `[${low}${letter.toUpperCase()}${others[/** @type {keyof typeof others} */ (low)] ?? ""}]`;
    });
    return `(?:${sets})`;
  });
}

/**
 * The bytes of each id; nothing for control tokens and for ids that have no token.
 *
 * @param {ReadonlyMap<string, number>} vocabulary
 * @param {ReadonlyMap<string, AddedToken>} added
 * @param {number} size
 */
function bytePieces(vocabulary, added, size) {
  const none = new Uint8Array(0);
  const pieces = new Array(size).fill(none);
  for (const [token, id] of vocabulary) {
    const extra = added.get(token);
    const spelled = extra ? null : spelledBytes(token);
    pieces[id] = extra?.special ? none : spelled ? Uint8Array.from(spelled) : UTF8.encode(token);
  }
  return pieces;
}
