/**
 * @file From a checkpoint folder to a state. Everything is verified as it streams by, 8 MiB at a time.
 *
 * May import: errors, contracts, digests, folders, safetensors, state.
 */

import { repr } from "../contracts/names.js";
import { digestBytes, expectDigest, expectSize } from "../digests.js";
import { CheckpointCorrupt, CheckpointNotFound } from "../errors.js";
import { readPieces } from "../folders/folder.js";
import { decode, openStream } from "../safetensors.js";
import { Sha256, subtleSha256 } from "../sha256.js";
import { checkFinite, checkNames, checkShape, SLOTS } from "../state.js";
import {
  CONFIG_FILE,
  MANIFEST_NAME,
  MAX_MANIFEST_BYTES,
  MODEL_FILE,
  OPTIMIZER_FILE,
  parseManifest,
  TOKENIZER_FILE,
} from "./manifest.js";
import { parameterShapes, readModelConfig } from "./model.js";
import { modelProblem, optimizerProblem, stateHash } from "./state_hash.js";

/** @import { FileDigest } from "../digests.js" */
/** @import { Folder } from "../folders/folder.js" */
/** @import { TensorEntry } from "../safetensors.js" */
/** @import { SessionState } from "../state.js" */
/** @import { StateProgress, WriteTensor } from "../state_transfer.js" */
/** @import { Manifest } from "./manifest.js" */
/** @import { ModelConfig } from "./model.js" */
/** @import { TensorDigest } from "./state_hash.js" */

/**
 * @typedef {object} LoadOptions
 * @property {Manifest} [manifest] if `readManifest` has read it already
 * @property {(done: number, total: number) => void} [progress] in bytes
 * @property {AbortSignal} [signal]
 */

/**
 * A checkpoint of which every byte was verified.
 *
 * @typedef {object} VerifiedCheckpoint
 * @property {Manifest} manifest
 * @property {ModelConfig} model
 * @property {Record<string, string>} files the texts of the listed files that are no tensors
 */

/** What a checkpoint is restored into: a `PlanSession`. @typedef {object} Restorable
 * @property {{trains: boolean}} plan
 * @property {() => Record<string, readonly number[]>} shapes
 * @property {(progress: StateProgress, fill: (write: WriteTensor) => Promise<void>) => Promise<void>} restore
 */

/** @typedef {(file: string, entries: readonly TensorEntry[]) => void} CheckEntries */
/** @typedef {(entry: TensorEntry, values: Float32Array<ArrayBuffer>, file: string) => void} TakeTensor */

/**
 * The manifest of a checkpoint folder, its own hashes verified, its files present with the right sizes.
 *
 * @param {Folder} folder
 * @returns {Promise<Manifest>}
 * @throws {CheckpointNotFound} if there is no manifest: then there is no checkpoint
 * @throws {CheckpointCorrupt} for all else
 */
export async function readManifest(folder) {
  const source = `${folder.name}/${MANIFEST_NAME}`;
  const size = await folder.size(MANIFEST_NAME);
  if (size === null) {
    throw new CheckpointNotFound(
      `${folder.name}: no ${MANIFEST_NAME}: its save never finished, or it is no checkpoint`,
    );
  }
  if (size > MAX_MANIFEST_BYTES) throw new CheckpointCorrupt(`${source}: more than ${MAX_MANIFEST_BYTES} bytes`);
  const manifest = parseManifest(source, await folder.read(MANIFEST_NAME, 0, size));
  for (const [name, digest] of Object.entries(manifest.files)) {
    const found = await folder.size(name);
    if (found === null) {
      throw new CheckpointCorrupt(`${folder.name}/${name}: the manifest lists this file, but it is missing`);
    }
    expectSize(`${folder.name}/${name}`, found, digest);
  }
  return manifest;
}

/**
 * Read a checkpoint and check it whole; nothing of it is kept but its texts.
 *
 * @param {Folder} folder
 * @param {LoadOptions} [options]
 * @returns {Promise<VerifiedCheckpoint>}
 * @throws {CheckpointNotFound}
 * @throws {CheckpointCorrupt} naming file and fault
 */
export function verifyCheckpoint(folder, options = {}) {
  return read(
    folder,
    { ...options, whole: true },
    () => {},
    () => {},
  );
}

/**
 * A checkpoint in memory; parameters and errors are those of `verifyCheckpoint`.
 *
 * @param {Folder} folder
 * @param {LoadOptions} [options]
 * @returns {Promise<VerifiedCheckpoint & {state: SessionState}>}
 */
export async function loadCheckpoint(folder, options = {}) {
  /** @type {Record<string, SessionState["model"]>} */
  const tensors = { [MODEL_FILE]: {}, [OPTIMIZER_FILE]: {} };
  const verified = await read(
    folder,
    { ...options, whole: true },
    () => {},
    ({ name, shape }, data, file) => {
      tensors[file][name] = { shape, data };
    },
  );
  const { optimizerStep, lossScaler: scaler } = verified.manifest;
  const state = { model: tensors[MODEL_FILE], optimizer: tensors[OPTIMIZER_FILE], optimizerStep, scaler };
  return { ...verified, state };
}

/**
 * Continue a session from a checkpoint, uploading each tensor as soon as it is verified: the host holds one tensor and a
 * few chunks at a time. The digests of whole files are not computed: those of their chunks leave nothing open.
 *
 * If this throws, the session is of no use until another `restore`.
 *
 * @param {Folder} folder
 * @param {Restorable} session
 * @param {LoadOptions} [options]
 * @returns {Promise<VerifiedCheckpoint>}
 * @throws {CheckpointNotFound}
 * @throws {CheckpointCorrupt} naming file and fault, also when the checkpoint is of another model
 */
export async function restoreCheckpoint(folder, session, options = {}) {
  const manifest = options.manifest ?? (await readManifest(folder));
  const shapes = session.shapes();
  /** @type {Record<string, [kind: string, slots: readonly string[]]>} */
  const parts = { [MODEL_FILE]: ["weight", [""]], [OPTIMIZER_FILE]: ["moment", SLOTS.map((slot) => `${slot}/`)] };
  /** @type {VerifiedCheckpoint | undefined} */
  let verified;
  await session.restore({ optimizerStep: manifest.optimizerStep, scaler: manifest.lossScaler }, async (write) => {
    verified = await read(
      folder,
      { ...options, manifest, whole: false },
      (file, entries) => {
        const [kind, slots] = parts[file];
        /** @type {Record<string, readonly number[]>} */
        const wanted = Object.fromEntries(
          slots.flatMap((slot) => Object.entries(shapes).map(([name, shape]) => [slot + name, shape])),
        );
        checkNames(kind, Object.fromEntries(entries.map(({ name }) => [name, null])), wanted);
        for (const { name, shape } of entries) checkShape(kind, name, shape, wanted[name]);
      },
      ({ name }, values, file) => {
        const kind = parts[file][0];
        checkFinite(kind, name, values);
        if (session.plan.trains || kind === "weight") write(name, values);
      },
    );
  });
  return /** @type {VerifiedCheckpoint} */ (verified);
}

/**
 * @param {Folder} folder
 * @param {LoadOptions & {whole: boolean}} options whole: whether digests of whole files are computed too
 * @param {CheckEntries} check called with the tensors of each file before the first of them is taken
 * @param {TakeTensor} take called with each tensor, before all of them are known to be right
 * @returns {Promise<VerifiedCheckpoint>}
 */
async function read(folder, options, check, take) {
  const manifest = options.manifest ?? (await readManifest(folder));
  const total = Object.values(manifest.files).reduce((sum, { size }) => sum + size, 0);
  let done = 0;
  /** @param {number} bytes */
  const advance = (bytes) => {
    options.signal?.throwIfAborted();
    done += bytes;
    options.progress?.(done, total);
  };

  /** @type {Record<string, string>} */
  const files = {};
  /** @type {ModelConfig | undefined} */
  let model;
  for (const [name, digest] of Object.entries(manifest.files)) {
    if (name === MODEL_FILE || name === OPTIMIZER_FILE) continue;
    const source = `${folder.name}/${name}`;
    const data = await folder.read(name, 0, digest.size);
    expectDigest(source, await digestBytes(data), digest);
    advance(data.length);
    if (name === CONFIG_FILE) model = readModelConfig(source, data);
    files[name] = decodeText(source, data, name === TOKENIZER_FILE);
  }
  const shapes = parameterShapes(/** @type {ModelConfig} */ (model));

  /** @type {Record<string, Record<string, TensorDigest>>} */
  const digests = {};
  for (const [file, problem] of /** @type {const} */ ([
    [MODEL_FILE, modelProblem],
    [OPTIMIZER_FILE, optimizerProblem],
  ])) {
    digests[file] = await readTensors(
      folder,
      file,
      manifest.files[file],
      { advance, whole: options.whole },
      (entries) => {
        const found = problem(folder.name, entries, shapes);
        if (found) throw new CheckpointCorrupt(found);
        check(file, entries);
      },
      take,
    );
  }
  const found = stateHash({ ...manifest, model: digests[MODEL_FILE], optimizer: digests[OPTIMIZER_FILE] });
  if (found !== manifest.stateHash) {
    throw new CheckpointCorrupt(
      `${folder.name}/${MANIFEST_NAME}: stateHash is ${manifest.stateHash}, but the files hold ${found}`,
    );
  }
  return { manifest, model: /** @type {ModelConfig} */ (model), files };
}

/**
 * @param {Folder} folder
 * @param {string} file
 * @param {FileDigest} expected
 * @param {{advance: (bytes: number) => void, whole: boolean}} options
 * @param {(entries: readonly TensorEntry[]) => void} check
 * @param {TakeTensor} take
 * @returns {Promise<Record<string, TensorDigest>>}
 */
async function readTensors(folder, file, expected, { advance, whole }, check, take) {
  const source = `${folder.name}/${file}`;
  const sha = new Sha256();
  async function* stream() {
    for await (const piece of readPieces(folder, file, expected.size)) {
      if (whole) sha.update(piece);
      advance(piece.length);
      yield piece;
    }
  }
  const open = await openStream(source, stream(), expected.size, expected);
  const { entries } = open.header;
  const foreign = entries.find(({ dtype }) => dtype !== "F32");
  if (foreign) {
    throw new CheckpointCorrupt(`${source}: tensor ${repr(foreign.name)} is ${foreign.dtype}, expected F32`);
  }
  check(entries);
  /** @type {Record<string, TensorDigest>} */
  const digests = {};
  let raw = new Uint8Array(0);
  for await (const { entry, offset, bytes } of open.pieces()) {
    const { name, dtype, shape, start, end } = entry;
    if (offset === 0) raw = bytes.length === end - start ? bytes : new Uint8Array(end - start);
    if (raw !== bytes) raw.set(bytes, offset);
    if (offset + bytes.length < end - start) continue;
    const sha256 = subtleSha256(raw);
    take(entry, /** @type {Float32Array<ArrayBuffer>} */ (decode(source, entry, raw)), file);
    digests[name] = { dtype, shape, sha256: await sha256 };
  }
  if (whole) expectDigest(source, { ...expected, sha256: sha.hex() }, expected);
  return digests;
}

/**
 * @param {string} source
 * @param {Uint8Array} data
 * @param {boolean} strict whether it must be UTF-8
 * @returns {string}
 */
function decodeText(source, data, strict) {
  try {
    return new TextDecoder("utf-8", { fatal: strict, ignoreBOM: true }).decode(data);
  } catch {
    throw new CheckpointCorrupt(`${source}: not UTF-8`);
  }
}
