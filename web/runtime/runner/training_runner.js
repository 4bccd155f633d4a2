/**
 * @file The training loop.
 *
 * A `TrainingRunner` prepares a run, and a `Trainer` takes it from its first step to its last: steps, validation, samples,
 * checkpoints. The session does all arithmetic; the loop decides when. It ends in one of these ways: finished, stopped on
 * request (saved), an alert, a refusal, a failure. A device that is lost is replaced, and the run goes on from its last
 * checkpoint. May import: everything.
 */

import { restoreCheckpoint } from "../checkpoint/loading.js";
import { CONFIG_FILE } from "../checkpoint/manifest.js";
import { isoTime } from "../contracts/values.js";
import { BatchPlan, DataLoader } from "../data/loader.js";
import { NoAdapter } from "../device.js";
import { AlertRaised, ConfigError, DataContractError, DeviceLost, describe, NonFiniteError } from "../errors.js";
import { runFacts, runRecord } from "./announce.js";
import { Control } from "./control.js";
import { Entries } from "./entries.js";
import { evaluate, sample } from "./evaluation.js";
import { Meter } from "./meter.js";
import { applyOptions } from "./options.js";
import { alerted, alreadyFinished, ended, errorFacts, lacksItsEnd, statusOf } from "./outcome.js";
import { agree, checkModel, findStart } from "./resume.js";
import { Saver } from "./saving.js";
import { setUpProgress } from "./set_up.js";

/** @import { Batch } from "../batch.js" */
/** @import { Entry } from "../contracts/metrics.js" */
/** @import { PreparedData } from "../data/prepare.js" */
/** @import { Progress } from "../executor.js" */
/** @import { PlanSession } from "../session.js" */
/** @import { CheckpointRef, Job } from "./job.js" */
/** @import { Hooks, RunOptions } from "./options.js" */
/** @import { Outcome } from "./outcome.js" */
/** @import { Facts, RunPlace } from "./place.js" */
/** @import { Start } from "./resume.js" */

/**
 * What the loop asks of a session; a `PlanSession` is one.
 *
 * @typedef {Pick<PlanSession, "begin" | "accumulate" | "inspect" | "apply" | "pollMetrics" | "evaluate" | "generate"
 *   | "exportState" | "restore" | "plan" | "shapes" | "describe" | "memory" | "close"> & {device: {destroy: () => void}}}
 *   TrainingSession
 */

/**
 * openSession opens a device and makes a session on it, for the job's seed; the runner closes both. It is called again
 * after a device was lost. Its `progress` throws StopRequested once a stop is wanted.
 *
 * @typedef {object} Parts
 * @property {Job} job
 * @property {RunPlace} place
 * @property {PreparedData} data
 * @property {(job: Job, progress: Progress) => Promise<TrainingSession>} openSession
 * @property {() => number} [clock] monotonic seconds
 * @property {() => number} [now] milliseconds since 1970
 */

const ADAPTER_ATTEMPTS = 5;
const ADAPTER_PAUSE_MS = 500;

/**
 * A run that could begin. audits: accepted changes, for its record.
 *
 * @typedef {Required<Parts> & {control: Control, hooks: Hooks, start: Start | null, audits: Facts[]}} Prepared
 */

/** One run in this process: `run` once; `pause`, `resume`, `save` and `stop` at any time. */
export class TrainingRunner {
  #parts;
  #control;
  #begun = false;

  /** @param {Parts} parts */
  constructor({ job, place, data, openSession, clock = () => performance.now() / 1000, now = Date.now }) {
    this.#parts = { job, place, data, openSession, clock, now };
    this.#control = new Control(() => place.stop(), job.config.run.maxHours, clock);
  }

  /**
   * Train, and say how it ended. Errors are thrown after the record says so; an alert that ends the run is an outcome.
   *
   * @param {RunOptions} [options]
   * @returns {Promise<Outcome>}
   * @throws {ContractMismatch | CheckpointCorrupt | CheckpointNotFound | ConfigError | DataContractError | LimitExceeded}
   * @throws {DeviceLost} too often
   * @throws {StopRequested} before there was anything to save
   */
  async run(options = {}) {
    if (this.#begun) throw new ConfigError("TrainingRunner: a runner runs once; make another one");
    this.#begun = true;
    const { place, now } = this.#parts;
    /** @type {Trainer | null} */
    let trainer = null;
    try {
      const prepared = await this.#prepare(options);
      const { steps } = prepared.job;
      const step = prepared.start?.manifest.progress.step ?? 0;
      if (step < steps || lacksItsEnd(place.facts, step, steps)) trainer = new Trainer(prepared);
      const outcome = await (trainer?.run() ?? alreadyFinished(place, step, steps));
      place.event("end", { ...outcome });
      return outcome;
    } catch (error) {
      // A refusal before the first step leaves the record of an earlier run as it is; so does a longer run that never
      // began, of one that is finished.
      if (place.facts === null || (trainer && place.facts.status !== "finished")) {
        const facts = { status: statusOf(error), message: describe(error).message, updatedAt: isoTime(now()) };
        await place.record(facts).catch(() => {}); // the error that ended the run stays in front
      }
      place.event("error", errorFacts(error));
      if (trainer && error instanceof AlertRaised) return alerted(place, error, trainer.step, trainer.steps);
      throw error;
    }
  }

  /** Stand still after the step under way, until `resume`. The device stays as it is. */
  pause() {
    this.#control.paused = true;
  }

  resume() {
    this.#control.paused = false;
  }

  /** Save before the next step, or before a pause. */
  save() {
    this.#control.requestSave();
  }

  /** Save and end. @param {string} [reason] */
  stop(reason = "asked to stop") {
    this.#control.request(reason);
  }

  /** @param {RunOptions} options @returns {Promise<Prepared>} */
  async #prepare(options) {
    const { place, data, now } = this.#parts;
    const { job, hooks, resumeFrom, force } = applyOptions(this.#parts.job, options);
    const { fingerprint } = job.fingerprints.dataset;
    if (data.train.fingerprint !== fingerprint) {
      throw new DataContractError(
        `the training samples have the fingerprint ${data.train.fingerprint}, but the job is for ${fingerprint}`,
      );
    }
    const start = await findStart(place, resumeFrom);
    const audits = start ? agree(start.manifest, job, force, now) : [...job.resumeAudits];
    return { ...this.#parts, job, control: this.#control, hooks, start, audits };
  }
}

/** A prepared run on its way. */
class Trainer {
  step = 0; // data steps done; they count on when the optimizer skips
  #targetTokens = 0; // seen in all steps of the run
  #openedAt = 0; // the step of the state that the session began with
  #savedAt = 0; // seconds of the clock
  #validated = 0; // the newest step that has a validation row
  #sampled = 0;
  #recoveries = 0;
  /** @type {TrainingSession | null} */
  #session = null;
  /** @type {Record<string, any>} */
  #describe = {};
  /** @type {Entries} */
  #entries;

  /** @param {Prepared} prepared */
  constructor(prepared) {
    const { job, place, data, clock } = prepared;
    this.prepared = prepared;
    this.config = job.config;
    this.place = place;
    this.control = prepared.control;
    this.steps = job.steps;
    this.meter = new Meter(clock);
    const { batchSize, microbatchSize, prefetch } = this.config.data;
    this.plan = new BatchPlan({
      size: job.trainSamples,
      globalBatch: batchSize,
      seed: this.config.run.seed,
      limit: job.limit,
    });
    this.loader = new DataLoader(data.train, this.plan, microbatchSize, { prefetch });
    this.saver = new Saver(
      (snapshot) => place.checkpoints.save(snapshot),
      (ref, snapshot) => this.#saved(ref, snapshot.progress),
    );
    this.#entries = this.#newEntries({});
  }

  // The loop

  /** From the starting checkpoint to the end, over as many devices as it takes. */
  async run() {
    try {
      return await this.#run();
    } finally {
      this.loader.close();
      await this.saver.wait().catch(() => {}); // what ended the run stays in front
    }
  }

  async #run() {
    for (;;) {
      try {
        // Compiling for a minute says nothing about the steps to come.
        const session = await this.meter.stopped(() => this.#openSession());
        return await this.#loop(session);
      } catch (error) {
        if (!(error instanceof DeviceLost)) throw error;
        this.#countRecovery(error);
      } finally {
        this.#closeSession();
      }
    }
  }

  /** @param {TrainingSession} session @returns {Promise<Outcome>} */
  async #loop(session) {
    for (;;) {
      await this.#saveIfDue(session);
      await this.#evaluateIfDue(session);
      await this.#sampleIfDue(session);
      await this.#waitIfPaused(session);
      if (this.control.reason !== null) return this.#end(session, this.control.reason);
      if (this.step >= this.steps) return this.#end(session, null);
      await this.#trainStep(session);
    }
  }

  /** @param {TrainingSession} session */
  async #trainStep(session) {
    const dataStep = this.step + 1;
    const judges = this.config.telemetry.alerts.failOnAlert;
    const { batches, targetTokens } = await this.#batches(dataStep);
    this.#entries.begin(dataStep, this.#where(dataStep, targetTokens), session.memory());
    await session.begin({ dataStep, targetTokens, microbatches: batches.length, zLoss: this.#zLoss(dataStep) });
    for (const batch of batches) await session.accumulate(batch);
    if (judges) await this.#entries.judge(await session.inspect());
    await session.apply();
    this.step = dataStep;
    this.#targetTokens += targetTokens;
    this.meter.step(targetTokens);
    try {
      await this.#entries.record(await session.pollMetrics({ wait: judges }));
    } catch (error) {
      if (error instanceof AlertRaised) {
        await this.#save(session);
        await this.saver.wait();
      }
      throw error;
    }
    await this.saver.report();
  }

  /** @param {TrainingSession} session */
  async #evaluateIfDue(session) {
    const { validation } = this.prepared.data;
    const { every, batches } = this.config.evaluation;
    if (!validation || !this.#due(every) || this.#validated >= this.step) return;
    const size = this.loader.microbatchSize;
    const result = await this.#apart(session, "evaluate", () =>
      evaluate(session, validation, size, batches, () => this.control.reason),
    );
    if (!result) return; // a stop was requested; the evaluation is made up for when the run goes on
    const row = { step: this.step, split: "validation", ...result };
    await this.place.validation.append(row);
    this.#validated = this.step;
    this.place.event("validation", row);
  }

  /** @param {TrainingSession} session */
  async #sampleIfDue(session) {
    const settings = this.config.sampling;
    if (!this.#due(settings.every) || this.#sampled >= this.step) return;
    this.#sampled = this.step;
    const { tokenizer } = this.prepared.data;
    try {
      const text = await this.#apart(session, "sample", () =>
        sample(session, tokenizer, settings, () => this.control.reason),
      );
      if (text !== null) this.place.event("sample", { step: this.step, prompt: settings.prompt, text });
    } catch (error) {
      if (!(error instanceof DataContractError || error instanceof NonFiniteError)) throw error;
      this.#note(`no sample at step ${this.step}: ${error.message}`);
    }
  }

  /** @param {TrainingSession} session */
  async #saveIfDue(session) {
    const { every, everyHours } = this.config.checkpoint;
    const waited = this.prepared.clock() - this.#savedAt;
    const due = (every && this.step % every === 0) || (everyHours && waited >= everyHours * 3600);
    if (this.control.takeSave() || due) await this.#save(session);
  }

  /** @param {TrainingSession} session */
  async #save(session) {
    if (this.step === this.#openedAt || this.saver.holds(this.step)) return; // nothing new
    await this.#apart(session, "save", async () => {
      const state = await session.exportState();
      await this.saver.save({
        state,
        scaler: state.scaler,
        progress: this.#progress(),
        ...this.#identity(),
        environment: this.#entries.environment,
        session: this.#entries.state(),
      });
      await this.#record({});
    });
    this.#savedAt = this.prepared.clock();
  }

  /**
   * @param {TrainingSession} session
   * @param {string | null} reason to stop
   */
  async #end(session, reason) {
    await this.#save(session);
    await this.#entries.record(await session.pollMetrics({ wait: true }));
    await this.saver.wait();
    const outcome = ended(this.place, this.step, this.steps, reason);
    await this.#record({ status: outcome.status, message: outcome.message });
    return outcome;
  }

  /** @param {TrainingSession} session */
  async #waitIfPaused(session) {
    if (!this.control.paused) return;
    await this.#saveIfDue(session);
    await this.saver.wait(); // whoever waits may be ended
    await this.#entries.record(await session.pollMetrics({ wait: true }));
    this.#note(`paused after step ${this.step}`);
    await this.meter.stopped(() => this.control.untilResumed());
    this.#note(`going on after step ${this.step}`);
  }

  // Sessions: the first one, and those after a lost device

  /** A session that holds the state this run starts from; after a lost device, its newest checkpoint. */
  async #openSession() {
    const { place, prepared } = this;
    let { start } = prepared;
    if (this.#recoveries) {
      await this.saver.wait();
      if (this.saver.saved) start = await findStart(place);
    } else await place.checkpoints.clean();
    place.event("phase", { phase: "warm-up" });
    const session = await this.#newSession();
    this.#session = session;
    if (start) {
      const { folder, manifest } = start;
      const { files } = await restoreCheckpoint(folder, session, { manifest });
      checkModel(folder.name, files[CONFIG_FILE], prepared.job.checkpointFiles[CONFIG_FILE]);
      place.checkpoints.continueFrom(manifest);
    }
    this.#targetTokens = start?.manifest.progress.targetTokens ?? 0;
    this.step = this.#openedAt = this.#sampled = start?.manifest.progress.step ?? 0;
    this.#savedAt = prepared.clock();
    this.saver.forget();
    const cut = await place.metrics.cut(this.step);
    if (cut) this.#note(`moved ${cut} metrics rows after step ${this.step} to metrics.discarded.jsonl`);
    await place.validation.cut(this.step);
    this.#validated = await place.validation.last();
    this.#describe = session.describe();
    this.#entries = this.#newEntries(start?.manifest.session ?? {});
    await this.#announce(session, start);
    return session;
  }

  /** On a device of its own. A browser whose GPU process has crashed has no adapter until there is a new one. */
  async #newSession() {
    const { place, prepared, control } = this;
    const progress = setUpProgress(place, prepared.clock, () => control.check());
    for (let attempt = this.#recoveries ? 1 : ADAPTER_ATTEMPTS; ; attempt++) {
      try {
        return await prepared.openSession(prepared.job, progress);
      } catch (error) {
        if (!(error instanceof NoAdapter) || attempt === ADAPTER_ATTEMPTS) throw error;
        await new Promise((done) => setTimeout(done, ADAPTER_PAUSE_MS));
      }
    }
  }

  /** @param {DeviceLost} error */
  #countRecovery(error) {
    this.#recoveries++;
    const most = this.config.backend.maxRecoveries;
    if (this.#recoveries > most) {
      throw new DeviceLost(
        `the device was lost ${this.#recoveries} times, and backend.maxRecoveries is ${most}: ${error.message}`,
      );
    }
    this.#note(
      `the device was lost after step ${this.step} (${error.message}); going on from the last checkpoint with a new one ` +
        `(${this.#recoveries} of at most ${most} times)`,
    );
  }

  #closeSession() {
    const session = this.#session;
    this.#session = null;
    try {
      session?.close();
      session?.device.destroy();
    } catch {
      // whatever a lost device answers, it is given up
    }
  }

  // Small things

  /**
   * Whether something that happens every so many steps, and at the end, is due after the current one.
   *
   * @param {number} every
   */
  #due(every) {
    return every > 0 && this.step > 0 && (this.step % every === 0 || this.step === this.steps);
  }

  /**
   * Finish the steps in flight, so that their time counts as training, and do something with the meter stopped.
   *
   * @template T
   * @param {TrainingSession} session
   * @param {string} phase
   * @param {() => Promise<T>} work
   */
  async #apart(session, phase, work) {
    await this.#entries.record(await session.pollMetrics({ wait: true }));
    this.place.event("phase", { phase });
    const result = await this.meter.paused(work);
    this.place.event("phase", { phase: "train" });
    return result;
  }

  /**
   * @param {number} dataStep
   * @returns {Promise<{batches: Batch[], targetTokens: number}>}
   */
  async #batches(dataStep) {
    const { prepareBatch } = this.prepared.hooks;
    const batches = await this.loader.step(dataStep);
    if (!prepareBatch) return { batches, targetTokens: this.loader.targetTokens(dataStep) };
    const changed = [];
    for (const batch of batches) changed.push(await prepareBatch(batch));
    return { batches: changed, targetTokens: changed.reduce((sum, batch) => sum + batch.targetTokens, 0) };
  }

  /** @param {number} step */
  #zLoss(step) {
    const { zLoss, zLossSteps } = this.config.objective;
    return zLossSteps === null || step <= zLossSteps ? zLoss : 0;
  }

  /**
   * @param {number} step
   * @param {number} targetTokens
   */
  #where(step, targetTokens) {
    const { epoch, position } = this.plan.cursor(step - 1);
    const { batchSize, sequenceLength } = this.config.data;
    return {
      epoch,
      batch: Math.floor(position / batchSize) + 1,
      ignoredTargets: batchSize * sequenceLength - targetTokens,
      tokensPerSecond: this.meter.tokensPerSecond,
      stepMilliseconds: this.meter.stepMilliseconds,
    };
  }

  #progress() {
    const { samples, epoch, position } = this.plan.cursor(this.step);
    const { batchSize, sequenceLength } = this.config.data;
    return {
      step: this.step,
      epoch,
      batch: Math.floor(position / batchSize),
      samples,
      tokens: samples * sequenceLength,
      targetTokens: this.#targetTokens,
    };
  }

  /** What a checkpoint says beside the state. */
  #identity() {
    const { job, audits } = this.prepared;
    const { config, runId, hashes, fingerprints, provenance, checkpointFiles } = job;
    return {
      config,
      seed: config.run.seed,
      runId,
      cursor: this.plan.cursor(this.step),
      hashes: { ...hashes, runtimePresetId: null, kernelPathId: this.#describe.kernel_path ?? null },
      fingerprints,
      provenance,
      resumeAudits: audits,
      files: checkpointFiles,
    };
  }

  /** @param {Record<string, unknown>} state of a checkpoint's session */
  #newEntries(state) {
    const { job, place, clock, now } = this.prepared;
    const written = (/** @type {Entry} */ entry) => this.#written(entry);
    return new Entries({ job, place, meter: this.meter, describe: this.#describe, state, clock, now, written });
  }

  /** @param {Entry} entry */
  async #written(entry) {
    const { hooks } = this.prepared;
    const { step, epoch, batch, total_loss } = /** @type {Record<string, number>} */ (entry);
    if (step % this.config.run.logEvery === 0) await hooks.onStep(entry);
    if (step === this.steps || this.plan.cursor(step).epoch > epoch) {
      await hooks.onEpoch({ epoch, steps: batch, loss: total_loss });
    }
  }

  /**
   * @param {CheckpointRef} ref
   * @param {{step: number, epoch: number, batch: number}} progress
   */
  async #saved({ name, checkpointHash }, { step, epoch, batch }) {
    this.place.event("checkpoint", { step, path: this.#path(name) });
    await this.prepared.hooks.onCheckpoint({ key: name, step, epoch, batch, checkpointHash });
  }

  /**
   * @param {TrainingSession} session
   * @param {Start | null} start
   */
  async #announce(session, start) {
    const { job, data } = this.prepared;
    const resumedFrom = start && {
      path: this.#path(start.name),
      checkpointHash: start.manifest.checkpointHash,
      step: start.manifest.progress.step,
    };
    const { environment } = this.#entries;
    await this.#record({ ...runRecord(job, resumedFrom), backend: this.#describe, environment });
    const where = { runDir: this.place.location, step: this.step, trainTokens: data.train.ledger.kept };
    this.place.event("run", runFacts(job, resumedFrom, session, where));
    this.place.event("phase", { phase: "train" });
  }

  /** @param {string} checkpoint */
  #path(checkpoint) {
    return `${this.place.location}/checkpoints/${checkpoint}`;
  }

  /** @param {string} text */
  #note(text) {
    this.place.event("note", { text });
  }

  /** @param {Facts} facts */
  #record(facts) {
    return this.place.record({ ...facts, step: this.step, updatedAt: isoTime(this.prepared.now()) });
  }
}
