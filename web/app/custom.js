/** @file A model of one's own size: one of the page's sizes with other numbers. May import: errors, contracts. */

import { ConfigError } from "../runtime/errors.js";

/** @import { Site, SiteSize } from "./planner.js" */

/** What can be chosen; all whole numbers. @typedef {{layers: number, width: number, heads: number, context: number, batch: number}} Shape */

export const CUSTOM = "custom";

/** The least and most of each, and what it is called. @type {Record<keyof Shape, readonly [number, number, string]>} */
export const SHAPE = {
  layers: [1, 64, "Layers"],
  width: [16, 8192, "Width"],
  heads: [1, 128, "Heads"],
  context: [8, 8192, "Context"],
  batch: [1, 512, "Batch"],
};

/** The shape that a size of the page has. @param {SiteSize} size @returns {Shape} */
export function shapeOf({ precisions }) {
  const { model, data } = precisions.f32.config;
  const { layers, width, heads } = model;
  return { layers, width, heads, context: data.sequenceLength, batch: data.microbatchSize };
}

/**
 * @param {Shape} shape
 * @throws {ConfigError} naming what is wrong, and what would be right
 */
export function checkShape(shape) {
  for (const [key, [least, most, title]] of Object.entries(SHAPE)) {
    const value = shape[/** @type {keyof Shape} */ (key)];
    if (!Number.isInteger(value) || value < least || value > most) {
      const given = Number.isNaN(value) ? "no number" : value;
      throw new ConfigError(`${title} is ${given}: choose a whole number from ${least} to ${most}`);
    }
  }
  const { width, heads } = shape;
  if (width % (2 * heads)) {
    const right = Math.max(1, Math.round(width / (2 * heads))) * 2 * heads;
    throw new ConfigError(`a width of ${width} cannot be shared by ${heads} heads evenly: try ${right}`);
  }
}

/** Inner width of a SwiGLU layer, as the configuration chooses it. @param {number} width */
const innerWidth = (width) => Math.ceil(Math.floor((8 * width) / 3) / 32) * 32;

/**
 * How many numbers such a model learns: `count_parameters` of python/hybrid/models/parameters.py for the page's kind of
 * decoder (RMSNorm, SwiGLU, one table for both ends, no biases).
 *
 * @param {Shape} shape
 * @param {number} vocabulary
 */
export function countParameters({ layers, width }, vocabulary) {
  return vocabulary * width + layers * (4 * width * width + 3 * width * innerWidth(width) + 2 * width) + width;
}

/**
 * A size with its plans still to be compiled: everything but the shape is that of the size of the page that is nearest.
 *
 * @param {Site} site
 * @param {Shape} shape
 * @returns {SiteSize}
 * @throws {ConfigError}
 */
export function customSize(site, shape) {
  checkShape(shape);
  const count = (/** @type {SiteSize} */ size) =>
    countParameters(shape, size.precisions.f32.config.model.vocabularySize);
  const distance = (/** @type {SiteSize} */ size) => Math.abs(Math.log(size.parameters / count(size)));
  const near = site.sizes.reduce((best, size) => (distance(size) < distance(best) ? size : best));
  const { layers, width, heads, context, batch } = shape;
  const model = {
    ...{ layers, width, heads, kvHeads: heads, headWidth: width / heads, feedForwardWidth: innerWidth(width) },
    ...{ contextLength: context, schedule: Array.from({ length: layers }, (_, i) => i) },
  };
  const data = { sequenceLength: context, batchSize: batch };
  /** @type {SiteSize["precisions"]} */
  const precisions = {};
  for (const [precision, { config, contract }] of Object.entries(near.precisions)) {
    precisions[precision] = {
      config: {
        ...config,
        model: { ...config.model, ...model },
        data: { ...config.data, ...data, microbatchSize: batch },
      },
      contract: { ...contract, model: { ...contract.model, ...model }, data: { ...contract.data, ...data } },
      plans: [],
    };
  }
  const files = { ...near.checkpointFiles, "config.json": configFile(near.checkpointFiles["config.json"], model) };
  return {
    ...near,
    name: CUSTOM,
    title: "Custom",
    about: "",
    parameters: count(near),
    checkpointFiles: files,
    precisions,
  };
}

/**
 * config.json of a checkpoint, as hybrid.checkpoint.huggingface writes it for such a model.
 *
 * @param {string} text of another size
 * @param {Record<string, any>} model
 */
function configFile(text, model) {
  const document = JSON.parse(text);
  const own = {
    ...{ context_length: model.contextLength, feed_forward_width: model.feedForwardWidth, heads: model.heads },
    ...{ head_width: model.headWidth, kv_heads: model.kvHeads, layers: model.layers, schedule: model.schedule },
    width: model.width,
  };
  Object.assign(document.hybrid, own);
  Object.assign(document, {
    hidden_size: model.width,
    intermediate_size: model.feedForwardWidth,
    num_hidden_layers: model.layers,
    num_attention_heads: model.heads,
    num_key_value_heads: model.kvHeads,
    head_dim: model.headWidth,
    max_position_embeddings: model.contextLength,
  });
  return `${JSON.stringify(document, null, 2)}\n`; // all keys were there, in order
}
