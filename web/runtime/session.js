/**
 * @file A training session on WebGPU: keeps the device fed, reads results back without stalling it.
 *
 * A step uploads one small record and, for each microbatch, its tokens; the loss, counts, norm, flags, loss scale and
 * optimizer counter stay on the device, which writes one row per step into a ring (`metrics_ring.js`). May import:
 * everything but data, checkpoint and runner.
 */

import { DynamicLossScaler } from "./contracts/loss_scaler.js";
import { Decoder } from "./decoder.js";
import { ConfigError, DataContractError, HybridError } from "./errors.js";
import { Executor } from "./executor.js";
import { Flight } from "./flight.js";
import { InputUpload } from "./inputs.js";
import { MetricsRing } from "./metrics_ring.js";
import { optimizerSettings } from "./optim/settings.js";
import { TRAINING_PROGRAMS } from "./plan.js";
import { generate } from "./sampling.js";
import { checkOptimizerStep, checkState, SLOTS } from "./state.js";
import {
  readArena,
  readProgress,
  writeDropoutKeys,
  writeInitial,
  writeLossScale,
  writeProgress,
  writeSchedule,
} from "./state_transfer.js";
import { decodeRow, NLL_ACC, NOT_TIMED } from "./step_result.js";
import { StepTimer } from "./timing.js";
import { validateBatch } from "./validate.js";
import { rememberedVariants, warmUp } from "./warm_up.js";

/** @import {Batch} from "./batch.js" */
/** @import {Device} from "./device.js" */
/** @import {Counters, Progress} from "./executor.js" */
/** @import {Plan} from "./plan.js" */
/** @import {GenerateOptions} from "./sampling.js" */
/** @import {SessionState, StateTensor} from "./state.js" */
/** @import {StateProgress, WriteTensor} from "./state_transfer.js" */
/** @import {StepResult} from "./step_result.js" */
/** @import {Storage} from "./storage.js" */
/** @import {Slots} from "./timing.js" */

const STATE_ARENAS = ["moment1", "moment2", "grads", "state", "flags", "metrics", "step"];
const STEP_WORDS = 64;
// A page draws every 16 ms; work that lasts half of that leaves it room. Before the first measurement, few dispatches.
const SUBMIT_SECONDS = 0.008;
const FIRST_DISPATCHES = 16;
const LEAST_DISPATCHES = 4;

/**
 * What is known about an optimizer step before its first microbatch.
 *
 * @typedef {object} StepInfo
 * @property {number} dataStep 1-based index of the step in the run; never repeats, also when the optimizer skips
 * @property {number} targetTokens targets of the whole step over all microbatches, at least 1: the loss denominator
 * @property {number} microbatches how many `accumulate` calls follow
 * @property {number} [zLoss] coefficient of the z-loss at this step
 */

/**
 * Sum over sum: add `lossSum` and `targetTokens` over batches, divide once.
 *
 * @typedef {object} Evaluation
 * @property {number} lossSum
 * @property {number} targetTokens
 * @property {boolean} overflow a weight or an f16 store did not fit, so the loss is not that of the model
 */

/**
 * @typedef {object} SessionOptions
 * @property {Device} device open; `close` leaves it open
 * @property {number | bigint} [seed] 1337
 * @property {number} [metricsInterval] steps between ring readbacks; 1
 * @property {Record<string, string>} [variants] product class to variant name; without it they are timed once per adapter
 * @property {Storage} [storage] where the fastest variants are remembered; the origin's private file system
 * @property {Progress} [progress]
 * @property {() => number} [clock] seconds
 * @property {number} [submitSeconds] the work of one submit at most
 */

/**
 * Trains a plan. A step is `begin`, one `accumulate` per microbatch, then `apply`; calls are awaited in order. Nothing in
 * a step waits for its results, which arrive later through `pollMetrics`. `inspect` is the exception, for runs that must
 * judge a step before applying it.
 *
 * Errors: DeviceLost from any method; LimitExceeded when something does not fit; DataContractError for ids outside the
 * vocabulary or a batch of the wrong shape.
 */
export class PlanSession {
  #executor;
  #timer;
  #ring;
  #flight;
  #inputs;
  #optimizer;
  #seed;
  #submitSeconds;
  #scaler;

  /** @type {StepInfo | null} the step under way */
  #info = null;
  #begun = 0;
  #inspected = false;
  /** @type {string | null} what runs between two steps, and lets none begin */
  #busy = null;
  /** @type {Slots | null} where the device writes down the times of this step */
  #slots = null;
  #calibrating = false;
  /** @type {StepResult[]} */
  #results = [];
  /** @type {Promise<unknown>} the last collection of results: two at once would mix them up */
  #collecting = Promise.resolve();
  #optimizerStep = 0; // known for certain; the device may be ahead by the steps in flight
  #scheduleUsed = 0;
  #stepWords = new Uint32Array(STEP_WORDS);

  /**
   * Use `PlanSession.create`.
   *
   * @param {Executor} executor prepared
   * @param {SessionOptions} options
   */
  constructor(executor, options) {
    const { plan, device } = executor;
    this.plan = plan;
    this.device = device;
    this.model = {
      vocabularySize: Number(plan.model.vocabulary_size),
      contextLength: Number(plan.model.context_length),
    };
    this.#executor = executor;
    this.#seed = options.seed ?? 1337;
    this.#submitSeconds = options.submitSeconds ?? SUBMIT_SECONDS;
    this.#optimizer = optimizerSettings(plan.settings.optimizer);
    this.#scaler = new DynamicLossScaler(plan.settings.lossScaling);
    const clock = options.clock ?? (() => performance.now() / 1000);
    const interval = options.metricsInterval ?? 1;
    this.#timer = new StepTimer(executor, interval, clock);
    this.#ring = new MetricsRing(executor, this.#timer, interval);
    this.#flight = new Flight(() => executor.fence(), clock);
    this.#inputs = new InputUpload(executor);
  }

  /**
   * Allocate, compile and warm up; the session starts with fresh weights of the seed, at step 0.
   *
   * @param {Plan} plan
   * @param {SessionOptions} options
   * @returns {Promise<PlanSession>}
   */
  static async create(plan, options) {
    const { device, progress } = options;
    const executor = await Executor.create(device, plan);
    /** @type {PlanSession | null} */
    let session = null;
    try {
      executor.dispatchesPerSubmit = FIRST_DISPATCHES;
      executor.choices = options.variants ?? (await rememberedVariants(executor, options));
      if (plan.trains) {
        await executor.prepare(TRAINING_PROGRAMS, progress);
        await warmUp(executor, progress);
      }
      session = new PlanSession(executor, options);
      await session.reset();
      return session;
    } catch (error) {
      if (session) session.close();
      else executor.close();
      throw error;
    }
  }

  /** Fresh weights from the seed's streams, zero moments, step 0. */
  async reset() {
    const scaler = new DynamicLossScaler(this.plan.settings.lossScaling).state();
    await this.restore({ optimizerStep: 0, scaler }, (write) => writeInitial(this.plan, this.#seed, write));
  }

  // The step

  /** @param {StepInfo} info */
  async begin(info) {
    this.#requireTraining("begin");
    if (info.targetTokens < 1) {
      throw new DataContractError(`step ${info.dataStep} has no target tokens: its loss would have no meaning`);
    }
    if (info.microbatches < 1) {
      throw new ConfigError(`step ${info.dataStep} has ${info.microbatches} microbatches: expected at least 1`);
    }
    this.#requireIdle("begin");
    if (this.#scheduleUsed >= this.plan.settings.scheduleRows - 1) {
      await this.#collect(true);
      this.#refillSchedule();
    }
    this.#scheduleUsed++;
    const words = this.#stepWords;
    const floats = new Float32Array(words.buffer);
    words[0] = info.dataStep;
    words[1] = info.targetTokens;
    floats[2] = 1 / info.targetTokens;
    floats[3] = info.zLoss ?? 0;
    this.#executor.writeTensor("step_input", words);
    this.#info = info;
    this.#begun = 0;
    this.#slots = this.#timer.begin(this.#passes(info.microbatches));
    this.#calibrating = this.#timer.calibrating(info.dataStep);
  }

  /** How many compute passes a step makes at most: phases are timed apart, and submits end passes. @param {number} microbatches */
  #passes(microbatches) {
    const executor = this.#executor;
    /** @param {string} name */
    const most = (name) => {
      const { dispatches, passes } = executor.size(name);
      return passes + Math.ceil(dispatches / executor.dispatchesPerSubmit) + 1;
    };
    return most("begin") + microbatches * most("forward_backward") + most("optimizer_stats") + most("optimizer_apply");
  }

  /** @param {Batch} batch */
  async accumulate(batch) {
    if (!this.#info) throw new Error("accumulate: begin comes first");
    this.#upload(batch);
    if (this.#calibrating) {
      if (!this.#begun) this.#executor.run("begin");
      await this.#timer.piece("forward", () => this.#run("forward_backward", ["forward"]));
      await this.#timer.piece("backward", () => this.#run("forward_backward", ["backward", ""]));
    } else {
      const stream = this.#executor.stream(this.#slots?.timestamps);
      if (!this.#begun) stream.program(this.#executor.program("begin"));
      stream.program(this.#executor.program("forward_backward"));
      stream.finish();
    }
    this.#begun++;
  }

  /**
   * Run the dispatches of some phases only.
   *
   * @param {string} program
   * @param {readonly string[]} phases
   */
  #run(program, phases) {
    const stream = this.#executor.stream();
    stream.program(this.#executor.program(program), phases);
    stream.finish();
  }

  /** @param {Batch} batch */
  #upload(batch) {
    const { vocabularySize, contextLength } = this.model;
    validateBatch(batch, vocabularySize, contextLength, this.#inputs.shape);
    this.#inputs.write(batch);
  }

  /**
   * Wait for the gradients of the current step and report on them; `apply` follows (or not).
   *
   * @returns {Promise<StepResult>}
   */
  async inspect() {
    const info = this.#requireComplete("inspect");
    if (!this.#inspected) this.#executor.run("optimizer_stats");
    this.#inspected = true;
    return decodeRow(await this.#ring.readRow(info.dataStep), NOT_TIMED);
  }

  async apply() {
    const info = this.#requireComplete("apply");
    if (this.#calibrating) await this.#timer.piece("optimizer", () => this.#finishStep(info));
    else this.#finishStep(info);
    this.#info = null;
    this.#inspected = false;
    if (this.#scaler.enabled && !this.#scaler.powersOfTwo()) await this.#synchroniseScale();
    await this.#flight.bound();
    this.#adaptSubmits();
  }

  /** @param {StepInfo} info */
  #finishStep(info) {
    const stream = this.#executor.stream(this.#slots?.timestamps);
    if (!this.#inspected) stream.program(this.#executor.program("optimizer_stats"));
    stream.program(this.#executor.program("optimizer_apply"));
    const submitted = this.#ring.add(info.dataStep, this.#slots, stream);
    stream.finish();
    this.#flight.add();
    submitted?.();
  }

  /** Submits of about `submitSeconds`, judged by how long a step takes. */
  #adaptSubmits() {
    const { stepSeconds } = this.#flight;
    if (!stepSeconds) return;
    const dispatches = this.#executor.size("forward_backward").dispatches;
    const fitting = Math.floor((this.#submitSeconds / stepSeconds) * dispatches);
    this.#executor.dispatchesPerSubmit = Math.max(LEAST_DISPATCHES, fitting);
  }

  /**
   * Scales that are not powers of two are inexact in float32: the host's scaler decides, at the price of waiting for each
   * step.
   */
  async #synchroniseScale() {
    await this.#collect(true);
    await writeLossScale(this.#executor, this.#scaler.scale);
  }

  /**
   * @param {string} action
   * @returns {StepInfo}
   */
  #requireComplete(action) {
    if (!this.#info || this.#begun !== this.#info.microbatches) {
      const wanted = this.#info?.microbatches ?? 0;
      throw new Error(`${action}: ${this.#info ? this.#begun : 0} of ${wanted} microbatches accumulated`);
    }
    return this.#info;
  }

  /** @param {string} action */
  #requireTraining(action) {
    if (!this.plan.trains) throw new Error(`${action}: this plan was compiled without its training programs`);
  }

  /** @param {string} action */
  #requireIdle(action) {
    this.device.check();
    if (this.#info) throw new Error(`${action}: step ${this.#info.dataStep} is under way; apply it first`);
    if (this.#busy) throw new Error(`${action}: ${this.#busy} has not finished; await it first`);
  }

  /**
   * Run something between two steps.
   *
   * @template T
   * @param {string} action
   * @param {() => Promise<T>} work
   * @returns {Promise<T>}
   */
  async #between(action, work) {
    this.#requireIdle(action);
    this.#busy = action;
    try {
      return await work();
    } finally {
      this.#busy = null;
    }
  }

  // Results

  /**
   * Results that have arrived since the last call, in step order; with `wait`, all of the steps applied so far.
   *
   * @param {{wait?: boolean}} [options]
   * @returns {Promise<StepResult[]>}
   */
  async pollMetrics({ wait = false } = {}) {
    this.device.check();
    await this.#collect(wait);
    const results = this.#results;
    this.#results = [];
    return results;
  }

  /** @param {boolean} wait */
  async #collect(wait) {
    const collected = this.#collecting.then(async () => {
      for (const result of await this.#ring.take(wait)) this.#settle(result);
      if (wait) await this.#flight.drain();
    });
    this.#collecting = collected.catch(() => {});
    await collected;
  }

  /**
   * Replay the step in the host's scaler, which must agree with the device's.
   *
   * @param {StepResult} result
   */
  #settle(result) {
    const scaler = this.#scaler;
    scaler.update(result.overflow && scaler.overflowCheck);
    if (scaler.enabled && scaler.powersOfTwo() && scaler.scale !== result.lossScaleAfter) {
      throw new HybridError(
        `step ${result.dataStep}: the device's loss scale ${result.lossScaleAfter} is not the host's ${scaler.scale}`,
      );
    }
    this.#optimizerStep = result.optimizerStep;
    this.#results.push(result);
  }

  // Evaluation and sampling

  /**
   * @param {Batch} batch
   * @returns {Promise<Evaluation>}
   */
  evaluate(batch) {
    return this.#between("evaluate", async () => {
      const executor = this.#executor;
      await executor.prepare(["evaluate"]);
      this.#upload(batch);
      const half = this.plan.precision === "mixed-f16";
      // The flag of stores, which a step clears when it begins; behind it that of weights, which stands.
      if (half) executor.writeTensor("overflow_flags", new Uint32Array(1), 0);
      executor.run("evaluate");
      const words = await executor.readTensor("eval_state");
      const overflow = half && (await executor.readTensor("overflow_flags")).some(Boolean);
      return { lossSum: new Float32Array(words.buffer)[NLL_ACC], targetTokens: batch.targetTokens, overflow };
    });
  }

  /**
   * Ids that continue a prompt, one by one.
   *
   * @param {readonly number[]} prompt
   * @param {GenerateOptions} [options]
   * @returns {AsyncGenerator<number, void, void>}
   */
  async *generate(prompt, options = {}) {
    const { vocabularySize, contextLength } = this.model;
    const decoder = new Decoder(this.#executor, contextLength);
    await this.#between("generate", () => decoder.prepare());
    const model = {
      prefill: (/** @type {readonly number[]} */ ids) => this.#between("generate", () => decoder.prefill(ids)),
      decode: (/** @type {number} */ id, /** @type {number} */ position) =>
        this.#between("generate", () => decoder.decode(id, position)),
      vocabularySize,
      contextLength,
    };
    yield* generate(model, prompt, options);
  }

  // State

  /** The shapes of the parameters by name. */
  shapes() {
    return Object.fromEntries(this.plan.parameterNames().map((name) => [name, this.plan.tensor(name).shape]));
  }

  /**
   * A host copy of the state after every applied step. No step may begin before it is there.
   *
   * @returns {Promise<SessionState>}
   */
  exportState() {
    return this.#between("exportState", async () => {
      this.#requireTraining("exportState");
      const executor = this.#executor;
      const optimizer = {};
      for (const slot of SLOTS) Object.assign(optimizer, await readArena(executor, slot, `${slot}/`));
      const model = await readArena(executor, "params", "");
      return { model, optimizer, ...(await readProgress(executor, this.#scaler)) };
    });
  }

  /**
   * The part of the state that is not tensors: what `restore` takes.
   *
   * @returns {Promise<StateProgress>}
   */
  exportProgress() {
    return this.#between("exportProgress", () => readProgress(this.#executor, this.#scaler));
  }

  /**
   * A host copy of one tensor: a parameter, or `<slot>/<parameter>`. For checkpoints that are written tensor by tensor.
   *
   * @param {string} name
   * @returns {Promise<StateTensor>}
   */
  exportTensor(name) {
    return this.#between("exportTensor", async () => {
      const bytes = await this.#executor.readTensor(name);
      return { shape: this.plan.tensor(name).shape, data: new Float32Array(bytes.buffer) };
    });
  }

  /**
   * Continue from a state that any runtime exported.
   *
   * @param {SessionState} state
   * @throws {CheckpointCorrupt} when it is not this model's, before anything is replaced
   */
  async importState(state) {
    this.#requireIdle("importState");
    checkState(state, this.shapes());
    await this.restore(state, (write) => {
      for (const tensors of this.plan.trains ? [state.model, state.optimizer] : [state.model]) {
        for (const [name, { data }] of Object.entries(tensors)) write(name, data);
      }
    });
  }

  /**
   * Continue from a state whose tensors `fill` uploads, whole or piece by piece: write(name, values, first element).
   * Moments that it does not write are zero; weights are its duty. If it throws, the session is of no use until another
   * `restore`.
   *
   * @param {StateProgress} progress
   * @param {(write: WriteTensor) => void | Promise<void>} fill
   */
  async restore({ optimizerStep, scaler }, fill) {
    checkOptimizerStep(optimizerStep);
    const restored = new DynamicLossScaler(this.plan.settings.lossScaling);
    restored.restore(scaler);
    await this.#between("restore", async () => {
      const executor = this.#executor;
      await this.#collect(true);
      executor.clear(STATE_ARENAS);
      await fill((name, values, first) => executor.writeTensor(name, values, first));
      if ("load" in this.plan.programs) {
        await executor.prepare(["load"]);
        executor.run("load");
      }
      writeProgress(executor, optimizerStep, restored);
      writeDropoutKeys(executor, this.#seed);
      this.#scaler = restored;
      this.#optimizerStep = optimizerStep;
      this.#results = [];
      this.#refillSchedule();
    });
  }

  /**
   * Rows for the optimizer steps from the last known one on. Uploaded in order with submitted work, so steps in flight
   * keep theirs.
   */
  #refillSchedule() {
    writeSchedule(this.#executor, this.#optimizer, this.#optimizerStep + 1);
    this.#scheduleUsed = 0;
  }

  // About

  /** Adapter, precision, kernel path and the like, for `environment_metadata`. */
  describe() {
    const { precision, hash } = this.plan;
    const { name, vendor, architecture, device, description, isFallbackAdapter } = this.device.info;
    return {
      backend: "browser",
      precision,
      kernel_path: `wgsl-${precision}`,
      plan_hash: hash,
      pipelines: this.#executor.counters.pipelinesCreated,
      variants: { ...this.#executor.choices },
      gpuAdapter: { name, vendor, architecture, device, description, isFallbackAdapter },
    };
  }

  /** Bytes of device memory by arena, and `total`. */
  memory() {
    return this.#executor.memory();
  }

  /** @returns {Counters} what was done and made so far */
  counters() {
    return { ...this.#executor.counters };
  }

  /** Free the session's buffers. Nothing else may be called afterwards. */
  close() {
    this.#executor.close();
    this.#ring.close();
    this.#timer.close();
  }
}
