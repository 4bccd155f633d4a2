/**
 * @file What the device reports about one step: the rows that `step_finalize.wgsl` writes, and its times.
 *
 * May import: nothing.
 */

// Words of `step_state` that the host writes or reads, and of `eval_state`.
export const OPTIMIZER_STEP = 0;
export const LOSS_SCALE = 1; // f32
export const GROWTH_COUNTER = 2;
export const NLL_ACC = 6; // f32
export const SCALER_ENABLED = 9;

const FLAG_OVERFLOW = 1;
const FLAG_LOSS_OVERFLOW = 2;
const FLAG_NORM_NOT_FINITE = 4;
export const FLOAT32_MAX = 3.4028234663852886e38;

/**
 * Times in milliseconds, null where they were not measured; `timingSource` is "device", "calibration" or "none".
 *
 * @typedef {object} StepTimes
 * @property {number | null} stepTimeMs
 * @property {number | null} forwardMs
 * @property {number | null} backwardMs
 * @property {number | null} optimizerMs
 * @property {string} timingSource
 */

/**
 * @typedef {object} StepNumbers
 * @property {number} dataStep
 * @property {number} loss (nll + zLoss * lse^2) summed over targets / targetTokens; the largest finite float32 if it overflowed
 * @property {number} nll the same without the z-loss term
 * @property {number} targetTokens
 * @property {number | null} gradNorm unscaled, before clipping; null when not finite
 * @property {number} clipFactor what the gradients were multiplied by (1 when not clipped)
 * @property {number} lossScale the scale used in this step
 * @property {number} lossScaleAfter
 * @property {number} growthCounter
 * @property {boolean} overflow a gradient or f16 store was not finite: the optimizer was skipped
 * @property {boolean} lossOverflow
 * @property {number} nanCount
 * @property {number} infCount
 * @property {number} optimizerStep after this step
 */

/** @typedef {StepNumbers & StepTimes} StepResult */

/** @type {Readonly<StepTimes>} */
export const NOT_TIMED = Object.freeze({
  stepTimeMs: null,
  forwardMs: null,
  backwardMs: null,
  optimizerMs: null,
  timingSource: "none",
});

/**
 * @param {Uint32Array<ArrayBuffer>} row 16 words of the ring
 * @param {Readonly<StepTimes>} times
 * @returns {StepResult}
 */
export function decodeRow(row, times) {
  const floats = new Float32Array(row.buffer, row.byteOffset, row.length);
  const flags = row[7];
  const lossOverflow = (flags & FLAG_LOSS_OVERFLOW) !== 0;
  return {
    dataStep: row[0],
    loss: lossOverflow ? FLOAT32_MAX : floats[1],
    nll: lossOverflow ? FLOAT32_MAX : floats[2],
    targetTokens: row[3],
    gradNorm: flags & FLAG_NORM_NOT_FINITE ? null : floats[4],
    clipFactor: floats[5],
    lossScale: floats[6],
    lossScaleAfter: floats[12],
    growthCounter: row[11],
    overflow: (flags & FLAG_OVERFLOW) !== 0,
    lossOverflow,
    nanCount: row[8],
    infCount: row[9],
    optimizerStep: row[10],
    ...times,
  };
}

/**
 * Milliseconds by phase. Browsers blur timestamps (Chromium to a tenth of a millisecond), so that a small step may seem
 * to have taken no time: then nothing was measured.
 *
 * @param {readonly string[]} phases of the passes, in order
 * @param {BigUint64Array<ArrayBuffer>} ticks nanoseconds: begin and end of each pass
 * @returns {Readonly<StepTimes>}
 */
export function stepTimes(phases, ticks) {
  /** @type {Record<string, number>} */
  const byPhase = { forward: 0, backward: 0, "": 0 };
  let begin = ticks[0];
  let end = ticks[0];
  for (let pass = 0; pass < phases.length; pass++) {
    const from = ticks[2 * pass];
    const to = ticks[2 * pass + 1];
    if (to < from) return NOT_TIMED;
    byPhase[phases[pass]] += Number(to - from) / 1e6;
    if (from < begin) begin = from;
    if (to > end) end = to;
  }
  if (!(byPhase.forward > 0 && byPhase.backward > 0)) return NOT_TIMED;
  return {
    stepTimeMs: Number(end - begin) / 1e6,
    forwardMs: byPhase.forward,
    backwardMs: byPhase.backward,
    optimizerMs: byPhase[""],
    timingSource: "device",
  };
}
