/**
 * @file The mirrored runner's checkpoint record: one JSON document with tensors as base64. Both generations of it are
 * read.
 *
 * A record has members trainingState {progress, optimizerStepCount, params, optimizerSlots} and metadata. Its tensors
 * are the bytes of pooled buffers, longer than the tensor: what lies beyond the shape is not data.
 */

import { CheckpointCorrupt, ContractMismatch } from "../errors.js";
import { halfToFloat } from "../half.js";
import { repr, typeName } from "./names.js";
import { stableHash, stableJson } from "./stable_json.js";
import { isInteger, isObject, isSet, objectOrEmpty } from "./values.js";

/** @import { Difference } from "../errors.js" */
/** @typedef {Record<string, unknown>} Document */

/** Order of the mismatch message. Records carry runtimePresetId (0.1) or runtimeProfileId (0.5). */
export const COMPARED = [
  "configHash",
  "datasetHash",
  "tokenizerHash",
  "optimizerHash",
  "runtimePresetId",
  "runtimeProfileId",
  "kernelPathId",
];

/** @type {Record<string, number>} bytes of an element */
const FORMATS = { f32: 4, f16: 2 };
const BASE64 = /^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$/;

/**
 * One tensor of a record.
 *
 * @typedef {object} RecordTensor
 * @property {string} key "<group>[<index>]"
 * @property {"param" | "m" | "v"} role
 * @property {"f32" | "f16"} dtype
 * @property {number[]} shape
 * @property {Uint8Array<ArrayBuffer>} data little-endian, without the padding
 */

/**
 * The hash a record should carry in metadata.checkpointHash. The timestamp and resume audits are not part of it.
 *
 * @param {Document} record
 * @returns {string}
 */
export function checkpointHash(record) {
  const metadata = member(record, "metadata");
  const lineage = objectOrEmpty(metadata.lineage);
  const profile = Object.hasOwn(metadata, "runtimeProfileId") ? "runtimeProfileId" : "runtimePresetId";
  const covered = ["configHash", "datasetHash", "tokenizerHash", "optimizerHash", profile, "kernelPathId"];
  covered.push("environmentMetadata", "buildProvenance");
  const { metadata: _, ...payload } = record;
  return stableHash({
    payload,
    metadata: {
      ...pick(metadata, covered),
      lineage: pick(lineage, ["checkpointKey", "sequence", "previousCheckpointHash"]),
    },
  });
}

/**
 * @param {Document} record
 * @throws {CheckpointCorrupt} when the record's own hash is not the hash of its content
 */
export function verify(record) {
  const stored = member(record, "metadata").checkpointHash;
  const computed = checkpointHash(record);
  if (stored !== computed) {
    throw new CheckpointCorrupt(
      `checkpoint record: checkpointHash is ${repr(stored)}, but its content has ${computed}: it was changed`,
    );
  }
}

/**
 * @param {Document} record
 * @param {Document} expected null expects nothing
 * @throws {ContractMismatch} naming each expected field that the record's metadata disagrees with
 */
export function requireExpected(record, expected) {
  const metadata = member(record, "metadata");
  /** @type {Difference[]} */
  const found = COMPARED.filter((name) => expected[name] !== null && expected[name] !== undefined)
    .filter((name) => stableJson(metadata[name] ?? null) !== stableJson(expected[name]))
    .map((name) => [name, metadata[name] ?? null, expected[name]]);
  if (found.length) {
    throw new ContractMismatch(`Checkpoint mismatch on fields: ${found.map(([name]) => name).join(", ")}`, found);
  }
}

/**
 * All parameters in the record's order, then the moments m and v of each that has them.
 *
 * @param {Document} record
 * @returns {Generator<RecordTensor>}
 * @throws {CheckpointCorrupt} naming the tensor for unknown dtypes, impossible shapes, broken base64, and buffers that
 *   are too short
 */
export function* tensors(record) {
  const state = member(record, "trainingState");
  for (const [key, document] of Object.entries(member(state, "params"))) yield decode(key, "param", document);
  if (!isSet(state.optimizerSlots)) return;
  for (const [key, moments] of Object.entries(member(state, "optimizerSlots"))) {
    for (const role of /** @type {const} */ (["m", "v"])) {
      yield decode(key, role, isObject(moments) ? moments[role] : moments);
    }
  }
}

/**
 * The elements in row-major order.
 *
 * @param {RecordTensor} tensor
 * @returns {Float32Array<ArrayBuffer>}
 */
export function values(tensor) {
  const view = new DataView(tensor.data.buffer, tensor.data.byteOffset, tensor.data.byteLength);
  const size = FORMATS[tensor.dtype];
  return Float32Array.from({ length: tensor.data.length / size }, (_, index) =>
    tensor.dtype === "f32" ? view.getFloat32(index * 4, true) : halfToFloat(view.getUint16(index * 2, true)),
  );
}

/**
 * @param {string} key
 * @param {RecordTensor["role"]} role
 * @param {unknown} document
 * @returns {RecordTensor}
 */
function decode(key, role, document) {
  const where = `checkpoint record: tensor ${repr(key)} (${role})`;
  if (!isObject(document)) throw new CheckpointCorrupt(`${where} is ${typeName(document)}, expected an object`);
  const { dtype, shape, dataBase64: text } = document;
  if (dtype !== "f32" && dtype !== "f16") {
    throw new CheckpointCorrupt(
      `${where} has dtype ${repr(dtype)}, expected one of ${Object.keys(FORMATS).join(", ")}`,
    );
  }
  if (!Array.isArray(shape) || !shape.every((size) => isInteger(size) && size >= 0)) {
    throw new CheckpointCorrupt(`${where} has shape ${repr(shape)}, expected a list of sizes`);
  }
  if (typeof text !== "string" || !BASE64.test(text)) {
    throw new CheckpointCorrupt(`${where} has dataBase64 that is not base64`);
  }
  const data = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const needed = shape.reduce((product, size) => product * size, 1) * FORMATS[dtype];
  if (data.length < needed) {
    throw new CheckpointCorrupt(
      `${where} has ${data.length} bytes, but ${dtype} of shape ${repr(shape)} needs ${needed}`,
    );
  }
  return { key, role, dtype, shape, data: data.slice(0, needed) };
}

/** @param {Document} document @param {string} name @returns {Document} */
function member(document, name) {
  const found = document[name];
  if (!isObject(found)) {
    throw new CheckpointCorrupt(`checkpoint record: ${name} is ${typeName(found)}, expected an object`);
  }
  return found;
}

/** @param {Document} document @param {readonly string[]} fields @returns {Document} */
function pick(document, fields) {
  return Object.fromEntries(fields.map((name) => [name, document[name] ?? null]));
}
