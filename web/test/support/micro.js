/** @file A run so small that a test can have many, on a session that does no arithmetic: what the loop is tested with. */

import { MemoryDirectory } from "../../runtime/folders/memory.js";
import { FolderRunPlace } from "../../runtime/runner/place_folder.js";
import { TrainingRunner } from "../../runtime/runner/training_runner.js";
import { ByteTokenizer } from "../../runtime/tokenizers/bytes.js";
import { FakeSession } from "./fake_session.js";

/** @import { Outcome } from "../../runtime/runner/outcome.js" */
/** @import { FolderRunOptions } from "../../runtime/runner/place_folder.js" */
/** @import { Facts } from "../../runtime/runner/place.js" */
/** @import { RunOptions } from "../../runtime/runner/options.js" */
/** @import { Job } from "../../runtime/runner/job.js" */
/** @import { FakeOptions } from "./fake_session.js" */

const LENGTH = 8;
const SAMPLES = 10;

const MODEL = {
  ...{ vocabulary_size: 256, context_length: LENGTH, layers: 1, width: 4, heads: 1, kv_heads: 1, head_width: 4 },
  ...{ feed_forward_width: 8, norm: "rms_norm", norm_eps: 1e-5, positions: "rope", rope_base: 10000.5 },
  ...{ activation: "silu", bias: false, tied_embeddings: true, window: null, dropout: 0.5, schedule: [0] },
  initializer_range: 0.02,
};

/** The resolved settings of a run of 20 steps of 4 samples, of which the data has ten. */
const CONFIG = {
  model: { vocabularySize: 256, contextLength: LENGTH },
  data: { sequenceLength: LENGTH, batchSize: 4, microbatchSize: 2, prefetch: 0 },
  objective: { type: "cross_entropy", zLoss: 0.5, zLossSteps: 2 },
  optimizer: { type: "adamw", lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weightDecay: 0.1, maxNorm: 1 },
  schedule: {
    ...{ type: "cosine_to_min", warmupSteps: 3, totalSteps: 40, stepSize: 1000, gamma: 0.95 },
    ...{ decayShare: 0.2, decayShape: "linear", minLr: 1e-4 },
  },
  precision: { type: "f32" },
  lossScaling: { enabled: false },
  telemetry: {
    ...{ mode: "step", windowSize: 4, emitNaNInfCounters: true },
    alerts: { enabled: false, failOnAlert: false, thresholds: {} },
  },
  checkpoint: { every: 5, keepLast: 0, keepEvery: 0 },
  evaluation: { every: 0, batches: 2 },
  sampling: { every: 0, prompt: "the ", tokens: 8, temperature: 0.8, topK: 0, topP: 1, seed: 1337 },
  backend: { maxRecoveries: 3, deviceProfile: "adapter" },
  run: { name: "micro", seed: 1337, steps: 20, epochs: 1, logEvery: 4, maxHours: null },
};

/** Samples that say which they are: the first id of sample i is i. */
export class CountingSamples {
  constructor(size = SAMPLES, sequenceLength = LENGTH) {
    this.size = size;
    this.sequenceLength = sequenceLength;
    this.vocabularySize = 256;
    this.fingerprint = "f".repeat(64);
    /** @type {number[]} every sample that was read, in order */
    this.read = [];
    this.ledger = /** @type {any} */ ({ kept: size * sequenceLength });
  }

  /** @param {number} index */
  async sample(index) {
    this.read.push(index);
    const row = () => new Uint32Array(this.sequenceLength);
    const ids = row().fill(index);
    return { ids, targets: row().fill(1), positions: row().map((_, i) => i), segmentIds: row().fill(1) };
  }

  /** @param {Iterable<number>} indices */
  targetCounts(indices) {
    return Float64Array.from(indices, () => this.sequenceLength);
  }

  describe() {
    return {};
  }
}

/**
 * @param {Record<string, Record<string, unknown>>} [changes] of the settings, by section
 * @param {Partial<Job>} [rest]
 * @returns {Job}
 */
export function microJob(changes = {}, rest = {}) {
  /** @type {Record<string, any>} */
  const config = structuredClone(CONFIG);
  for (const [section, values] of Object.entries(changes)) config[section] = { ...config[section], ...values };
  const { model, data, objective, optimizer, schedule, precision, lossScaling, run } = config;
  const contract = {
    ...{ model, objective, optimizer, precision, lossScaling },
    data: { sequenceLength: data.sequenceLength, batchSize: data.batchSize },
    schedule: { type: schedule.type, warmupSteps: schedule.warmupSteps, totalSteps: schedule.totalSteps },
    run: run.steps === null ? { seed: run.seed, epochs: run.epochs } : { seed: run.seed },
  };
  const limit = run.steps === null ? run.epochs * SAMPLES : null;
  const hash = "0".repeat(64);
  return {
    format: "hybrid.job",
    version: 1,
    config,
    steps: limit === null ? run.steps : Math.ceil(limit / data.batchSize),
    limit,
    trainSamples: SAMPLES,
    fingerprints: {
      dataset: { fingerprint: "f".repeat(64), samples: SAMPLES },
      tokenizer: { kind: "bytes", vocabularySize: 256 },
      contract,
    },
    hashes: { configHash: hash, datasetHash: hash, tokenizerHash: hash, optimizerHash: hash },
    runId: "micro-run",
    resumeAudits: [],
    provenance: { commitHash: null, buildId: "7", buildTimestamp: null },
    checkpointFiles: { "config.json": JSON.stringify({ hybrid: MODEL }), "generation_config.json": "{}" },
    resume: null,
    lastSequence: 0,
    parameters: 1234,
    ...rest,
  };
}

/**
 * @typedef {object} MicroRun
 * @property {MemoryDirectory} [folder] where the run lies; a new one
 * @property {Record<string, Record<string, unknown>>} [config] changes of the settings
 * @property {FakeOptions} [session] how the sessions behave
 * @property {RunOptions} [options]
 * @property {(kind: string, facts: Facts, runner: TrainingRunner, report: Report) => void} [watch]
 * @property {FolderRunOptions} [place]
 * @property {string} [fingerprint] of the training samples, if not the job's
 */

/**
 * A clock, and what happened in a run: its events, and each call of its sessions.
 *
 * @typedef {object} Report
 * @property {MemoryDirectory} folder
 * @property {[kind: string, facts: Facts][]} events
 * @property {string[]} calls
 * @property {CountingSamples} train
 * @property {Outcome | null} outcome
 * @property {Error | null} error
 */

/** @param {MicroRun} [run] @returns {Promise<Report>} */
export async function microRun({ folder = new MemoryDirectory("run"), config = {}, ...rest } = {}) {
  const job = microJob(config);
  const clock = { seconds: 1000 };
  /** @type {Report} */
  const report = { folder, events: [], calls: [], train: new CountingSamples(), outcome: null, error: null };
  /** @type {TrainingRunner | null} */
  let runner = null;
  const place = await FolderRunPlace.open(folder, job.config, {
    now: () => 1.7e12 + clock.seconds * 1000,
    watch: (kind, facts) => {
      report.events.push([kind, facts]);
      if (runner) rest.watch?.(kind, facts, runner, report);
    },
    ...rest.place,
  });
  report.train.fingerprint = rest.fingerprint ?? report.train.fingerprint;
  runner = new TrainingRunner({
    job,
    place,
    data: /** @type {any} */ ({
      store: null,
      tokenizer: new ByteTokenizer(),
      train: report.train,
      validation: new CountingSamples(6),
    }),
    openSession: async (_, progress) => {
      progress("compiling kernels", 0, 3);
      await rest.session?.open?.();
      return /** @type {any} */ (new FakeSession(clock, report.calls, rest.session));
    },
    clock: () => clock.seconds,
    now: () => 1.7e12 + clock.seconds * 1000,
  });
  try {
    report.outcome = await runner.run(rest.options);
  } catch (error) {
    report.error = /** @type {Error} */ (error);
  }
  await place.close();
  return report;
}

/** @param {Report} report @param {string} kind @returns {any[]} the facts of the events of a kind */
export function of(report, kind) {
  return report.events.filter(([name]) => name === kind).map(([, facts]) => facts);
}

/** @param {MemoryDirectory} folder @param {string} [file] @returns {Promise<any[]>} */
export async function rowsOf(folder, file = "metrics.jsonl") {
  if ((await folder.size(file)) === null) return [];
  const text = new TextDecoder().decode(await folder.read(file));
  return text
    .split("\n")
    .filter(Boolean)
    .map((line) => JSON.parse(line));
}

/** @param {MemoryDirectory} folder @returns {Promise<any>} */
export async function recordOf(folder) {
  return JSON.parse(new TextDecoder().decode(await folder.read("run.json")));
}

/** @param {MemoryDirectory} folder @returns {Promise<string[]>} the names of the checkpoints */
export async function saved(folder) {
  return (await folder.directory("checkpoints")).folders();
}
