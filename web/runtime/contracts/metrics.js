/**
 * @file Metrics entries: what one training step reports, and the check that an entry keeps the schema (version 1).
 *
 * Two generations of the mirrored runner validate entries. They differ in the name of one field (`runtime_preset`,
 * `runtime_profile`), in one objective and in two counts. Entries made here carry both names, so both accept them.
 * `docs/formats/metrics.md` describes every field.
 */

import { ContractMismatch } from "../errors.js";
import { repr } from "./names.js";
import { progressMetrics } from "./progress.js";
import { alerts, MODES } from "./telemetry.js";
import { isFiniteNumber, isInteger, isObject } from "./values.js";

/** @import { Snapshot } from "./progress.js" */
/** @import { Telemetry } from "./telemetry.js" */
/** @typedef {Record<string, unknown>} Entry */
/** @typedef {"v1" | "v1_profile"} Generation */

export const SCHEMA_VERSION = 1;
export const LARGEST_FLOAT32 = 3.4028234663852886e38;

export const PRESET = "v1"; // the generation with runtime_preset
export const PROFILE = "v1_profile"; // the generation with runtime_profile
/** @type {readonly Generation[]} */
export const GENERATIONS = [PRESET, PROFILE];

/** @type {Readonly<Record<Generation, readonly string[]>>} */
export const OBJECTIVES = {
  [PRESET]: ["cross_entropy", "ul_stage1_joint", "ul_stage2_base", "kd", "triplet"],
  [PROFILE]: ["cross_entropy", "causal_lm_cross_entropy", "ul_stage1_joint", "ul_stage2_base", "kd", "triplet"],
};

// Numbers that an objective must report.
const UL_NUMBERS = [
  ...["lambda", "loss_total", "loss_prior", "loss_decoder", "loss_recon", "latent_bitrate_proxy"],
  ...["coeff_ce", "coeff_prior", "coeff_decoder", "coeff_recon"],
];
const LATENT_NUMBERS = ["clean", "noise", "noisy"].flatMap((kind) => [`latent_${kind}_mean`, `latent_${kind}_std`]);
const KD_NUMBERS = ["loss_kd", "distill_temperature", "distill_alpha_kd", "distill_alpha_ce", "distill_loss_total"];

/** Fields that belong to the objectives; null in the entries of the others. */
export const OBJECTIVE_FIELDS = [
  ...["ul_stage", "lambda", "distill_stage", ...KD_NUMBERS, "distill_loss_ce_aux", "loss_triplet"],
  ...["distill_triplet_margin", "distill_triplet_active_count"],
  ...["distill_stage_a_step_count", "distill_stage_a_kd_mean"],
];

/** The first thing that is wrong with an entry. */
class Refused extends Error {}

/**
 * @param {unknown} entry
 * @param {Generation} [generation] without it the entry must satisfy both
 * @throws {ContractMismatch} with the validator's message when `entry` breaks the schema
 */
export function validateEntry(entry, generation) {
  for (const name of generation === undefined ? GENERATIONS : [generation]) {
    const message = entryError(entry, name);
    if (message !== null) throw new ContractMismatch(message);
  }
}

/**
 * The first fault of an entry in the runner's order and words; null when there is none.
 *
 * @param {unknown} entry
 * @param {Generation} generation
 * @returns {string | null}
 */
export function entryError(entry, generation) {
  try {
    if (!isObject(entry)) throw new Refused("entry must be an object.");
    new Check(entry, generation).all();
  } catch (fault) {
    if (fault instanceof Refused) return `training metrics: ${fault.message}`;
    throw fault;
  }
  return null;
}

class Check {
  /**
   * @param {Entry} entry
   * @param {Generation} generation
   */
  constructor(entry, generation) {
    this.entry = entry;
    this.generation = generation;
  }

  all() {
    this.core();
    this.context();
    this.telemetry();
    this.distillation();
    this.progress();
    this.oneOfOrNull("ul_stage", "stage1_joint", "stage2_base");
    this.objective();
  }

  core() {
    this.integer("schemaVersion", 1);
    this.integer("step", 1);
    this.integer("epoch", 0);
    this.integer("batch", 1);
    const objective = this.text("objective");
    const known = OBJECTIVES[this.generation];
    if (!known.includes(objective)) throw new Refused(`objective must be one of ${known.join(", ")}.`);
    this.allFinite(["total_loss", "step_time_ms", "forward_ms", "backward_ms"]);
    this.allFiniteOrNull(["optimizer_ms", "gradient_norm_unclipped", "gradient_norm_clipped"]);
    for (const name of ["clipped_event_count", "total_param_count", "trainable_param_count"]) {
      this.integerOrNull(name, 0);
    }
    if (this.generation === PROFILE) {
      this.integerOrNull("supervised_token_count", 1);
      this.integerOrNull("ignored_target_count", 0);
    }
  }

  context() {
    this.present("lr", " (nullable)");
    this.allFiniteOrNull(["lr"]);
    this.present("seed");
    this.finite("seed");
    this.present("model_id");
    this.text("model_id");
    for (const name of [this.generation === PRESET ? "runtime_preset" : "runtime_profile", "kernel_path"]) {
      this.present(name, " (nullable)");
      this.textOrNull(name);
    }
    this.present("environment_metadata");
    this.object("environment_metadata");
    for (const name of ["memory_stats", "build_provenance"]) {
      this.present(name, " (nullable)");
      if (this.given(name)) this.object(name);
    }
  }

  telemetry() {
    this.allFiniteOrNull(["effective_lr"]);
    this.integerOrNull("scheduler_index", 0);
    this.textOrNull("scheduler_phase");
    for (const name of ["nan_count", "inf_count", "saturation_count"]) this.integerOrNull(name, 0);
    const mode = this.entry.telemetry_mode;
    if (this.given("telemetry_mode") && !MODES.some((known) => known === mode)) {
      throw new Refused('telemetry_mode must be "step", "window", or "epoch".');
    }
    this.integerOrNull("telemetry_window_size", 1);
    if (this.given("telemetry_alerts")) this.texts("telemetry_alerts");
    this.allFiniteOrNull(["window_loss_avg", "window_step_time_ms_avg"]);
  }

  distillation() {
    this.allFiniteOrNull(["loss_kd", "loss_triplet", "distill_temperature", "distill_alpha_kd", "distill_alpha_ce"]);
    this.allFiniteOrNull(["distill_loss_ce_aux", "distill_loss_total", "distill_triplet_margin"]);
    this.integerOrNull("distill_triplet_active_count", 0);
    this.allFiniteOrNull(["distill_stage_a_step_count", "distill_stage_a_kd_mean"]);
    this.oneOfOrNull("distill_stage", "stage_a", "stage_b");
    for (const name of ["trainable_groups", "frozen_groups"]) {
      if (Object.hasOwn(this.entry, name)) this.texts(name);
    }
  }

  progress() {
    const pairs = [
      ["progress_shard_index", "progress_shard_count"],
      ["progress_step_in_shard", "progress_steps_in_shard"],
      ["progress_global_step", "progress_global_steps"],
    ];
    for (const name of pairs.flat()) this.integerOrNull(name, 1);
    this.allFiniteOrNull(["progress_percent_complete"]);
    const percent = this.number("progress_percent_complete");
    if (percent !== null && !(0 <= percent && percent <= 100)) {
      throw new Refused("progress_percent_complete must be between 0 and 100.");
    }
    for (const name of ["progress_elapsed_ms", "progress_eta_ms"]) {
      this.allFiniteOrNull([name]);
      if ((this.number(name) ?? 0) < 0) throw new Refused(`${name} must be >= 0.`);
    }
    this.textOrNull("progress_eta_iso");
    for (const [index, count] of pairs) {
      const position = this.number(index);
      const length = this.number(count);
      if (position !== null && length !== null && position > length) {
        throw new Refused(`${index} must be <= ${count}.`);
      }
    }
  }

  objective() {
    const objective = this.entry.objective;
    if (objective === "cross_entropy" || objective === "causal_lm_cross_entropy") {
      const name = this.generation === PRESET ? "cross_entropy objective" : "cross-entropy objectives";
      this.mustNotSet("ul_stage", name);
      this.mustNotSet("distill_stage", name);
    } else if (objective === "kd") {
      this.mustNotSet("ul_stage", "kd objective");
      this.allFinite(KD_NUMBERS);
      this.requires("distill_stage", "stage_a", "kd objective");
    } else if (objective === "triplet") {
      this.mustNotSet("ul_stage", "triplet objective");
      this.allFinite(["loss_triplet", "distill_triplet_margin"]);
      this.integer("distill_triplet_active_count", 0);
      this.requires("distill_stage", "stage_b", "triplet objective");
    } else {
      this.mustNotSet("distill_stage", "UL objectives");
      const first = objective === "ul_stage1_joint";
      this.requires("ul_stage", first ? "stage1_joint" : "stage2_base", `${objective} objective`);
      this.allFinite(UL_NUMBERS);
      if (first) {
        this.integer("schedule_step_index", 0);
        this.allFinite(LATENT_NUMBERS);
      } else {
        this.integer("stage1_latent_count", 1);
      }
    }
  }

  /** @param {string} name @returns {boolean} whether the field is there and not null */
  given(name) {
    return this.entry[name] !== undefined && this.entry[name] !== null;
  }

  /** @param {string} name @returns {number | null} a field that was checked to be a number or null */
  number(name) {
    return /** @type {number | null | undefined} */ (this.entry[name]) ?? null;
  }

  /** @param {string} name @param {string} [note] */
  present(name, note = "") {
    if (!Object.hasOwn(this.entry, name)) throw new Refused(`${name} is required${note}.`);
  }

  /** @param {string} name */
  finite(name) {
    if (!isFiniteNumber(this.entry[name])) throw new Refused(`${name} must be a finite number.`);
  }

  /** @param {readonly string[]} names */
  allFinite(names) {
    for (const name of names) this.finite(name);
  }

  /** @param {readonly string[]} names */
  allFiniteOrNull(names) {
    for (const name of names) if (this.given(name)) this.finite(name);
  }

  /** @param {string} name @param {number} least */
  integer(name, least) {
    const value = this.entry[name];
    if (!isInteger(value) || value < least) throw new Refused(`${name} must be an integer >= ${least}.`);
  }

  /** @param {string} name @param {number} least */
  integerOrNull(name, least) {
    if (this.given(name)) this.integer(name, least);
  }

  /** @param {string} name @returns {string} */
  text(name) {
    const value = this.entry[name];
    if (typeof value !== "string" || !value.trim()) throw new Refused(`${name} must be a non-empty string.`);
    return value;
  }

  /** @param {string} name */
  textOrNull(name) {
    if (this.given(name)) this.text(name);
  }

  /** @param {string} name */
  texts(name) {
    const values = this.entry[name];
    if (!Array.isArray(values)) throw new Refused(`${name} must be an array of strings.`);
    for (const [index, value] of values.entries()) {
      if (typeof value !== "string") throw new Refused(`${name}[${index}] must be a string.`);
    }
  }

  /** @param {string} name */
  object(name) {
    if (!isObject(this.entry[name])) throw new Refused(`${name} must be an object.`);
  }

  /** @param {string} name @param {string} first @param {string} second */
  oneOfOrNull(name, first, second) {
    const value = this.entry[name];
    if (this.given(name) && value !== first && value !== second) {
      throw new Refused(`${name} must be "${first}", "${second}", or null.`);
    }
  }

  /** @param {string} name @param {string} who */
  mustNotSet(name, who) {
    if (this.given(name)) throw new Refused(`${who} must not set ${name}.`);
  }

  /** @param {string} name @param {string} value @param {string} who */
  requires(name, value, who) {
    if (this.entry[name] !== value) throw new Refused(`${who} requires ${name}="${value}".`);
  }
}

/**
 * What is the same in every entry of a run. Counts are of elements of distinct tensors, not of padded buffers.
 *
 * @typedef {object} RunFacts
 * @property {string} objective
 * @property {number} seed
 * @property {string} modelId
 * @property {Record<string, unknown>} environmentMetadata
 * @property {number} totalParamCount
 * @property {number} trainableParamCount
 * @property {readonly string[]} trainableGroups
 * @property {readonly string[]} [frozenGroups]
 * @property {string | null} [runtimePreset]
 * @property {string | null} [kernelPath]
 * @property {Record<string, unknown> | null} [buildProvenance]
 */

/**
 * What happened in one step. Times in milliseconds.
 *
 * @typedef {object} StepFacts
 * @property {number} step
 * @property {number} epoch completed epochs
 * @property {number} batch 1-based within the epoch
 * @property {number | null} totalLoss mean over the target tokens; null when it overflowed
 * @property {number} stepTimeMs
 * @property {number} lr of the optimizer step that was due; so are the next two
 * @property {number} schedulerIndex
 * @property {string} schedulerPhase
 * @property {number | null} gradNorm unscaled, before clipping; null when not finite
 * @property {number} clipFactor what the gradients were multiplied by
 * @property {number} lossScale
 * @property {boolean} overflow
 * @property {number} nanCount gradient elements
 * @property {number} infCount gradient elements
 * @property {number} optimizerStep
 * @property {number} targetTokens
 * @property {number} ignoredTargets
 * @property {number | null} [forwardMs] null where nothing measured it (timingSource "none")
 * @property {number | null} [backwardMs]
 * @property {number | null} [optimizerMs]
 * @property {string} [timingSource]
 * @property {number | null} [nll]
 * @property {number | null} [tokensPerSecond]
 * @property {Record<string, unknown> | null} [memoryStats]
 * @property {Record<string, unknown>} [objectiveMetrics]
 */

/**
 * The metrics entry of one step, with every field of the schema; takes the step into the telemetry's windows.
 *
 * An overflow step keeps all of its fields: the optimizer was skipped, so `effective_lr` is null and `lr` says what was
 * due. A loss that overflowed is the largest float32 and marked `loss_overflow`. Objective metrics may fill objective
 * fields and new ones.
 *
 * @param {RunFacts} run
 * @param {StepFacts} step
 * @param {Snapshot} progress
 * @param {Telemetry} telemetry
 * @returns {Entry}
 * @throws {ContractMismatch} when objective metrics would overwrite a field of the step itself, or when the entry
 *   breaks the schema
 */
export function buildEntry(run, step, progress, telemetry) {
  const settings = telemetry.settings;
  const [lossAverage, timeAverage] = telemetry.observe(step.totalLoss, step.stepTimeMs, step.epoch);
  const clipped = step.clipFactor === 1 ? 0 : 1;
  /** @type {Entry} */
  const core = {
    schemaVersion: SCHEMA_VERSION,
    step: step.step,
    epoch: step.epoch,
    batch: step.batch,
    objective: run.objective,
    total_loss: step.totalLoss ?? LARGEST_FLOAT32,
    step_time_ms: step.stepTimeMs,
    forward_ms: step.forwardMs ?? 0,
    backward_ms: step.backwardMs ?? 0,
    optimizer_ms: step.optimizerMs ?? null,
    timing_source: step.timingSource ?? "none",
    effective_lr: step.overflow ? null : step.lr,
    lr: step.lr,
    scheduler_index: step.schedulerIndex,
    scheduler_phase: step.schedulerPhase,
    optimizer_step: step.optimizerStep,
    seed: run.seed,
    model_id: run.modelId,
    runtime_preset: run.runtimePreset ?? null,
    runtime_profile: run.runtimePreset ?? null,
    kernel_path: run.kernelPath ?? null,
    environment_metadata: run.environmentMetadata,
    memory_stats: step.memoryStats ?? null,
    build_provenance: run.buildProvenance ?? null,
    gradient_norm_unclipped: step.gradNorm,
    gradient_norm_clipped: step.gradNorm === null ? null : step.gradNorm * step.clipFactor,
    clipped_event_count: clipped,
    total_param_count: run.totalParamCount,
    trainable_param_count: run.trainableParamCount,
    trainable_groups: [...run.trainableGroups],
    frozen_groups: [...(run.frozenGroups ?? [])],
    supervised_token_count: step.targetTokens,
    ignored_target_count: step.ignoredTargets,
    tokens_per_second: step.tokensPerSecond ?? null,
    nll_loss: step.nll ?? null,
    overflow: step.overflow,
    skipped_optimizer_step: step.overflow,
    loss_overflow: step.totalLoss === null,
    loss_scale: step.lossScale,
    ...progressMetrics(progress),
    telemetry_mode: settings.mode,
    telemetry_window_size: settings.windowSize,
    window_loss_avg: lossAverage,
    window_step_time_ms_avg: timeAverage,
    nan_count: settings.emitNaNInfCounters ? step.nanCount : null,
    inf_count: settings.emitNaNInfCounters ? step.infCount : null,
    saturation_count: clipped,
  };
  const own = step.objectiveMetrics ?? {};
  for (const name of Object.keys(own)) {
    if (Object.hasOwn(core, name) || name === "telemetry_alerts") {
      throw new ContractMismatch(
        `objective metric ${repr(name)} would overwrite a field of the step: give it another name`,
      );
    }
  }
  /** @type {Entry} */
  const entry = { ...core, ...Object.fromEntries(OBJECTIVE_FIELDS.map((name) => [name, null])), ...own };
  entry.telemetry_alerts = alerts(settings, entry);
  validateEntry(entry);
  return entry;
}
