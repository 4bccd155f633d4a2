/**
 * @file From step results to the metrics stream: an entry for each step, written as it arrives, and a summary for the
 * view.
 *
 * May import: errors, contracts, optim.
 */

import { currentEnvironment } from "../contracts/environment.js";
import { memoryStats } from "../contracts/memory.js";
import { buildEntry } from "../contracts/metrics.js";
import { repr } from "../contracts/names.js";
import { Progress } from "../contracts/progress.js";
import { alerts, resolveTelemetry, Telemetry } from "../contracts/telemetry.js";
import { isFiniteNumber, objectOrEmpty } from "../contracts/values.js";
import { AlertRaised, CheckpointCorrupt, NonFiniteError } from "../errors.js";
import { learningRate } from "../optim/schedules.js";
import { optimizerSettings } from "../optim/settings.js";

/** @import { Entry } from "../contracts/metrics.js" */
/** @import { StepResult } from "../step_result.js" */
/** @import { Job } from "./job.js" */
/** @import { Meter } from "./meter.js" */
/** @import { RunPlace } from "./place.js" */

const MOST_SKIPPED = 100;

/**
 * What the loop knows about a step that the device does not: its place in the data, and how fast training was then.
 *
 * @typedef {object} StepPlace
 * @property {number} epoch
 * @property {number} batch
 * @property {number} ignoredTargets
 * @property {number} tokensPerSecond
 * @property {number} stepMilliseconds
 */

/**
 * @typedef {object} EntriesParts
 * @property {Job} job
 * @property {Pick<RunPlace, "metrics" | "event">} place
 * @property {Meter} meter
 * @property {Record<string, any>} describe the session's description
 * @property {Record<string, unknown>} state `telemetry` and `elapsedMs` of a checkpoint, to go on from
 * @property {() => number} clock monotonic seconds
 * @property {() => number} now milliseconds since 1970
 * @property {(entry: Entry) => unknown} [written] told of each entry; awaited
 */

/** Builds, checks and writes the entries of a session's steps, in step order. */
export class Entries {
  #job;
  #place;
  #meter;
  #written;
  #optimizer;
  #telemetry;
  #progress;
  #facts;
  /** @type {Map<number, StepPlace>} of the steps whose results are still to come */
  #places = new Map();
  #stuck = 0; // skipped steps in a row that no smaller loss scale will help
  /** @type {Record<string, number>} */
  #memory = {};
  /** @type {Entry[]} since the last summary */
  #unreported = [];

  /** @param {EntriesParts} parts */
  constructor({ job, place, meter, describe, state, clock, now, written = () => {} }) {
    const { config, parameters } = job;
    const { maxNorm: _, ...optimizer } = config.optimizer;
    this.#job = job;
    this.#place = place;
    this.#meter = meter;
    this.#written = written;
    this.#optimizer = optimizerSettings({ ...optimizer, scheduler: { enabled: true, ...config.schedule } });
    this.#telemetry = new Telemetry(resolveTelemetry(config.telemetry));
    const { elapsedMs = 0, telemetry } = state;
    if (!isFiniteNumber(elapsedMs) || elapsedMs < 0) {
      throw new CheckpointCorrupt(`session.elapsedMs is ${repr(elapsedMs, 80)}: expected a number of at least 0`);
    }
    if (telemetry !== undefined) this.#telemetry.restore(objectOrEmpty(telemetry));
    const context = { shardIndex: 1, shardCount: 1, stepsPerShard: job.steps };
    this.#progress = new Progress(context, () => clock() * 1000, elapsedMs, now);
    this.#facts = {
      objective: config.objective.type,
      seed: config.run.seed,
      modelId: config.run.name,
      environmentMetadata: currentEnvironment({
        command: "train",
        surface: "browser",
        gpuAdapterInfo: describe.gpuAdapter,
      }),
      totalParamCount: parameters,
      trainableParamCount: parameters,
      trainableGroups: ["decay", "no_decay"],
      kernelPath: describe.kernel_path ?? null,
      buildProvenance: job.provenance,
    };
  }

  get environment() {
    return this.#facts.environmentMetadata;
  }

  /** What a checkpoint keeps; true after every step before it was recorded. */
  state() {
    return { telemetry: this.#telemetry.state(), elapsedMs: this.#progress.elapsedMs };
  }

  /**
   * A step was handed to the session; its result comes later.
   *
   * @param {number} step
   * @param {StepPlace} place
   * @param {Record<string, number>} memory of the device, by arena
   */
  begin(step, place, memory) {
    this.#places.set(step, place);
    this.#memory = memory;
  }

  /**
   * Write the entries of results that have arrived.
   *
   * @param {readonly StepResult[]} results
   * @throws {AlertRaised} after writing, if the run is to end on alerts
   */
  async record(results) {
    for (const result of results) {
      const entry = this.#build(result);
      await this.#write(entry);
      this.#telemetry.check(entry);
      this.#checkDivergence(result);
    }
  }

  /**
   * Look at a step before it is applied. If it raises alerts, write its entry and throw.
   *
   * @param {StepResult} result
   * @throws {AlertRaised}
   */
  async judge(result) {
    const { settings } = this.#telemetry;
    const counters = settings.emitNaNInfCounters ? { nan_count: result.nanCount, inf_count: result.infCount } : {};
    const facts = {
      gradient_norm_unclipped: result.gradNorm,
      ...counters,
      saturation_count: result.clipFactor === 1 ? 0 : 1,
      effective_lr: result.overflow ? null : this.#learningRate(result)[0],
    };
    const raised = alerts(settings, facts);
    if (!raised.length) return;
    await this.record([result]);
    throw new AlertRaised(raised, result.dataStep);
  }

  /**
   * NonFiniteError when step after step is skipped, and the loss scale cannot come down to change that.
   *
   * @param {StepResult} result
   */
  #checkDivergence(result) {
    const stuck = result.overflow && result.lossScaleAfter === result.lossScale;
    this.#stuck = stuck ? this.#stuck + 1 : 0;
    if (this.#stuck < MOST_SKIPPED) return;
    throw new NonFiniteError(
      `the last ${MOST_SKIPPED} steps up to ${result.dataStep} had gradients that are not finite, and were skipped: the ` +
        "run has diverged; go on from an older checkpoint with a lower optimizer.lr",
    );
  }

  /** Of the optimizer step that was due: a skipped one does not count. @param {StepResult} result */
  #learningRate(result) {
    return learningRate(this.#optimizer, result.optimizerStep + (result.overflow ? 1 : 0));
  }

  /** @param {StepResult} result @returns {Entry} */
  #build(result) {
    const { dataStep: step, lossOverflow } = result;
    const place = /** @type {StepPlace} */ (this.#places.get(step));
    this.#places.delete(step);
    const [lr, schedulerIndex, schedulerPhase] = this.#learningRate(result);
    const facts = {
      ...result,
      step,
      epoch: place.epoch,
      batch: place.batch,
      totalLoss: lossOverflow ? null : result.loss,
      nll: lossOverflow ? null : result.nll,
      stepTimeMs: result.stepTimeMs ?? place.stepMilliseconds,
      lr,
      schedulerIndex,
      schedulerPhase,
      ignoredTargets: place.ignoredTargets,
      tokensPerSecond: place.tokensPerSecond || null,
      memoryStats: memoryStats(this.#memory),
    };
    return buildEntry(this.#facts, facts, this.#progress.finishStep(step), this.#telemetry);
  }

  /** @param {Entry} entry */
  async #write(entry) {
    await this.#place.metrics.append(entry);
    this.#unreported.push(entry);
    const step = /** @type {number} */ (entry.step);
    const raised = /** @type {string[]} */ (entry.telemetry_alerts);
    if (step % this.#job.config.run.logEvery === 0 || step === this.#job.steps || raised.length) {
      this.#place.event("step", this.#summary(entry, step));
      this.#unreported = [];
    }
    await this.#written(entry);
  }

  /**
   * The last entry, with the mean loss and the skipped steps since the previous summary.
   *
   * @param {Entry} entry
   * @param {number} step
   */
  #summary(entry, step) {
    const { steps } = this.#job;
    let sum = 0;
    let counted = 0;
    for (const { loss_overflow, total_loss } of this.#unreported) {
      if (loss_overflow) continue;
      sum += /** @type {number} */ (total_loss);
      counted++;
    }
    const raised = this.#unreported.flatMap((other) => /** @type {string[]} */ (other.telemetry_alerts));
    return {
      step,
      steps,
      epoch: entry.epoch,
      loss: counted ? sum / counted : entry.total_loss,
      lr: entry.lr,
      gradNorm: entry.gradient_norm_unclipped,
      lossScale: entry.loss_scale,
      skipped: this.#unreported.filter((other) => other.overflow).length,
      tokensPerSecond: this.#meter.tokensPerSecond,
      stepMs: this.#meter.stepMilliseconds,
      memoryBytes: this.#memory.total ?? 0,
      etaSeconds: this.#meter.etaSeconds(steps - step),
      alerts: [...new Set(raised)].sort(),
    };
  }
}
