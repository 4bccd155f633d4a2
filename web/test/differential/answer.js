/**
 * @file The JavaScript side of `tests/differential`: answers questions about the runtime, one JSON line for each.
 *
 * A question is {"task": name, "cases": [...]}; the answer has for each case {"value": ...}, or {"error": [name,
 * message]} for what the runtime threw.
 */

import { Buffer } from "node:buffer";
import process from "node:process";
import { createInterface } from "node:readline";

import { gpuAdapter, javascriptEnvironment } from "../../runtime/contracts/environment.js";
import { differences, formatTable, identityHashes, requireAgreement } from "../../runtime/contracts/fingerprint.js";
import { checkpointIdentity, comparedFields, forceResumeSource } from "../../runtime/contracts/identity.js";
import { DynamicLossScaler } from "../../runtime/contracts/loss_scaler.js";
import { heapStats } from "../../runtime/contracts/memory.js";
import { buildEntry, entryError, GENERATIONS } from "../../runtime/contracts/metrics.js";
import { repr, typeName, unknownName } from "../../runtime/contracts/names.js";
import { progressContext, progressMetrics, snapshot } from "../../runtime/contracts/progress.js";
import { buildProvenance } from "../../runtime/contracts/provenance.js";
import { checkpointHash, requireExpected, tensors } from "../../runtime/contracts/record.js";
import { resolveSeed } from "../../runtime/contracts/seed.js";
import { stableHash, stableJson } from "../../runtime/contracts/stable_json.js";
import { alerts, resolveTelemetry, Telemetry } from "../../runtime/contracts/telemetry.js";
import { optionalText, parseTime, toNumber } from "../../runtime/contracts/values.js";
import * as errors from "../../runtime/errors.js";
import { learningRate } from "../../runtime/optim/schedules.js";
import { optimizerSettings } from "../../runtime/optim/settings.js";
import { rows } from "../../runtime/optim/table.js";
import { dropoutKey, keepMask } from "../../runtime/random/dropout.js";
import { normal } from "../../runtime/random/initial.js";
import { philox4x32 } from "../../runtime/random/philox.js";
import { permute, samples } from "../../runtime/random/shuffle.js";
import { streamKey } from "../../runtime/random/streams.js";
import { readBytes, SafetensorsError } from "../../runtime/safetensors.js";
import { write } from "../../runtime/safetensors_writer.js";
import { parse, StrictJsonError } from "../../runtime/strict_json.js";
import { CHECKPOINT_TASKS } from "./checkpoints.js";
import { DATA_TASKS } from "./data.js";
import { RUNNER_TASKS } from "./runner.js";
import { SESSION_TASKS } from "./sessions.js";

/** @param {string} text @returns {Uint8Array<ArrayBuffer>} */
const fromBase64 = (text) => new Uint8Array(Buffer.from(text, "base64"));

/** @param {Uint8Array} bytes @returns {string} */
const toBase64 = (bytes) => Buffer.from(bytes).toString("base64");

/** @param {any} one @returns {boolean} */
const isError = (one) => one.prototype instanceof errors.HybridError;

/** @type {Record<string, (one: any) => unknown>} */
const TASKS = {
  ...CHECKPOINT_TASKS,
  ...DATA_TASKS,
  ...RUNNER_TASKS,
  ...SESSION_TASKS,
  errors: () => {
    const classes = Object.values(errors).filter((one) => one === errors.HybridError || isError(one));
    return Object.fromEntries(classes.map((/** @type {any} */ one) => [one.title, one.exitCode]));
  },
  stable_json: (value) => [stableJson(value), stableHash(value)],
  canonical: (value) => `${stableJson(value, "  ")}\n`,
  repr: ({ value, longest }) => [repr(value), repr(value, longest), typeName(value)],
  unknown_name: ({ name, known }) => unknownName("thing", name, known),
  values: (value) => {
    const number = toNumber(value);
    return [Number.isNaN(number) ? null : number, optionalText(value), parseTime(value)];
  },
  loss_scaler: ({ config, overflow, restored }) => {
    const scaler = new DynamicLossScaler(config);
    if (restored) scaler.restore(restored);
    const trace = overflow.map((/** @type {boolean} */ flag) => {
      const used = scaler.stepScale();
      scaler.update(flag);
      return [used, scaler.state()];
    });
    return [scaler.powersOfTwo(), trace];
  },
  learning_rate: ({ optimizer, steps }) => steps.map((/** @type {number} */ t) => learningRate(optimizer, t)),
  optimizer_table: ({ optimizer, first, count }) => {
    const settings = optimizerSettings(optimizer);
    return [settings, rows(settings, first, count)];
  },
  entry_error: (entry) => GENERATIONS.map((generation) => entryError(entry, generation)),
  build_entry: ({ run, steps, settings, context, times }) => {
    const watch = new Telemetry(resolveTelemetry(settings));
    return steps.map((/** @type {any} */ step) =>
      buildEntry(run, step, snapshot(progressContext(context), step.step, times), watch),
    );
  },
  telemetry: ({ settings, entries, steps, restored }) => {
    const resolved = resolveTelemetry(settings);
    const watch = new Telemetry(resolved);
    if (restored) watch.restore(restored);
    const raised = entries.map((/** @type {any} */ entry) => alerts(resolved, entry));
    const seen = steps.map((/** @type {any} */ [loss, time, epoch]) => watch.observe(loss, time, epoch));
    return [resolved, raised, seen, watch.state()];
  },
  progress: ({ options, distill, points }) => {
    const context = progressContext(options, distill);
    return points.map((/** @type {any} */ [step, times]) => progressMetrics(snapshot(context, step, times)));
  },
  facts: ({ options, training, variables, info, process: processFacts, navigator, memory }) => [
    resolveSeed(options, training),
    buildProvenance(options, variables),
    gpuAdapter(info),
    javascriptEnvironment({ ...options, gpuAdapterInfo: info }, processFacts, navigator),
    heapStats(memory),
  ],
  identity: ({ options, training }) => {
    const identity = checkpointIdentity(options, training);
    return [identity, comparedFields(identity), forceResumeSource(options)];
  },
  fingerprint: ({ saved, current, accepted }) => [
    differences(saved, current),
    formatTable(differences(saved, current)),
    identityHashes(saved),
    requireAgreement(saved, current, accepted),
  ],
  record: ({ record, expected }) => {
    const found = [...tensors(record)].map(({ key, role, dtype, shape, data }) => {
      return [key, role, dtype, shape, toBase64(data)];
    });
    requireExpected(record, expected);
    return [checkpointHash(record), found];
  },
  philox: ({ counter, key }) => philox4x32(counter, key),
  stream_key: ({ seed, name }) => streamKey(BigInt(seed), name),
  initial: ({ seed, name, count, std }) => toBase64(new Uint8Array(normal(BigInt(seed), name, count, std).buffer)),
  permute: ({ n, key, indices }) => indices.map((/** @type {number} */ index) => permute(index, n, key)),
  samples: ({ seed, first, count, n }) => samples(BigInt(seed), first, count, n),
  dropout: ({ seed, site, step, sample, rate, count }) => [
    ...keepMask(dropoutKey(BigInt(seed), site), { step, sample }, rate, count),
  ],
  strict_json: (text) => {
    try {
      return { value: parse(fromBase64(text)) };
    } catch (error) {
      if (error instanceof StrictJsonError) return { refused: [error.kind, error.key] };
      throw error;
    }
  },
  write_safetensors: async ({ tensors: given, metadata }) => {
    /** @type {Uint8Array[]} */
    const pieces = [];
    const specs = given.map((/** @type {any} */ { bytes, ...spec }) => ({ ...spec, bytes: fromBase64(bytes) }));
    const result = await write((bytes) => void pieces.push(bytes), specs, metadata);
    return [toBase64(Buffer.concat(pieces)), result.digest, Object.fromEntries(result.sha256)];
  },
  read_safetensors: async (data) => {
    try {
      const { header, sha256 } = await readBytes("file", fromBase64(data));
      return {
        entries: header.entries,
        metadata: header.metadata && Object.fromEntries(header.metadata),
        sha256: Object.fromEntries(sha256),
      };
    } catch (error) {
      if (error instanceof SafetensorsError) return { refused: [error.category, error.message] };
      throw error;
    }
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const { task, cases } = JSON.parse(line);
  const answers = [];
  for (const one of cases) {
    try {
      answers.push({ value: await TASKS[task](one) });
    } catch (error) {
      answers.push({ error: error instanceof Error ? [error.name, error.message] : ["thrown", String(error)] });
    }
  }
  process.stdout.write(`${JSON.stringify(answers)}\n`);
}
