/**
 * @file JSON text as Python's `json.dumps` writes it: files that both languages write are the same byte for byte, and
 * so are the values in messages. May import: contracts.
 */

import { ExactFloat, repr } from "../contracts/names.js";

/**
 * @param {unknown} value plain JSON; a Map is an object whose members stay in order (an object of JavaScript moves names
 *   like "1" to the front), an `ExactFloat` keeps its ".0"
 * @param {number} [indent] spaces a level, one member a line; without it everything is on one line and what is not
 *   ASCII is escaped
 * @returns {string}
 */
export function jsonText(value, indent) {
  /** @type {string[]} */
  const parts = [];
  write(value, parts, indent, "\n");
  return parts.join("");
}

/**
 * @param {unknown} value
 * @param {string[]} parts
 * @param {number | undefined} indent
 * @param {string} newline what begins a line at this level
 */
function write(value, parts, indent, newline) {
  if (typeof value !== "object" || value === null) {
    parts.push(scalar(value, indent === undefined));
    return;
  }
  if (value instanceof ExactFloat) {
    parts.push(repr(value));
    return;
  }
  const list = Array.isArray(value);
  const [open, close] = list ? "[]" : "{}";
  const items = list ? value : value instanceof Map ? [...value] : Object.entries(value);
  const inner = indent === undefined ? "" : newline + " ".repeat(indent);
  const comma = indent === undefined ? ", " : ",";
  parts.push(open);
  for (const [place, item] of items.entries()) {
    parts.push(place ? comma : "", inner);
    if (!list) parts.push(scalar(item[0], indent === undefined), ": ");
    write(list ? item : item[1], parts, indent, inner);
  }
  if (items.length && indent !== undefined) parts.push(newline);
  parts.push(close);
}

/** @param {unknown} value @param {boolean} ascii @returns {string} */
function scalar(value, ascii) {
  if (typeof value === "number") return repr(value);
  if (typeof value === "bigint") return String(value);
  const text = JSON.stringify(value);
  if (!ascii) return text;
  return text.replace(/[^ -~]/g, (unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

/**
 * Whether two values of `JSON.parse` are equal, whatever the order of members.
 *
 * @param {unknown} a
 * @param {unknown} b a value whose objects may be Maps
 * @returns {boolean}
 */
export function sameJson(a, b) {
  if (typeof a !== "object" || a === null || typeof b !== "object" || b === null) return a === b;
  const left = Object.entries(a);
  const right = b instanceof Map ? b : new Map(Object.entries(b));
  if (Array.isArray(a) !== Array.isArray(b) || left.length !== right.size) return false;
  return left.every(([key, item]) => right.has(key) && sameJson(item, right.get(key)));
}
