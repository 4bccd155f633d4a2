/**
 * @file The model that hybrid is measured with, for its rivals in the tab: 4 layers, width 128, 4 heads, vocabulary 256,
 * batch 4 x 64; RMS norms, learned positions, GELU, tied embeddings. Weights and the one batch come from a small
 * generator, so that both rivals train on the same numbers.
 */

export const LAYERS = 4;
export const WIDTH = 128;
export const HEADS = 4;
export const VOCABULARY = 256;
export const BATCH = 4;
export const TIME = 64;
export const OPTIMIZER = { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weightDecay: 0.1 };
export const NORM_EPS = 1e-5;

/** Shapes by name. */
export function shapes() {
  /** @type {Record<string, number[]>} */
  const found = { tokens: [VOCABULARY, WIDTH], places: [TIME, WIDTH], last: [WIDTH] };
  for (let layer = 0; layer < LAYERS; layer++) {
    found[`${layer}.norm1`] = [WIDTH];
    found[`${layer}.qkv`] = [WIDTH, 3 * WIDTH];
    found[`${layer}.out`] = [WIDTH, WIDTH];
    found[`${layer}.norm2`] = [WIDTH];
    found[`${layer}.up`] = [WIDTH, 4 * WIDTH];
    found[`${layer}.down`] = [4 * WIDTH, WIDTH];
  }
  return found;
}

/** @param {readonly number[]} shape */
export const sizeOf = (shape) => shape.reduce((product, size) => product * size, 1);

/** @param {number} seed */
function generator(seed) {
  let state = seed >>> 0;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}

/** Initial values by name: gains of 1, and matrices of normal numbers times 0.02. */
export function initialValues() {
  const uniform = generator(1337);
  const normal = () => Math.sqrt(-2 * Math.log(uniform() + 1e-12)) * Math.cos(2 * Math.PI * uniform());
  return Object.fromEntries(
    Object.entries(shapes()).map(([name, shape]) => [
      name,
      Float32Array.from({ length: sizeOf(shape) }, () => (shape.length === 1 ? 1 : 0.02 * normal())),
    ]),
  );
}

/** One fixed batch, so that the loss has to fall. */
export function batch() {
  const uniform = generator(7);
  const rows = Array.from({ length: BATCH }, () =>
    Array.from({ length: TIME + 1 }, () => Math.floor(uniform() * VOCABULARY)),
  );
  return {
    ids: Int32Array.from(rows.flatMap((row) => row.slice(0, -1))),
    targets: Int32Array.from(rows.flatMap((row) => row.slice(1))),
  };
}

/**
 * Times of `steps` warm steps in seconds, after `first` that compile.
 *
 * @param {number} steps
 * @param {number} first
 * @param {() => Promise<number>} step resolves with the loss once the step is done
 */
export async function timeSteps(steps, first, step) {
  const seconds = [];
  const losses = [];
  for (let i = 0; i < first + steps; i++) {
    const began = performance.now();
    losses.push(await step());
    seconds.push((performance.now() - began) / 1e3);
  }
  const last = losses[losses.length - 1];
  if (!(last < losses[0])) throw new Error(`the loss went from ${losses[0]} to ${last}: it does not learn`);
  return { first_step_s: seconds[0], steps_s: seconds.slice(first), losses: [losses[0], last] };
}
