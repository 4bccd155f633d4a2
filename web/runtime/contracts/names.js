/**
 * @file Messages about names and values, word for word as Python writes them: logs of both runtimes can be compared,
 * and one page of help covers both.
 */

import { isObject } from "./values.js";

/**
 * A sentence such as `unknown scheduler type 'cosin': did you mean 'cosine'? known: constant, cosine`.
 *
 * @param {string} what
 * @param {string} name
 * @param {Iterable<string>} known
 * @returns {string}
 */
export function unknownName(what, name, known) {
  const names = [...known];
  const nearest = nearestName(name, names);
  const hint = nearest === null ? "" : ` did you mean ${repr(nearest)}?`;
  return `unknown ${what} ${repr(name)}:${hint} known: ${names.join(", ")}`;
}

/**
 * The most similar name with a similarity of at least 0.6, or null. Similarity is twice the length of what both share
 * in order, over the length of both (Ratcliff and Metzener, 1988). Of equally similar names the last in the alphabet
 * wins.
 *
 * @param {string} name
 * @param {readonly string[]} names
 * @returns {string | null}
 */
function nearestName(name, names) {
  const word = [...name];
  let best = null;
  let score = 0.6;
  for (const candidate of names) {
    const letters = [...candidate];
    const length = letters.length + word.length;
    const similarity = length ? (2 * matching(letters, 0, letters.length, word, 0, word.length)) / length : 1;
    const wins = best === null ? similarity >= score : similarity === score && compareText(candidate, best) > 0;
    if (wins || similarity > score) {
      best = candidate;
      score = similarity;
    }
  }
  return best;
}

/**
 * The length of the longest common block, plus what matches to the left and to the right of it.
 *
 * @param {string[]} a
 * @param {number} aFrom
 * @param {number} aTo
 * @param {string[]} b
 * @param {number} bFrom
 * @param {number} bTo
 * @returns {number}
 */
function matching(a, aFrom, aTo, b, bFrom, bTo) {
  let size = 0;
  let atA = aFrom;
  let atB = bFrom;
  for (let i = aFrom; i < aTo; i++) {
    for (let j = bFrom; j < bTo; j++) {
      let run = 0;
      while (i + run < aTo && j + run < bTo && a[i + run] === b[j + run]) run++;
      if (run > size) [size, atA, atB] = [run, i, j];
    }
  }
  if (!size) return 0;
  return size + matching(a, aFrom, atA, b, bFrom, atB) + matching(a, atA + size, aTo, b, atB + size, bTo);
}

/**
 * Python's order of texts: by code points. (JavaScript's own is by UTF-16 code units.)
 *
 * @param {string} first
 * @param {string} second
 * @returns {number} below 0, 0, above 0
 */
export function compareText(first, second) {
  const a = [...first];
  const b = [...second];
  const shared = Math.min(a.length, b.length);
  for (let i = 0; i < shared; i++) {
    const difference = /** @type {number} */ (a[i].codePointAt(0)) - /** @type {number} */ (b[i].codePointAt(0));
    if (difference) return difference;
  }
  return a.length - b.length;
}

// What repr() escapes: control, format, surrogate, private and unassigned characters, and separators but the space.
const UNPRINTABLE = /[\p{C}\p{Z}]/u;
/** @type {Record<string, string>} */
const SHORT_ESCAPES = { "\t": "\\t", "\n": "\\n", "\r": "\\r", "\\": "\\\\" };

/**
 * A JSON value as Python's repr() writes it, for messages. A whole number has no ".0", since here 1.0 is 1; in a value
 * of the exact reader (`strict_json`), whole numbers are bigints and all others have their point.
 *
 * @param {unknown} value
 * @param {number} [longest] code points after which the text is cut off
 * @returns {string}
 */
export function repr(value, longest = Number.POSITIVE_INFINITY) {
  const text = write(value);
  return text.length <= longest ? text : [...text].slice(0, longest).join("");
}

/** @param {unknown} value @returns {string} */
function write(value) {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value === "number") return writeNumber(value);
  if (typeof value === "string") return writeText(value);
  if (Array.isArray(value)) return `[${value.map(write).join(", ")}]`;
  if (value instanceof ExactFloat) {
    const text = writeNumber(value.value);
    return /^-?[0-9]+$/.test(text) ? `${text}.0` : text;
  }
  if (isObject(value)) {
    const entries = value instanceof Map ? [...value] : Object.entries(value);
    const members = entries.map(([key, item]) => `${writeText(key)}: ${write(item)}`);
    return `{${members.join(", ")}}`;
  }
  return String(value);
}

/** @param {number} value @returns {string} */
function writeNumber(value) {
  if (Number.isNaN(value)) return "nan";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  const size = Math.abs(value);
  // Python changes to an exponent at 1e16 and below 1e-4, JavaScript at 1e21 and below 1e-6.
  if (!Number.isInteger(value) ? size < 1e-4 : size >= 1e16) {
    const [mantissa, exponent] = value.toExponential().split("e");
    return `${mantissa}e${exponent[0]}${exponent.slice(1).padStart(2, "0")}`;
  }
  return Object.is(value, -0) ? "-0" : String(value);
}

/** @param {string} text @returns {string} */
function writeText(text) {
  const quote = text.includes("'") && !text.includes('"') ? '"' : "'";
  let result = quote;
  for (const character of text) {
    const code = /** @type {number} */ (character.codePointAt(0));
    if (character === quote) result += `\\${quote}`;
    else if (character in SHORT_ESCAPES) result += SHORT_ESCAPES[character];
    else if (character === " " || !UNPRINTABLE.test(character)) result += character;
    else if (code < 0x100) result += `\\x${code.toString(16).padStart(2, "0")}`;
    else if (code < 0x10000) result += `\\u${code.toString(16).padStart(4, "0")}`;
    else result += `\\U${code.toString(16).padStart(8, "0")}`;
  }
  return result + quote;
}

/** A JSON number that was not written as an integer, in a value of the exact reader. */
export class ExactFloat {
  /** @param {number} value */
  constructor(value) {
    this.value = value;
  }
}

/**
 * The name Python gives to the type of a JSON value, for messages.
 *
 * @param {unknown} value
 * @returns {string}
 */
export function typeName(value) {
  if (value === null || value === undefined) return "NoneType";
  if (typeof value === "boolean") return "bool";
  if (typeof value === "number") return Number.isInteger(value) ? "int" : "float";
  if (typeof value === "bigint") return "int";
  if (value instanceof ExactFloat) return "float";
  if (typeof value === "string") return "str";
  if (Array.isArray(value)) return "list";
  return isObject(value) ? "dict" : typeof value;
}
