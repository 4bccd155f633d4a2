/**
 * @file Fingerprints of a run, and what a resume says when they differ.
 *
 * A checkpoint keeps three documents: `dataset` (the data's own fingerprint), `tokenizer`, and `contract` (every
 * setting that can change the trajectory). They are kept whole, not only hashed, so that a refusal can show each field
 * with both values.
 */

import { ConfigError, ContractMismatch } from "../errors.js";
import { repr } from "./names.js";
import { stableHash, stableJson } from "./stable_json.js";
import { isObject, isSet } from "./values.js";

/** @import { Difference } from "../errors.js" */
/** @typedef {Record<string, unknown>} Document */

/** Stands for the value of a field that one side lacks. */
export const ABSENT = "(absent)";

const WIDEST = 72;

/**
 * The hashes of the three documents; null for an absent one.
 *
 * @param {Record<string, unknown>} fingerprints {dataset, tokenizer, contract}
 * @returns {{configHash: string | null, datasetHash: string | null, tokenizerHash: string | null}}
 */
export function identityHashes(fingerprints) {
  /** @param {string} name */
  const hash = (name) => (isSet(fingerprints[name]) ? stableHash(fingerprints[name]) : null);
  return { configHash: hash("contract"), datasetHash: hash("dataset"), tokenizerHash: hash("tokenizer") };
}

/**
 * [dotted path, saved value, current value] of each field that differs, in the order of `saved`, then of `current`.
 *
 * Objects are compared member by member, everything else as a whole, by stable JSON: there is no difference exactly
 * when the hashes are equal. A field that one side lacks has the value ABSENT there.
 *
 * @param {Document} saved
 * @param {Document} current
 * @returns {Difference[]}
 */
export function differences(saved, current) {
  return [...walk("", saved, current)];
}

/**
 * The differences as lines of three columns: field, saved, current.
 *
 * @param {Iterable<Difference>} found
 * @returns {string}
 */
export function formatTable(found) {
  const rows = [["field", "saved", "current"]];
  for (const [path, saved, current] of found) rows.push([path, text(saved), text(current)]);
  const widths = [0, 1].map((column) => Math.max(...rows.map((row) => width(row[column]))));
  return rows.map((row) => `${pad(row[0], widths[0])}  ${pad(row[1], widths[1])}  ${row[2]}`).join("\n");
}

/**
 * The differences, when all of them are accepted; the caller records them in the lineage.
 *
 * @param {Document} saved
 * @param {Document} current
 * @param {Iterable<string>} [accepted] dotted paths; one accepts the field itself and everything below it
 * @returns {Difference[]}
 * @throws {ContractMismatch} with the table when a difference is not accepted
 * @throws {ConfigError} for an accepted path that does not differ (a typing mistake would otherwise accept nothing and
 *   say nothing)
 */
export function requireAgreement(saved, current, accepted = []) {
  const found = differences(saved, current);
  const paths = [...accepted];
  for (const path of paths) {
    if (!found.some(([field]) => covers(path, field))) {
      const known = found.map(([field]) => field).join(", ") || "none";
      throw new ConfigError(`accepted change ${repr(path)} is no difference to the checkpoint; differences: ${known}`);
    }
  }
  const refused = found.filter(([field]) => !paths.some((path) => covers(path, field)));
  if (refused.length) {
    const noun = refused.length === 1 ? "1 field differs" : `${refused.length} fields differ`;
    throw new ContractMismatch(
      `resume refused: ${noun} from the checkpoint\n${formatTable(refused)}\n` +
        "Go back to the saved values, accept each change with --accept-change FIELD --reason TEXT, or begin " +
        "another run with --resume never.",
      refused,
    );
  }
  return found;
}

/**
 * @param {string} path
 * @param {Document} saved
 * @param {Document} current
 * @returns {Generator<Difference>}
 */
function* walk(path, saved, current) {
  for (const key of new Set([...Object.keys(saved), ...Object.keys(current)])) {
    const field = path ? `${path}.${key}` : key;
    const [before, now] = [saved, current].map((side) => (Object.hasOwn(side, key) ? side[key] : ABSENT));
    if (!Object.hasOwn(saved, key) || !Object.hasOwn(current, key)) yield [field, before, now];
    else if (isObject(before) && isObject(now)) yield* walk(field, before, now);
    else if (stableJson(before) !== stableJson(now)) yield [field, before, now];
  }
}

/** @param {string} path @param {string} field @returns {boolean} */
function covers(path, field) {
  return field === path || field.startsWith(`${path}.`);
}

/** @param {unknown} value @returns {string} */
function text(value) {
  const whole = value === ABSENT ? ABSENT : stableJson(value);
  return width(whole) <= WIDEST ? whole : `${[...whole].slice(0, WIDEST - 4).join("")} ...`;
}

/** @param {string} line @returns {number} in characters, not in UTF-16 code units */
function width(line) {
  return [...line].length;
}

/** @param {string} line @param {number} columns @returns {string} */
function pad(line, columns) {
  return line + " ".repeat(columns - width(line));
}
