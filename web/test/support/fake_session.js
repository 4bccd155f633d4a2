/** @file A session that does no arithmetic: a step, an evaluation and an export take fixed times of a clock. */

import { DeviceLost } from "../../runtime/errors.js";

/** @import { Batch } from "../../runtime/batch.js" */
/** @import { StepInfo } from "../../runtime/session.js" */
/** @import { StepResult } from "../../runtime/step_result.js" */

const SHAPES = {
  "model.embed_tokens.weight": [256, 4],
  "model.layers.0.input_layernorm.weight": [4],
  "model.layers.0.self_attn.q_proj.weight": [4, 4],
  "model.layers.0.self_attn.k_proj.weight": [4, 4],
  "model.layers.0.self_attn.v_proj.weight": [4, 4],
  "model.layers.0.self_attn.o_proj.weight": [4, 4],
  "model.layers.0.post_attention_layernorm.weight": [4],
  "model.layers.0.mlp.up_proj.weight": [8, 4],
  "model.layers.0.mlp.down_proj.weight": [4, 8],
  "model.norm.weight": [4],
};

/**
 * lost: asked before each call that talks to the device; the first yes loses it. result: changes what a step reports. late:
 * steps after which results arrive. open: called before a session is made; may throw. evaluation: the loss for each target, and
 * whether a value overflowed.
 *
 * @typedef {object} FakeOptions
 * @property {(call: string, step: number) => boolean} [lost]
 * @property {(result: StepResult) => Partial<StepResult>} [result]
 * @property {number} [late]
 * @property {() => unknown} [open]
 * @property {{loss: number, overflow: boolean}} [evaluation]
 */

/** Its state is the number of applied steps, in every weight. */
export class FakeSession {
  plan = { trains: true };
  model = { vocabularySize: 256, contextLength: 8 };
  device;
  #clock;
  #calls;
  #options;
  #gone = false;
  #done = 0;
  /** @type {StepInfo} */
  #info = { dataStep: 0, targetTokens: 1, microbatches: 1 };
  /** @type {StepResult[]} */
  #results = [];

  /**
   * @param {{seconds: number}} clock
   * @param {string[]} calls what was called is added here
   * @param {FakeOptions} [options]
   */
  constructor(clock, calls, options = {}) {
    this.#clock = clock;
    this.#calls = calls;
    this.#options = options;
    this.device = { destroy: () => void calls.push("destroy") };
    calls.push("open");
  }

  /** @param {string} name @param {unknown} [detail] */
  #call(name, detail) {
    this.#calls.push(detail === undefined ? name : `${name} ${detail}`);
    this.#gone ||= this.#options.lost?.(name, this.#info.dataStep) ?? false;
    if (this.#gone) throw new DeviceLost(`lost in ${name}`);
  }

  /** @param {StepInfo} info */
  async begin(info) {
    this.#info = info;
    this.#call("begin", `${info.dataStep} ${info.targetTokens} ${info.microbatches} ${info.zLoss}`);
  }

  /** @param {Batch} batch */
  async accumulate(batch) {
    this.#call("accumulate", [...batch.sampleIds].join());
  }

  async inspect() {
    this.#call("inspect");
    return this.#result();
  }

  async apply() {
    this.#call("apply");
    this.#clock.seconds += 0.1;
    this.#results.push(this.#result());
    this.#done++;
  }

  async pollMetrics({ wait = false } = {}) {
    this.#call("poll", wait ? "wait" : "now");
    const ready = wait ? this.#results.length : Math.max(0, this.#results.length - (this.#options.late ?? 0));
    return this.#results.splice(0, ready);
  }

  /** @param {Batch} batch */
  async evaluate(batch) {
    this.#call("evaluate");
    this.#clock.seconds += 7;
    const { loss, overflow } = this.#options.evaluation ?? { loss: 2, overflow: false };
    return { lossSum: loss * batch.targetTokens, targetTokens: batch.targetTokens, overflow };
  }

  /** @param {readonly number[]} _ @param {{tokens: number}} options */
  async *generate(_, { tokens }) {
    this.#call("generate");
    this.#clock.seconds += 7;
    for (let i = 0; i < tokens; i++) yield 65;
  }

  async exportState() {
    this.#call("export");
    this.#clock.seconds += 5;
    const filled = (/** @type {string} */ prefix) =>
      Object.entries(SHAPES).map(([name, shape]) => {
        const data = new Float32Array(shape.reduce((size, extent) => size * extent)).fill(this.#done);
        return [prefix + name, { shape, data }];
      });
    const optimizer = Object.fromEntries([...filled("moment1/"), ...filled("moment2/")]);
    return { model: Object.fromEntries(filled("")), optimizer, optimizerStep: this.#done, scaler: {} };
  }

  /**
   * @param {{optimizerStep: number}} progress
   * @param {(write: (name: string, values: Float32Array) => void) => Promise<void>} fill
   */
  async restore({ optimizerStep }, fill) {
    this.#call("restore");
    await fill((name, values) => {
      if (name === "model.norm.weight") [this.#done] = values;
    });
    if (this.#done !== optimizerStep) throw new Error(`restored ${this.#done}, expected ${optimizerStep}`);
  }

  shapes() {
    return SHAPES;
  }

  describe() {
    return { backend: "browser", kernel_path: "none", gpuAdapter: { name: "a fake" } };
  }

  memory() {
    return { total: 64 };
  }

  close() {
    this.#calls.push("close");
  }

  /** @returns {StepResult} */
  #result() {
    const { dataStep, targetTokens } = this.#info;
    /** @type {StepResult} */
    const result = {
      ...{ dataStep, targetTokens, loss: 1 / dataStep, nll: 1 / dataStep, gradNorm: 1, clipFactor: 1, lossScale: 1 },
      ...{ lossScaleAfter: 1, growthCounter: 0, overflow: false, lossOverflow: false, nanCount: 0, infCount: 0 },
      ...{ optimizerStep: dataStep, stepTimeMs: null, forwardMs: null, backwardMs: null, optimizerMs: null },
      timingSource: "none",
    };
    return { ...result, ...this.#options.result?.(result) };
  }
}
