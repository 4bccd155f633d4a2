/**
 * @file Writing a checkpoint folder: tensor files, small files, and the manifest last.
 *
 * May import: errors, contracts, digests, folders, safetensors, state.
 */

import { repr } from "../contracts/names.js";
import { digestBytes } from "../digests.js";
import { CheckpointCorrupt, HybridError } from "../errors.js";
import { PIECE_BYTES, writeAll } from "../folders/folder.js";
import { layout, write } from "../safetensors_writer.js";
import { subtleSha256 } from "../sha256.js";
import { plain } from "./document.js";
import { CONFIG_FILE, MANIFEST_NAME, MODEL_FILE, OPTIMIZER_FILE, parseManifest, renderManifest } from "./manifest.js";
import { parameterShapes, readModelConfig } from "./model.js";
import { modelProblem, optimizerProblem, stateHash } from "./state_hash.js";

/** @import { FileDigest } from "../digests.js" */
/** @import { FileSink, WritableFolder } from "../folders/folder.js" */
/** @import { SessionState, StateTensor } from "../state.js" */
/** @import { Document } from "./document.js" */
/** @import { Fingerprints, Hashes, Manifest, Progress } from "./manifest.js" */
/** @import { TensorDigest } from "./state_hash.js" */

/**
 * One moment of a run, as it is handed over to be saved.
 *
 * state: host copies of weights and moments, which nobody changes until it is saved. config: the resolved configuration.
 * scaler, cursor: state of the loss scaler and of the data loader. session: telemetry windows, elapsed milliseconds, and
 * whatever else the loop wants back; not part of the state hash. files: the texts of `config.json`,
 * `generation_config.json` and, if there is one, `tokenizer.json`.
 *
 * @typedef {object} Snapshot
 * @property {SessionState} state
 * @property {Progress} progress
 * @property {Document} config
 * @property {number | bigint} seed
 * @property {string} runId
 * @property {Document} scaler
 * @property {Document} cursor
 * @property {Hashes} hashes
 * @property {Fingerprints} fingerprints
 * @property {Document} environment
 * @property {Document | null} provenance
 * @property {Document} session
 * @property {readonly Document[]} resumeAudits
 * @property {Record<string, string>} files
 */

/**
 * sequence: 1 for the first checkpoint of a run folder, then one more than any other in it. previousCheckpointHash: of
 * the checkpoint that this one was trained from. now: Unix time in milliseconds.
 *
 * @typedef {object} Place
 * @property {number} sequence
 * @property {string | null} previousCheckpointHash
 * @property {() => number} [now]
 */

const RUNTIME = "browser";
const UTF8 = new TextEncoder();
const METADATA = { format: "pt" }; // `transformers` opens only files that declare this format

/**
 * Write a checkpoint. The folder is one only once the manifest, which comes last and in one piece, is there.
 *
 * @param {WritableFolder} folder
 * @param {Snapshot} snapshot
 * @param {Place} place
 * @returns {Promise<Manifest>}
 * @throws {HybridError} when the snapshot is wrong (before anything is written) or the folder refuses
 */
export async function writeCheckpoint(folder, snapshot, { sequence, previousCheckpointHash, now = Date.now }) {
  checkSnapshot(snapshot);
  const { state, seed, config, hashes, fingerprints, environment, provenance, session, resumeAudits } = snapshot;
  /** @type {Record<string, FileDigest>} */
  const files = {};
  /** @type {Record<string, Record<string, TensorDigest>>} */
  const tensors = {};
  for (const [file, given] of tensorFiles(state)) {
    const sink = await folder.create(file);
    try {
      const { digest, sha256 } = await write((bytes) => writePieces(sink, bytes), specs(given), METADATA);
      await sink.close();
      files[file] = digest;
      tensors[file] = digests(given, (name) => /** @type {string} */ (sha256.get(name)));
    } catch (error) {
      await sink.abort().catch(() => {});
      throw error;
    }
  }
  for (const [name, text] of Object.entries(snapshot.files)) {
    const bytes = UTF8.encode(text);
    files[name] = await digestBytes(bytes);
    await writeAll(folder, name, bytes);
  }
  const rest = { seed: Number(seed), config, hashes, fingerprints, environment, provenance, session, resumeAudits };
  const data = renderManifest(
    {
      ...rest,
      ...stateFacts(snapshot),
      lineage: { runId: snapshot.runId, sequence, previousCheckpointHash, runtime: RUNTIME },
      files,
      stateHash: hashOf(snapshot, tensors),
    },
    Math.floor(now()),
  );
  const manifest = parse(data);
  await writeAll(folder, MANIFEST_NAME, data);
  return manifest;
}

/**
 * The state hash of what would be saved (it reads every byte).
 *
 * @param {Snapshot} snapshot
 * @returns {Promise<string>}
 */
export async function snapshotHash(snapshot) {
  /** @type {Record<string, Record<string, TensorDigest>>} */
  const tensors = {};
  for (const [file, given] of tensorFiles(snapshot.state)) {
    /** @type {Record<string, string>} */
    const sha256 = {};
    for (const { name, bytes } of specs(given)) sha256[name] = await subtleSha256(bytes);
    tensors[file] = digests(given, (name) => sha256[name]);
  }
  return hashOf(snapshot, tensors);
}

/**
 * About how many bytes saving takes: those of the tensor files and texts, and some for the manifest.
 *
 * @param {Snapshot} snapshot
 * @returns {number}
 */
export function snapshotBytes(snapshot) {
  const files = tensorFiles(snapshot.state).map(([, given]) => layout(specs(given), METADATA).size);
  const texts = Object.values(snapshot.files).map((text) => 3 * text.length);
  return [...files, ...texts].reduce((sum, size) => sum + size, 1 << 20);
}

/**
 * HybridError naming the first tensor that is missing, unknown or of the wrong type or shape.
 *
 * @param {Snapshot} snapshot
 */
export function checkSnapshot({ state, files, ...facts }) {
  plain(facts, "manifest");
  const source = "the snapshot";
  try {
    const shapes = parameterShapes(readModelConfig(CONFIG_FILE, UTF8.encode(files[CONFIG_FILE] ?? "")));
    const [model, optimizer] = [state.model, state.optimizer].map((tensors) =>
      Object.entries(tensors).map(([name, { shape }]) => ({ name, shape })),
    );
    const problem = modelProblem(source, model, shapes) ?? optimizerProblem(source, optimizer, shapes);
    if (problem) throw new HybridError(problem);
  } catch (error) {
    throw error instanceof CheckpointCorrupt ? new HybridError(`${source}: ${error.message}`) : error;
  }
  for (const [, tensors] of tensorFiles(state)) {
    for (const [name, { data }] of Object.entries(tensors)) {
      if (!(data instanceof Float32Array)) {
        throw new HybridError(
          `tensor ${repr(name)} is no Float32Array: a checkpoint holds float32 weights and moments`,
        );
      }
    }
  }
}

/** @param {Snapshot} snapshot */
function stateFacts({ state, progress, scaler, cursor }) {
  return { progress, optimizerStep: state.optimizerStep, lossScaler: scaler, dataCursor: cursor };
}

/** @param {Snapshot} snapshot @param {Record<string, Record<string, TensorDigest>>} tensors by file */
function hashOf(snapshot, tensors) {
  return stateHash({ ...stateFacts(snapshot), model: tensors[MODEL_FILE], optimizer: tensors[OPTIMIZER_FILE] });
}

/** @param {SessionState} state @returns {[file: string, tensors: Record<string, StateTensor>][]} */
function tensorFiles(state) {
  return [
    [MODEL_FILE, state.model],
    [OPTIMIZER_FILE, state.optimizer],
  ];
}

/** @param {Record<string, StateTensor>} tensors */
function specs(tensors) {
  return Object.entries(tensors).map(([name, { shape, data }]) => {
    return { name, dtype: "F32", shape, bytes: new Uint8Array(data.buffer, data.byteOffset, data.byteLength) };
  });
}

/** @param {Record<string, StateTensor>} tensors @param {(name: string) => string} sha256 */
function digests(tensors, sha256) {
  const entries = Object.entries(tensors).map(([name, { shape }]) => [
    name,
    { dtype: "F32", shape: [...shape], sha256: sha256(name) },
  ]);
  return Object.fromEntries(entries);
}

/** @param {FileSink} sink @param {Uint8Array} bytes */
async function writePieces(sink, bytes) {
  for (let at = 0; at < bytes.length; at += PIECE_BYTES) await sink.write(bytes.subarray(at, at + PIECE_BYTES));
}

/** @param {Uint8Array} data @returns {Manifest} */
function parse(data) {
  try {
    return parseManifest(MANIFEST_NAME, data);
  } catch (error) {
    if (!(error instanceof CheckpointCorrupt)) throw error;
    throw new HybridError(`the snapshot cannot be saved, for nobody could load it: ${error.message}`);
  }
}
