/**
 * @file Checks on a batch before anything is uploaded: a device clamps or ignores what does not fit, and trains on
 * nonsense.
 *
 * Messages and names are those of Python's `backends/validate.py`. May import: errors, contracts, batch.
 */

import { IGNORE } from "./batch.js";
import { repr } from "./contracts/names.js";
import { DataContractError } from "./errors.js";

/** @import {Batch} from "./batch.js" */

/**
 * DataContractError naming field, sample and position unless all of this holds: arrays are Uint32Arrays of the session's
 * shape (B, T); ids are below the vocabulary size, targets too or IGNORE; positions are below the context length; sample
 * ids differ; each segment is one run of tokens; padding (segment id 0 beside other segments in the row) has no targets.
 *
 * @param {Batch} batch
 * @param {number} vocabularySize
 * @param {number} contextLength
 * @param {readonly [number, number]} shape
 */
export function validateBatch(batch, vocabularySize, contextLength, shape) {
  const [rows, columns] = shape;
  checkArray(batch.ids, "ids", batch.shape, shape);
  checkArray(batch.targets, "targets", batch.shape, shape);
  checkArray(batch.positions, "positions", batch.shape, shape);
  checkArray(batch.segmentIds, "segment_ids", batch.shape, shape);
  checkArray(batch.sampleIds, "sample_ids", [batch.sampleIds?.length ?? 0], [rows]);
  const { ids, targets, positions } = batch;
  const below = `expected a token id below the vocabulary size ${vocabularySize}`;
  for (let i = 0; i < ids.length; i++) {
    if (ids[i] >= vocabularySize) throw refusal(batch, "ids", ids, i, below);
  }
  for (let i = 0; i < targets.length; i++) {
    if (targets[i] >= vocabularySize && targets[i] !== IGNORE) {
      throw refusal(batch, "targets", targets, i, `${below}, or ${IGNORE} for no target`);
    }
  }
  for (let i = 0; i < positions.length; i++) {
    if (positions[i] >= contextLength) {
      throw refusal(batch, "positions", positions, i, `expected less than the context length ${contextLength}`);
    }
  }
  for (let row = 1; row < rows; row++) {
    if (batch.sampleIds.indexOf(batch.sampleIds[row]) < row) {
      throw new DataContractError(
        `batch.sample_ids are ${repr([...batch.sampleIds])}: each row needs its own index in the global batch`,
      );
    }
  }
  for (let row = 0; row < rows; row++) checkContiguous(batch, row * columns, (row + 1) * columns);
  for (let row = 0; row < rows; row++) checkPadding(batch, row * columns, (row + 1) * columns);
}

/**
 * DataContractError for a prompt without tokens or with an id outside the vocabulary.
 *
 * @param {readonly number[]} prompt
 * @param {number} vocabularySize
 */
export function validatePrompt(prompt, vocabularySize) {
  if (!prompt.length) throw new DataContractError("the prompt has no tokens: give at least one to start from");
  prompt.forEach((token, place) => {
    if (!Number.isInteger(token) || token < 0 || token >= vocabularySize) {
      throw new DataContractError(
        `prompt token ${place} is ${token}: expected an id below the vocabulary size ${vocabularySize}`,
      );
    }
  });
}

/**
 * @param {unknown} array
 * @param {string} name
 * @param {readonly number[]} shape what the batch says
 * @param {readonly number[]} wanted
 */
function checkArray(array, name, shape, wanted) {
  const size = wanted.reduce((product, extent) => product * extent, 1);
  const fits =
    array instanceof Uint32Array && array.length === size && shape.every((extent, i) => extent === wanted[i]);
  if (fits) return;
  const kind = array instanceof Uint32Array ? "uint32" : (Object(array).constructor?.name ?? typeof array);
  const got = `${kind} ${repr([...shape])}`;
  // A batch may say one shape and hold another.
  const said = shape.reduce((product, extent) => product * extent, 1);
  const length = array instanceof Uint32Array && array.length !== said ? ` with ${array.length} elements` : "";
  throw new DataContractError(
    `batch.${name} is ${got}${length}: expected uint32 ${repr([...wanted])}, the shape of the session`,
  );
}

/**
 * @param {Batch} batch
 * @param {number} begin of a row
 * @param {number} end
 */
function checkContiguous(batch, begin, end) {
  const segments = batch.segmentIds;
  /** @type {Set<number> | null} */
  let seen = null; // rows of one segment, the usual case, make no set
  for (let i = begin + 1; i < end; i++) {
    if (segments[i] === segments[i - 1]) continue;
    seen ??= new Set([segments[begin]]);
    if (seen.has(segments[i])) {
      const why = "this segment already ended: the tokens of a segment must be contiguous";
      throw refusal(batch, "segment_ids", segments, i, why);
    }
    seen.add(segments[i]);
  }
}

/**
 * Segment 0 is padding where a row has other segments too.
 *
 * @param {Batch} batch
 * @param {number} begin of a row
 * @param {number} end
 */
function checkPadding(batch, begin, end) {
  const { segmentIds, targets } = batch;
  let others = false;
  for (let i = begin; i < end; i++) others ||= segmentIds[i] !== 0;
  if (!others) return;
  for (let i = begin; i < end; i++) {
    if (segmentIds[i] === 0 && targets[i] !== IGNORE) {
      throw refusal(batch, "targets", targets, i, "padding (segment id 0) must have no target");
    }
  }
}

/**
 * @param {Batch} batch
 * @param {string} name
 * @param {Uint32Array} array
 * @param {number} index
 * @param {string} expected
 */
function refusal(batch, name, array, index, expected) {
  const [, columns] = batch.shape;
  const row = Math.floor(index / columns);
  const position = index % columns;
  const sample = batch.sampleIds[row];
  return new DataContractError(
    `batch.${name}[${row}, ${position}] is ${array[index]} (sample ${sample}, position ${position}): ${expected}`,
  );
}
