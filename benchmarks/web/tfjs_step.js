/** @file A whole training step in TensorFlow.js on its WebGPU backend: forward, backward, and Adam with decoupled decay. */

import "@tensorflow/tfjs-backend-webgpu";
import * as tf from "@tensorflow/tfjs-core";
import "@tensorflow/tfjs-core/dist/public/chained_ops/register_all_chained_ops";
import "@tensorflow/tfjs-core/dist/register_all_gradients";

import * as model from "./model.js";

const { BATCH, HEADS, LAYERS, NORM_EPS, OPTIMIZER, TIME, VOCABULARY, WIDTH } = model;
const ROWS = BATCH * TIME;

const norm = (x, weight) => x.mul(tf.rsqrt(x.square().mean(-1, true).add(NORM_EPS))).mul(weight);

// The formula with tanh; the library has no op for it.
const gelu = (x) => x.mul(0.5).mul(tf.tanh(x.add(x.mul(x).mul(x).mul(0.044715)).mul(Math.sqrt(2 / Math.PI))).add(1));

function loss(p, ids, wanted, mask) {
  let x = tf.gather(p.tokens, ids).add(p.places.tile([BATCH, 1])); // [rows, width]
  for (let layer = 0; layer < LAYERS; layer++) {
    const leaf = (name) => p[`${layer}.${name}`];
    const parts = tf.split(tf.matMul(norm(x, leaf("norm1")), leaf("qkv")), 3, -1);
    const [q, k, v] = parts.map((part) => part.reshape([BATCH, TIME, HEADS, WIDTH / HEADS]).transpose([0, 2, 1, 3]));
    const scores = tf.matMul(q, k, false, true).mul(1 / Math.sqrt(WIDTH / HEADS)).add(mask);
    const attended = tf.matMul(tf.softmax(scores), v).transpose([0, 2, 1, 3]).reshape([ROWS, WIDTH]);
    x = x.add(tf.matMul(attended, leaf("out")));
    x = x.add(tf.matMul(gelu(tf.matMul(norm(x, leaf("norm2")), leaf("up"))), leaf("down")));
  }
  const logits = tf.matMul(norm(x, p.last), p.tokens, false, true);
  return tf.losses.softmaxCrossEntropy(wanted, logits);
}

/** @param {number} steps */
export async function measure(steps) {
  await tf.setBackend("webgpu");
  await tf.ready();
  const { lr, beta1, beta2, eps, weightDecay } = OPTIMIZER;
  const values = Object.entries(model.initialValues());
  const shapes = model.shapes();
  const p = Object.fromEntries(values.map(([name, data]) => [name, tf.variable(tf.tensor(data, shapes[name]))]));
  const names = Object.keys(p);
  const { ids, targets } = model.batch();
  const inputs = tf.tensor1d(ids, "int32");
  const wanted = tf.oneHot(tf.tensor1d(targets, "int32"), VOCABULARY).toFloat();
  const mask = tf.tensor2d(
    Float32Array.from({ length: TIME * TIME }, (_, i) => (i % TIME > Math.floor(i / TIME) ? -1e9 : 0)),
    [TIME, TIME],
  );
  const adam = tf.train.adam(lr, beta1, beta2, eps);
  const step = () =>
    tf.tidy(() => {
      const { value, grads } = tf.variableGrads(() => loss(p, inputs, wanted, mask), Object.values(p));
      for (const name of names) if (p[name].rank > 1) p[name].assign(p[name].mul(1 - lr * weightDecay));
      adam.applyGradients(grads);
      return value;
    });
  return model.timeSteps(steps, 2, async () => {
    const value = step();
    const [found] = await value.data();
    value.dispose();
    await p.tokens.data(); // the update is done too
    return found;
  });
}
