/**
 * @file The characters of a corpus; id = rank of the character in code point order (a loaded file may order them
 * otherwise). May import: contracts, errors.
 */

import { repr, typeName } from "../contracts/names.js";
import { isObject } from "../contracts/values.js";
import { DataContractError } from "../errors.js";
import { jsonText, sameJson } from "./json_text.js";
import { byteStream, checkIds, documentHash, named, plainDocument } from "./tokenizer.js";

/** @import { Tokenizer } from "./tokenizer.js" */

const SPLIT = { type: "Split", pattern: { Regex: "[\\s\\S]" }, behavior: "Isolated", invert: false };

/** @param {string} character @returns {number} */
const codeOf = (character) => /** @type {number} */ (character.codePointAt(0));

/** @implements {Tokenizer} */
export class CharacterTokenizer {
  /** @type {"characters"} */
  kind = "characters";
  /** @type {null} */
  endOfText = null;
  #characters;
  #document;
  #ids;

  /**
   * @param {readonly string[]} characters id i is characters[i]
   * @throws {DataContractError} if there are none, or one is repeated, longer, or a lone surrogate
   */
  constructor(characters) {
    if (!characters.length) {
      throw new DataContractError(
        "a character tokenizer needs at least one character, and got none: the corpus is empty",
      );
    }
    for (const [index, character] of characters.entries()) {
      if (typeof character !== "string" || [...character].length !== 1) {
        throw new DataContractError(
          `character tokenizer: entry ${index} is ${repr(character)}, expected one character`,
        );
      }
      if (/\p{Cs}/u.test(character)) {
        throw new DataContractError(
          `character tokenizer: entry ${index} is ${named(character)}, a lone surrogate, which UTF-8 cannot hold; ` +
            "repair the text or use the bytes tokenizer",
        );
      }
    }
    const codes = characters.map(codeOf);
    const sorted = Uint32Array.from(codes).sort();
    const repeated = sorted.find((code, place) => place > 0 && code === sorted[place - 1]);
    if (repeated !== undefined) {
      const name = named(String.fromCodePoint(repeated));
      throw new DataContractError(`character tokenizer: ${name} appears twice among the characters`);
    }
    this.#characters = characters;
    this.vocabularySize = characters.length;
    this.#ids = new Int32Array(sorted[sorted.length - 1] + 1).fill(-1); // by code point
    codes.forEach((code, id) => {
      this.#ids[code] = id;
    });
    this.#document = plainDocument(
      SPLIT,
      { type: "Fuse" },
      {
        type: "WordLevel",
        vocab: new Map(characters.map((character, id) => [character, id])),
        // Not in the vocabulary on purpose: the library then refuses an unknown character instead of replacing it.
        unk_token: "<unknown>",
      },
    );
  }

  /**
   * @param {Record<string, any>} document of a WordLevel model
   * @returns {CharacterTokenizer}
   */
  static fromDocument(document) {
    if (!sameJson(document.pre_tokenizer, SPLIT)) {
      throw new DataContractError(
        "tokenizer.json: a WordLevel model is supported with one token a character " +
          `(pre_tokenizer ${jsonText(SPLIT)}), got ${jsonText(document.pre_tokenizer ?? null).slice(0, 200)}`,
      );
    }
    const { vocab } = document.model;
    if (!isObject(vocab)) {
      throw new DataContractError(`tokenizer.json: "model.vocab" is ${typeName(vocab)}, expected an object`);
    }
    const entries = Object.entries(vocab);
    /** @type {string[]} */
    const characters = [];
    for (const [character, id] of entries) {
      const inside = typeof id === "number" && Number.isInteger(id) && id >= 0 && id < entries.length;
      if (!inside || id in characters) {
        throw new DataContractError(
          `tokenizer.json: the id of ${repr(character)} is ${repr(id)}, ` +
            `expected each of 0..${entries.length - 1} exactly once`,
        );
      }
      characters[id] = character;
    }
    const tokenizer = new CharacterTokenizer(characters);
    if (sameJson(document, tokenizer.#document)) return tokenizer;
    throw new DataContractError(
      "tokenizer.json: a character tokenizer with settings beyond its characters is not supported",
    );
  }

  get hash() {
    return documentHash(this.#document);
  }

  /**
   * @param {string} text
   * @returns {Uint32Array}
   * @throws {DataContractError} naming a character that is not in the vocabulary, and its offset
   */
  encode(text) {
    const ids = new Uint32Array(text.length);
    let count = 0;
    for (let at = 0; at < text.length; at++, count++) {
      const code = /** @type {number} */ (text.codePointAt(at));
      const id = this.#ids[code] ?? -1;
      if (id < 0) {
        throw new DataContractError(
          `character ${named(String.fromCodePoint(code))} at offset ${count} is not among the ` +
            `${this.vocabularySize} characters of this tokenizer; use text with the characters of its corpus, ` +
            "or the bytes tokenizer",
        );
      }
      ids[count] = id;
      if (code > 0xffff) at++;
    }
    return ids.subarray(0, count);
  }

  /** @param {Iterable<number>} ids */
  decode(ids) {
    return checkIds(ids, this)
      .map((id) => this.#characters[id])
      .join("");
  }

  stream() {
    const utf8 = new TextEncoder();
    return byteStream((id) => utf8.encode(this.decode([id])));
  }

  toJson() {
    return `${jsonText(this.#document, 1)}\n`;
  }
}

/** Finds out which characters there are in the texts that it is given. */
export class CharacterSet {
  #seen = new Uint8Array(0x110000);

  /** @param {string} text */
  add(text) {
    for (let at = 0; at < text.length; at++) {
      const code = /** @type {number} */ (text.codePointAt(at));
      this.#seen[code] = 1;
      if (code > 0xffff) at++;
    }
  }

  /** @returns {CharacterTokenizer} of exactly these characters */
  tokenizer() {
    const found = [];
    for (let code = 0; code < this.#seen.length; code++) {
      if (this.#seen[code]) found.push(String.fromCodePoint(code));
    }
    return new CharacterTokenizer(found);
  }
}
