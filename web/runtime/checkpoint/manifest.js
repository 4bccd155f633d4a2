/**
 * @file `checkpoint.json`: what a checkpoint is, where it came from, and the digests of its files.
 *
 * The manifest is written last: its presence makes the checkpoint exist. It has exactly one text, and every member is
 * checked before it is believed. docs/formats/checkpoint.md describes it with an example. May import: errors, contracts,
 * digests, folders.
 */

import { repr } from "../contracts/names.js";
import { stableHash } from "../contracts/stable_json.js";
import { CHUNK_BYTES } from "../digests.js";
import { CheckpointCorrupt } from "../errors.js";
import { nameProblem } from "../folders/folder.js";
import { isSha256, Members, parseDocument, plain, render } from "./document.js";

/** @import { FileDigest } from "../digests.js" */
/** @import { Document } from "./document.js" */

export const FORMAT = "hybrid.checkpoint";
export const VERSION = 1;
export const MANIFEST_NAME = "checkpoint.json";
export const MODEL_FILE = "model.safetensors";
export const OPTIMIZER_FILE = "optimizer.safetensors";
export const CONFIG_FILE = "config.json";
export const GENERATION_FILE = "generation_config.json";
export const TOKENIZER_FILE = "tokenizer.json";
export const REQUIRED_FILES = Object.freeze([MODEL_FILE, OPTIMIZER_FILE, CONFIG_FILE, GENERATION_FILE]);
export const MAX_MANIFEST_BYTES = 64 * 1024 * 1024;

/**
 * How far a run is. step: data steps done (they advance when the optimizer skips); epoch, batch: completed epochs, and
 * batches within the current one; samples, tokens, targetTokens: totals seen.
 *
 * @typedef {object} Progress
 * @property {number} step
 * @property {number} epoch
 * @property {number} batch
 * @property {number} samples
 * @property {number} tokens
 * @property {number} targetTokens
 */

/**
 * Identities of what the run was made of: hashes in 64 hex digits, ids that are names, null where not known.
 *
 * @typedef {object} Hashes
 * @property {string | null} configHash
 * @property {string | null} datasetHash
 * @property {string | null} tokenizerHash
 * @property {string | null} optimizerHash
 * @property {string | null} runtimePresetId
 * @property {string | null} kernelPathId
 */

/**
 * What a resume is compared with, field by field.
 *
 * @typedef {object} Fingerprints
 * @property {Document} dataset
 * @property {Document} tokenizer
 * @property {Document} contract
 */

/**
 * One link of the chain. sequence: 1 for the first checkpoint of a run, and one more than any other of the run folder
 * when it was saved. previousCheckpointHash: of the checkpoint this one was trained from. runtime: where it was made.
 *
 * @typedef {object} Lineage
 * @property {string} runId
 * @property {number} sequence
 * @property {string | null} previousCheckpointHash
 * @property {string} runtime
 */

/**
 * The content of `checkpoint.json` that `checkpointHash` covers.
 *
 * @typedef {object} Facts
 * @property {Progress} progress
 * @property {number} optimizerStep
 * @property {Document} lossScaler
 * @property {number} seed
 * @property {Document} dataCursor
 * @property {Document} config
 * @property {Hashes} hashes
 * @property {Fingerprints} fingerprints
 * @property {Document} environment
 * @property {Document | null} provenance
 * @property {Lineage} lineage
 * @property {readonly Document[]} resumeAudits
 * @property {Document} session
 * @property {Record<string, FileDigest>} files
 * @property {string} stateHash
 */

/** @typedef {{unixMs: number, seal: string}} Timestamp */
/** @typedef {Facts & {checkpointHash: string, timestamp: Timestamp}} Manifest */

const PROGRESS = ["step", "epoch", "batch", "samples", "tokens", "targetTokens"];
const HASHES = ["configHash", "datasetHash", "tokenizerHash", "optimizerHash", "runtimePresetId", "kernelPathId"];
const FINGERPRINTS = ["dataset", "tokenizer", "contract"];
const LINEAGE = ["runId", "sequence", "previousCheckpointHash", "runtime"];
const AUDIT = ["field", "saved", "current", "reason", "timestamp", "source", "operator"];
const OBJECTS = ["lossScaler", "dataCursor", "config", "environment", "session"];
const KEYS = [
  ...["format", "version", "progress", "optimizerStep", "seed", ...OBJECTS, "hashes", "fingerprints", "provenance"],
  ...["lineage", "resumeAudits", "files", "timestamp", "stateHash", "checkpointHash"],
];

/**
 * The bytes of `checkpoint.json`.
 *
 * @param {Facts} facts
 * @param {number} unixMs Unix time in milliseconds; it is in no hash but its own seal
 * @returns {Uint8Array<ArrayBuffer>}
 * @throws {HybridError} for a value that JSON cannot carry
 */
export function renderManifest(facts, unixMs) {
  const document = plain({ format: FORMAT, version: VERSION, ...facts }, "manifest");
  const checkpointHash = stableHash(document);
  return render({ ...document, checkpointHash, timestamp: { unixMs, seal: seal(checkpointHash, unixMs) } });
}

/**
 * The manifest in `data`, with its own hashes verified.
 *
 * @param {string} source the file's name in messages
 * @param {Uint8Array} data
 * @returns {Manifest}
 * @throws {CheckpointCorrupt} naming `source` and the field
 */
export function parseManifest(source, data) {
  if (data.length > MAX_MANIFEST_BYTES) {
    throw new CheckpointCorrupt(`${source}: ${data.length} bytes; a manifest has at most ${MAX_MANIFEST_BYTES}`);
  }
  const root = new Members(source, "", parseDocument(source, data));
  if (root.get("format") !== FORMAT) throw root.wrong("format", `expected ${repr(FORMAT)}`);
  if (root.get("version") !== VERSION) {
    throw root.wrong("version", `this program reads version ${VERSION}; a newer one needs a newer program`);
  }
  root.exactly(KEYS);
  const progress = root.members("progress").exactly(PROGRESS);
  for (const key of PROGRESS) progress.integer(key);
  root.integer("optimizerStep");
  root.integer("seed");
  for (const key of OBJECTS) root.members(key);
  const hashes = root.members("hashes").exactly(HASHES);
  for (const key of HASHES) {
    if (!hashes.isNull(key)) key.endsWith("Hash") ? hashes.sha256(key) : hashes.text(key);
  }
  const fingerprints = root.members("fingerprints").exactly(FINGERPRINTS);
  for (const key of FINGERPRINTS) fingerprints.members(key);
  if (!root.isNull("provenance")) root.members("provenance");
  const lineage = root.members("lineage").exactly(LINEAGE);
  lineage.text("runId");
  lineage.integer("sequence", 1);
  if (!lineage.isNull("previousCheckpointHash")) lineage.sha256("previousCheckpointHash");
  lineage.text("runtime");
  for (const [index, audit] of root.list("resumeAudits").entries()) checkAudit(source, index, audit);
  checkFiles(root.members("files"));
  root.sha256("stateHash");
  const unixMs = root.members("timestamp").integer("unixMs");

  const { checkpointHash: _, timestamp: __, ...hashed } = root.values;
  const found = stableHash(hashed);
  const stored = root.sha256("checkpointHash");
  if (stored !== found) throw root.wrong("checkpointHash", `the rest of the manifest has ${found}: it was changed`);
  const timestamp = root.members("timestamp").exactly(["unixMs", "seal"]);
  if (timestamp.sha256("seal") !== seal(stored, unixMs)) throw timestamp.wrong("seal", "the timestamp was changed");
  return /** @type {Manifest} */ (root.values);
}

/** @param {string} checkpointHash @param {number} unixMs */
function seal(checkpointHash, unixMs) {
  return stableHash({ checkpointHash, unixMs });
}

/** @param {string} source @param {number} index @param {unknown} audit */
function checkAudit(source, index, audit) {
  const members = new Members(source, `resumeAudits[${index}]`, audit).exactly(AUDIT);
  for (const key of ["field", "reason", "source", "timestamp"]) members.text(key);
  if (!members.isNull("operator")) members.text("operator");
}

/** @param {Members} members */
function checkFiles(members) {
  const { source } = members;
  /** @type {Map<string, string>} */
  const seen = new Map();
  for (const name of Object.keys(members.values)) {
    const manifest = name.toLowerCase() === MANIFEST_NAME;
    const problem = nameProblem(name) ?? (manifest ? "the manifest does not list itself" : null);
    if (problem) throw new CheckpointCorrupt(`${source}: files has the name ${repr(name, 200)}: ${problem}`);
    const other = seen.get(name.toLowerCase());
    if (other !== undefined) {
      throw new CheckpointCorrupt(`${source}: files has ${repr(other)} and ${repr(name)}, one name on some systems`);
    }
    seen.set(name.toLowerCase(), name);
    const record = members.members(name).exactly(["size", "sha256", "chunks"]);
    const size = record.integer("size");
    const chunks = record.list("chunks");
    const count = Math.ceil(size / CHUNK_BYTES);
    if (chunks.length !== count) {
      throw record.wrong("chunks", `${size} bytes have ${count} chunks of ${CHUNK_BYTES}`);
    }
    if (!chunks.every(isSha256)) throw record.wrong("chunks", "expected a list of sha256 in 64 hex digits");
    record.sha256("sha256");
  }
  const missing = REQUIRED_FILES.filter((name) => !Object.hasOwn(members.values, name));
  if (missing.length) throw new CheckpointCorrupt(`${source}: files lacks ${missing.join(", ")}`);
}
