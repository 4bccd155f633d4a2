/**
 * @file Stable JSON: one text for one value, in every language, so that its sha256 can stand for the value.
 *
 * The text is what JSON.stringify gives for a copy whose objects list their members in sorted order: integer-like keys
 * first, by number, then the others by UTF-16 code units. NaN and infinities are null, -0 is 0. No spaces. Lone
 * surrogates are escaped, so the text always has a UTF-8 form.
 */

import { ConfigError } from "../errors.js";
import { sha256 } from "../sha256.js";

// Array indices in ECMAScript: canonical decimal integers up to 2^32 - 2. Objects list these before all other keys.
const INDEX = /^(?:0|[1-9][0-9]{0,9})$/;
const LARGEST_INDEX = 2 ** 32 - 2;

const UTF8 = new TextEncoder();

/**
 * The stable JSON of null, booleans, numbers (bigints as the nearest number), strings, arrays and plain objects, nested.
 *
 * @param {unknown} value
 * @param {string} [indent] spaces per level; with any, the text has lines as `JSON.stringify(copy, null, indent)` has
 * @returns {string}
 * @throws {TypeError} with the path of a value of another type (undefined is one: JSON would drop it)
 * @throws {ConfigError} for a key `__proto__`: some helpers drop it, so two different values would share a hash
 */
export function stableJson(value, indent = "") {
  /** @type {string[]} */
  const parts = [];
  write(value, "$", parts, indent, indent ? "\n" : "");
  return parts.join("");
}

/**
 * sha256 of the UTF-8 of `stableJson(value)`, as 64 hex digits.
 *
 * @param {unknown} value
 * @returns {string}
 */
export function stableHash(value) {
  return sha256(UTF8.encode(stableJson(value)));
}

/**
 * @param {unknown} value
 * @param {string} path
 * @param {string[]} parts
 * @param {string} indent
 * @param {string} newline what begins a line at this level; "" when there are no lines
 */
function write(value, path, parts, indent, newline) {
  if (value === null || typeof value === "boolean") {
    parts.push(String(value));
  } else if (typeof value === "string") {
    parts.push(JSON.stringify(value));
  } else if (typeof value === "number" || typeof value === "bigint") {
    parts.push(JSON.stringify(Number(value)));
  } else if (Array.isArray(value)) {
    const inner = newline && newline + indent;
    for (let index = 0; index < value.length; index++) {
      parts.push(index ? "," : "[", inner);
      write(value[index], `${path}[${index}]`, parts, indent, inner);
    }
    parts.push(value.length ? `${newline}]` : "[]");
  } else if (isPlain(value)) {
    const inner = newline && newline + indent;
    const keys = sortedKeys(value, path);
    for (const [index, key] of keys.entries()) {
      parts.push(index ? "," : "{", inner, JSON.stringify(key), newline ? ": " : ":");
      write(value[key], `${path}.${key}`, parts, indent, inner);
    }
    parts.push(keys.length ? `${newline}}` : "{}");
  } else {
    const kind = typeof value === "object" ? value?.constructor?.name : typeof value;
    throw new TypeError(
      `${path} is a ${kind}: stable JSON takes null, booleans, numbers, strings, arrays and plain objects`,
    );
  }
}

/**
 * @param {unknown} value
 * @returns {value is Record<string, unknown>}
 */
function isPlain(value) {
  if (typeof value !== "object" || value === null) return false;
  const prototype = Object.getPrototypeOf(value);
  // An object of another realm (an iframe, a vm context) has a prototype that only looks like Object.prototype.
  return prototype === null || Object.getPrototypeOf(prototype) === null;
}

/**
 * @param {Record<string, unknown>} members
 * @param {string} path
 * @returns {string[]}
 */
function sortedKeys(members, path) {
  /** @type {string[]} */
  const indices = [];
  /** @type {string[]} */
  const names = [];
  for (const key of Object.keys(members)) {
    if (key === "__proto__") {
      throw new ConfigError(`${path} has a key '__proto__', which runtimes hash differently: give it another name`);
    }
    (INDEX.test(key) && Number(key) <= LARGEST_INDEX ? indices : names).push(key);
  }
  // The default order of strings is that of their UTF-16 code units.
  return [...indices.sort((a, b) => Number(a) - Number(b)), ...names.sort()];
}
