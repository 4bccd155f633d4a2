/**
 * @file What contracts mean by a number, blank text and a date. Python has the same in `contracts/javascript.py`.
 *
 * Contracts speak of JSON values. Where JavaScript's own rule is an accident (`Number(null)` and `Number("")` are 0;
 * `Date.parse` reads what each engine likes) the value is no number, and no date, here.
 */

const DECIMAL = /^[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?$/;
const PREFIXED = /^0(?:[xX][0-9a-fA-F]+|[oO][0-7]+|[bB][01]+)$/;
const DATE =
  /^([0-9]{4})(?:-([0-9]{2})(?:-([0-9]{2}))?)?(?:T([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:\.([0-9]{1,9}))?)?(Z|[+-][0-9]{2}:[0-9]{2})?)?$/;
const DAY_MS = 86_400_000;

/**
 * Whether JSON would call the value an object.
 *
 * @param {unknown} value
 * @returns {value is Record<string, unknown>}
 */
export function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/**
 * The value when it is an object, else an empty one: for settings that may be absent.
 *
 * @param {unknown} value
 * @returns {Record<string, unknown>}
 */
export function objectOrEmpty(value) {
  return isObject(value) ? value : {};
}

/**
 * Whether a setting was given: not null, false, 0, and not an empty text, list or object.
 *
 * @param {unknown} value
 * @returns {boolean}
 */
export function isSet(value) {
  if (Array.isArray(value)) return value.length > 0;
  if (isObject(value)) return Object.keys(value).length > 0;
  return Boolean(value);
}

/**
 * A number that is neither NaN nor infinite (true and false are no numbers).
 *
 * @param {unknown} value
 * @returns {value is number}
 */
export function isFiniteNumber(value) {
  return Number.isFinite(value);
}

/**
 * A whole number.
 *
 * @param {unknown} value
 * @returns {value is number}
 */
export function isInteger(value) {
  return Number.isInteger(value);
}

/**
 * The number that a number or its text stands for; NaN for anything else: null, blank text, booleans, junk.
 *
 * @param {unknown} value
 * @returns {number}
 */
export function toNumber(value) {
  if (typeof value === "number") return Number.isFinite(value) ? value : Number.NaN;
  if (typeof value !== "string") return Number.NaN;
  const text = value.trim();
  return DECIMAL.test(text) || PREFIXED.test(text) ? Number(text) : Number.NaN;
}

/**
 * Trimmed text, or the text of a number; null for blank text and anything else.
 *
 * @param {unknown} value
 * @returns {string | null}
 */
export function optionalText(value) {
  if (isFiniteNumber(value)) return String(value);
  return (typeof value === "string" && value.trim()) || null;
}

/**
 * `2026-01-02T03:04:05.678Z` for milliseconds since 1970 (fractions cut off); null outside the years 1 to 9999.
 *
 * @param {number} milliseconds
 * @returns {string | null}
 */
export function isoTime(milliseconds) {
  const moment = new Date(milliseconds);
  const year = moment.getUTCFullYear();
  return year >= 1 && year <= 9999 ? moment.toISOString() : null;
}

/**
 * The ISO time of epoch milliseconds (a number or its text) or of a date in ECMAScript's format; null for others.
 *
 * A time of day without a zone is read as UTC, so that the result does not depend on the machine.
 *
 * @param {unknown} value
 * @returns {string | null}
 */
export function parseTime(value) {
  const milliseconds = toNumber(value);
  if (Number.isFinite(milliseconds)) return isoTime(milliseconds);
  const match = typeof value === "string" ? DATE.exec(value.trim()) : null;
  if (!match) return null;
  const [year, month = 1, day = 1, hour = 0, minute = 0, second = 0] = match
    .slice(1, 7)
    .map((part) => (part === undefined ? undefined : Number(part)));
  const [fraction = "0", zone = "Z"] = match.slice(7);
  const midnight = new Date(0);
  midnight.setUTCFullYear(/** @type {number} */ (year), month - 1, day);
  // A month or day beyond its range moves the date on.
  if (year === 0 || midnight.getUTCMonth() !== month - 1 || midnight.getUTCDate() !== day) return null;
  let clock = ((hour * 60 + minute) * 60 + second) * 1000;
  if (minute > 59 || second > 59 || clock > DAY_MS) return null;
  if (zone !== "Z") {
    const offset = (Number(zone.slice(1, 3)) * 60 + Number(zone.slice(4, 6))) * 60_000;
    clock += zone[0] === "+" ? -offset : offset;
  }
  clock += Number(fraction.padEnd(3, "0").slice(0, 3));
  return isoTime(midnight.getTime() + clock);
}
