/** @file A whole training step in jax-js on WebGPU: forward, backward and AdamW, compiled by `jit`. */

import { blockUntilReady, defaultDevice, init, jit, nn, numpy as np, tree, valueAndGrad } from "@jax-js/jax";

import * as model from "./model.js";

const { BATCH, HEADS, LAYERS, NORM_EPS, OPTIMIZER, TIME, VOCABULARY, WIDTH } = model;

/** jax-js counts references: an operation consumes its arguments, and `.ref` keeps one for later. */
const norm = (x, weight) =>
  x.ref.mul(np.reciprocal(np.sqrt(np.square(x).mean(-1, { keepdims: true }).add(NORM_EPS)))).mul(weight);

function loss(p, ids, targets) {
  let x = np.matmul(nn.oneHot(ids, VOCABULARY), p.tokens.ref).reshape([BATCH, TIME, WIDTH]).add(p.places);
  for (let layer = 0; layer < LAYERS; layer++) {
    const leaf = (name) => p[`${layer}.${name}`];
    const qkv = np.matmul(norm(x.ref, leaf("norm1")), leaf("qkv")).reshape([BATCH, TIME, 3, HEADS, WIDTH / HEADS]);
    const [q, k, v] = [0, 1, 2].map((part) => qkv.ref.slice([], [], part));
    qkv.dispose();
    const attended = nn.dotProductAttention(q, k, v, { isCausal: true }).reshape([BATCH, TIME, WIDTH]);
    x = x.add(np.matmul(attended, leaf("out")));
    x = x.ref.add(np.matmul(nn.gelu(np.matmul(norm(x, leaf("norm2")), leaf("up"))), leaf("down")));
  }
  const logits = np.matmul(norm(x, p.last), np.transpose(p.tokens)).reshape([BATCH * TIME, VOCABULARY]);
  const log = nn.logSoftmax(logits, -1);
  return log.mul(nn.oneHot(targets, VOCABULARY)).sum().mul(-1 / (BATCH * TIME));
}

const step = jit((p, m, v, ids, targets, corrections) => {
  const { lr, beta1, beta2, eps, weightDecay } = OPTIMIZER;
  const [value, grads] = valueAndGrad((q) => loss(q, ids, targets))(tree.ref(p));
  const [first, second] = [corrections.ref.slice(0), corrections.slice(1)];
  const next = { p: {}, m: {}, v: {} };
  for (const name of Object.keys(p)) {
    const g = grads[name];
    next.m[name] = m[name].mul(beta1).add(g.ref.mul(1 - beta1));
    next.v[name] = v[name].mul(beta2).add(np.square(g).mul(1 - beta2));
    const update = next.m[name].ref.mul(first.ref).div(np.sqrt(next.v[name].ref.mul(second.ref)).add(eps));
    const decay = p[name].shape.length > 1 ? weightDecay : 0;
    next.p[name] = p[name].ref.sub(update.add(p[name].mul(decay)).mul(lr));
  }
  first.dispose();
  second.dispose();
  return [next.p, next.m, next.v, value];
});

/** @param {number} steps */
export async function measure(steps) {
  await init("webgpu");
  defaultDevice("webgpu");
  const shapes = model.shapes();
  const arrays = (values) =>
    Object.fromEntries(Object.entries(values).map(([name, data]) => [name, np.array(data).reshape(shapes[name])]));
  const zeros = () => arrays(Object.fromEntries(Object.entries(shapes).map(([n, s]) => [n, new Float32Array(model.sizeOf(s))])));
  const { ids, targets } = model.batch();
  const [inputs, wanted] = [np.array(ids), np.array(targets)];
  let state = [arrays(model.initialValues()), zeros(), zeros()];
  let t = 0;
  return model.timeSteps(steps, 2, async () => {
    t++;
    const corrections = [1 / (1 - OPTIMIZER.beta1 ** t), 1 / (1 - OPTIMIZER.beta2 ** t)];
    const [p, m, v, value] = step(...state, inputs.ref, wanted.ref, np.array(Float32Array.from(corrections)));
    state = [p, m, v];
    const [found] = await value.data();
    await blockUntilReady(state);
    return found;
  });
}
