/**
 * @file JSON read without mercy: UTF-8 only, no duplicate keys, no NaN or Infinity, no lone surrogates in keys, bounded
 * numbers and depth.
 *
 * `JSON.parse` keeps the last of two equal keys and says nothing, so two readers may see two different files; it also
 * cannot tell 1.0 from 1, nor an integer from its rounding. May import: contracts.
 */

import { ExactFloat, repr } from "./contracts/names.js";

/**
 * Longest integer literal read: stable JSON writes numbers below 1e21 without an exponent. Nothing of ours needs more.
 */
const MAX_INTEGER_DIGITS = 21;
const MAX_DEPTH = 500;

const NUMBER = /-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?/y;
const SPACE = /[ \t\n\r]*/y;
// biome-ignore lint/suspicious/noControlCharactersInRegex: JSON forbids control characters in strings
const PLAIN_TEXT = /[^"\\\x00-\x1f]*/y;
const WORD = /null|true|false|NaN|Infinity/y;
/** @type {Record<string, string>} */
const ESCAPES = { '"': '"', "\\": "\\", "/": "/", b: "\b", f: "\f", n: "\n", r: "\r", t: "\t" };

/** `kind` says what was wrong: not UTF-8, not JSON, or a key that appears twice in one object (`key`). */
export class StrictJsonError extends Error {
  /**
   * @param {"utf8" | "syntax" | "duplicate"} kind
   * @param {string} message
   * @param {string | null} [key]
   */
  constructor(kind, message, key = null) {
    super(message);
    this.name = "StrictJsonError";
    this.kind = kind;
    this.key = key;
  }
}

/**
 * The value of the JSON text in `data`; numbers mean float64.
 *
 * @param {Uint8Array} data
 * @returns {unknown}
 * @throws {StrictJsonError}
 */
export function parse(data) {
  return new Reader(decode(data), false).document();
}

/**
 * The value with nothing lost: objects are Maps in the order they were written in, integers are bigints, and all other
 * numbers are `ExactFloat`.
 *
 * @param {Uint8Array} data
 * @returns {unknown}
 * @throws {StrictJsonError}
 */
export function parseExact(data) {
  return new Reader(decode(data), true).document();
}

/**
 * Whether `text` holds half of a surrogate pair: a `\ud800` escape yields one, and it has no UTF-8 form.
 *
 * @param {string} text
 * @returns {boolean}
 */
export function hasLoneSurrogate(text) {
  return /\p{Cs}/u.test(text);
}

/** @param {Uint8Array} data @returns {string} */
function decode(data) {
  try {
    // A byte order mark stays in the text, where JSON refuses it.
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(data);
  } catch {
    throw new StrictJsonError("utf8", "not UTF-8");
  }
}

class Reader {
  /**
   * @param {string} text
   * @param {boolean} exact
   */
  constructor(text, exact) {
    this.text = text;
    this.exact = exact;
    this.at = 0;
  }

  /** @returns {unknown} */
  document() {
    const value = this.value(0);
    this.match(SPACE);
    if (this.at !== this.text.length) throw this.syntax("extra data");
    return value;
  }

  /** @param {number} depth @returns {unknown} */
  value(depth) {
    if (depth > MAX_DEPTH) throw new StrictJsonError("syntax", "nested too deeply");
    this.match(SPACE);
    switch (this.text[this.at]) {
      case "{":
        return this.object(depth);
      case "[":
        return this.array(depth);
      case '"':
        return this.string();
      case "n":
      case "t":
      case "f":
      case "N":
      case "I":
        return this.word();
      default:
        return this.number();
    }
  }

  /** @param {number} depth @returns {unknown} */
  object(depth) {
    /** @type {[string, unknown][]} */
    const members = [];
    this.at += 1;
    for (let closed = this.take("}"); !closed; closed = this.take("}")) {
      if (members.length && !this.take(",")) throw this.syntax("expected ',' or '}'");
      this.match(SPACE);
      if (this.text[this.at] !== '"') throw this.syntax("expected a key in double quotes");
      const key = this.string();
      if (!this.take(":")) throw this.syntax("expected ':'");
      members.push([key, this.value(depth + 1)]);
    }
    /** @type {Map<string, unknown>} */
    const map = new Map();
    for (const [key, value] of members) {
      if (map.has(key)) {
        throw new StrictJsonError("duplicate", `the key ${repr(key)} appears twice in one object`, key);
      }
      if (hasLoneSurrogate(key)) throw new StrictJsonError("syntax", `the key ${repr(key)} holds a lone surrogate`);
      map.set(key, value);
    }
    // fromEntries makes an own member of a key `__proto__`, as JSON.parse does.
    return this.exact ? map : Object.fromEntries(map);
  }

  /** @param {number} depth @returns {unknown[]} */
  array(depth) {
    /** @type {unknown[]} */
    const items = [];
    this.at += 1;
    for (let closed = this.take("]"); !closed; closed = this.take("]")) {
      if (items.length && !this.take(",")) throw this.syntax("expected ',' or ']'");
      items.push(this.value(depth + 1));
    }
    return items;
  }

  /** @returns {string} */
  string() {
    this.at += 1;
    let result = this.match(PLAIN_TEXT);
    while (this.text[this.at] === "\\") {
      const letter = this.text[this.at + 1];
      if (letter === "u") {
        const digits = this.text.slice(this.at + 2, this.at + 6);
        if (!/^[0-9a-fA-F]{4}$/.test(digits)) throw this.syntax("expected four hexadecimal digits after \\u");
        result += String.fromCharCode(Number.parseInt(digits, 16));
        this.at += 6;
      } else {
        if (!(letter in ESCAPES)) throw this.syntax("unknown escape");
        result += ESCAPES[letter];
        this.at += 2;
      }
      result += this.match(PLAIN_TEXT);
    }
    if (this.text[this.at] !== '"') throw this.syntax("a text that does not end, or a control character in it");
    this.at += 1;
    return result;
  }

  /** @returns {boolean | null} */
  word() {
    const found = this.match(WORD);
    if (found === "null") return null;
    if (found === "true" || found === "false") return found === "true";
    if (found) throw new StrictJsonError("syntax", `${found} is not a JSON number`);
    throw this.syntax("expected a value");
  }

  /** @returns {number | bigint | ExactFloat} */
  number() {
    NUMBER.lastIndex = this.at;
    const found = NUMBER.exec(this.text);
    if (!found) throw this.syntax("expected a value");
    const literal = found[0];
    this.at += literal.length;
    const value = Number(literal);
    if (found[1] !== undefined || found[2] !== undefined) {
      if (!Number.isFinite(value)) {
        throw new StrictJsonError("syntax", `the number ${literal.slice(0, 40)} is out of range`);
      }
      return this.exact ? new ExactFloat(value) : value;
    }
    if (literal.length > MAX_INTEGER_DIGITS + (literal[0] === "-" ? 1 : 0)) {
      throw new StrictJsonError("syntax", `an integer of ${literal.length} digits is out of range`);
    }
    if (!this.exact) return value;
    return literal === "-0" ? new ExactFloat(value) : BigInt(literal);
  }

  /** @param {RegExp} pattern sticky @returns {string} what it matches here, which is then behind us */
  match(pattern) {
    pattern.lastIndex = this.at;
    const found = pattern.exec(this.text)?.[0] ?? "";
    this.at += found.length;
    return found;
  }

  /** @param {string} character @returns {boolean} whether it is next, white space aside; then it is behind us */
  take(character) {
    this.match(SPACE);
    if (this.text[this.at] !== character) return false;
    this.at += 1;
    return true;
  }

  /** @param {string} problem @returns {StrictJsonError} */
  syntax(problem) {
    return new StrictJsonError("syntax", `not JSON: ${problem} at character ${this.at}`);
  }
}
