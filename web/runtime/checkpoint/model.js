/**
 * @file The model that a `config.json` of ours describes, and the shapes of its parameters.
 *
 * The member `hybrid` holds the model in our own terms; it alone is read. May import: errors, contracts, strict_json.
 */

import { compareText, ExactFloat, repr } from "../contracts/names.js";
import { isSet } from "../contracts/values.js";
import { CheckpointCorrupt, ConfigError } from "../errors.js";
import { parseExact, StrictJsonError } from "../strict_json.js";

const MAX_CONFIG_BYTES = 16 * 1024 * 1024;
const MAX_LAYERS = 65536; // a schedule of a trillion layers would fill the memory

/**
 * The shape of a decoder, as Python's `ModelConfig` describes it. Widths and counts are in elements.
 *
 * @typedef {object} ModelConfig
 * @property {number} vocabulary_size
 * @property {number} context_length
 * @property {number} layers
 * @property {number} width
 * @property {number} heads
 * @property {number} feed_forward_width
 * @property {number} kv_heads
 * @property {number} head_width
 * @property {string} norm
 * @property {string} positions
 * @property {string} activation
 * @property {boolean} bias
 * @property {boolean} tied_embeddings
 */

const SIZES = /** @type {const} */ ([
  ...["vocabulary_size", "context_length", "layers", "width", "feed_forward_width", "heads", "kv_heads", "head_width"],
]);
const CHOICES = /** @type {const} */ ([
  ["norm", ["rms_norm", "layer_norm"]],
  ["positions", ["rope", "learned"]],
  ["activation", ["swiglu", "gelu", "relu2", "silu"]],
]);
/** @type {Record<string, unknown>} what a member means that is not there */
const DEFAULTS = {
  ...{ kv_heads: 0n, head_width: 0n, norm: "rms_norm", norm_eps: new ExactFloat(1e-5), positions: "rope" },
  ...{ rope_base: new ExactFloat(10000), activation: "swiglu", bias: false, tied_embeddings: false, window: null },
  ...{ dropout: new ExactFloat(0), schedule: [], initializer_range: new ExactFloat(0.02) },
};
const FLOATS = ["norm_eps", "rope_base", "dropout", "initializer_range"];
const REQUIRED = ["vocabulary_size", "context_length", "layers", "width", "heads", "feed_forward_width"];
const KNOWN = [...REQUIRED, ...Object.keys(DEFAULTS)];

/**
 * The model of a `config.json`.
 *
 * @param {string} source the file's name in messages
 * @param {Uint8Array} data
 * @returns {ModelConfig}
 * @throws {CheckpointCorrupt} naming `source`
 */
export function readModelConfig(source, data) {
  if (data.length > MAX_CONFIG_BYTES) {
    throw new CheckpointCorrupt(`${source}: ${data.length} bytes; at most ${MAX_CONFIG_BYTES} are read`);
  }
  try {
    const document = parseExact(data);
    const values = document instanceof Map ? document.get("hybrid") : null;
    if (values instanceof Map) return modelConfig(values);
    throw new CheckpointCorrupt(`${source}: the object 'hybrid' is missing: not the config.json of a checkpoint`);
  } catch (error) {
    if (error instanceof StrictJsonError) throw new CheckpointCorrupt(`${source}: ${error.message}`);
    if (!(error instanceof ConfigError)) throw error;
    throw new CheckpointCorrupt(`${source}: the object 'hybrid' describes no model: ${error.message}`);
  }
}

/**
 * @param {Map<string, unknown>} given exactly as it was written
 * @returns {ModelConfig}
 * @throws {ConfigError} for a model that cannot exist
 */
function modelConfig(given) {
  const unknown = [...given.keys()].filter((key) => !KNOWN.includes(key)).sort(compareText);
  if (unknown.length) {
    throw new ConfigError(
      `model has unknown key(s) ${unknown.join(", ")}: expected ${[...KNOWN].sort(compareText).join(", ")}`,
    );
  }
  const missing = REQUIRED.filter((key) => !given.has(key));
  if (missing.length) throw new ConfigError(`model lacks ${missing.join(", ")}`);
  /** @type {Record<string, any>} */
  const values = { ...DEFAULTS, ...Object.fromEntries(given) };
  if (typeof values.layers === "bigint" && values.layers > MAX_LAYERS) {
    throw new ConfigError(`model.layers is ${values.layers}: expected at most ${MAX_LAYERS}`);
  }
  for (const name of FLOATS) {
    if (typeof values[name] === "bigint") values[name] = new ExactFloat(Number(values[name])); // JSON has no 10000.0
  }
  if (!isSet(values.kv_heads)) values.kv_heads = values.heads;
  const { width, heads } = values;
  if (!isSet(values.head_width) && typeof width === "bigint" && typeof heads === "bigint") {
    values.head_width = width / (heads > 1n ? heads : 1n);
  }
  for (const name of SIZES) {
    if (typeof values[name] !== "bigint" || values[name] < 1n) {
      throw new ConfigError(`model.${name} is ${repr(values[name])}: expected a whole number of at least 1`);
    }
    values[name] = Number(values[name]);
  }
  for (const [name, allowed] of CHOICES) {
    if (!(/** @type {readonly unknown[]} */ (allowed).includes(values[name]))) {
      throw new ConfigError(`model.${name} is ${repr(values[name])}: expected one of ${allowed.join(", ")}`);
    }
  }
  checkRules(values);
  return /** @type {ModelConfig} */ ({
    ...values,
    bias: isSet(values.bias),
    tied_embeddings: isSet(values.tied_embeddings),
  });
}

/** @param {Record<string, any>} values sizes are numbers, the rest is as it was written */
function checkRules(values) {
  const { vocabulary_size, heads, kv_heads, head_width, positions, window, schedule, layers } = values;
  if (vocabulary_size >= 2 ** 32 - 1) {
    throw new ConfigError(
      `model.vocabulary_size is ${vocabulary_size}: token ids are 32 bits and the largest is reserved`,
    );
  }
  if (heads % kv_heads) {
    throw new ConfigError(`model.kv_heads is ${kv_heads}: it must divide model.heads, which is ${heads}`);
  }
  if (positions === "rope" && head_width % 2) {
    throw new ConfigError(`model.head_width is ${head_width}: rotary positions turn pairs, so it must be even`);
  }
  if (window !== null && !(number(window) >= 1)) {
    throw new ConfigError(`model.window is ${repr(window)}: expected at least 1, or none for full attention`);
  }
  const dropout = number(values.dropout);
  if (!(dropout >= 0 && dropout < 1)) {
    throw new ConfigError(`model.dropout is ${repr(values.dropout)}: expected a rate of at least 0 and below 1`);
  }
  for (const name of FLOATS) {
    if (name === "dropout") continue;
    const value = number(values[name]);
    if (!(Number.isFinite(value) && value > 0)) {
      throw new ConfigError(`model.${name} is ${repr(values[name])}: expected a finite number above 0`);
    }
  }
  const used = new Set(Array.isArray(schedule) ? schedule.map(number) : [Number.NaN]);
  if ([...used].some((index) => !Number.isInteger(index) || index < 0 || index >= layers)) {
    throw new ConfigError(
      `model.schedule is ${repr(schedule, 200)}: its entries must be layer indices 0..${layers - 1}`,
    );
  }
  if (used.size && used.size < layers) {
    const unused = Array.from({ length: layers }, (_, index) => index).filter((index) => !used.has(index));
    throw new ConfigError(
      `model.schedule never runs layer(s) ${repr(unused, 200)}: drop them from model.layers or schedule them`,
    );
  }
}

/** @param {unknown} value of the exact reader */
function number(value) {
  if (value instanceof ExactFloat) return value.value;
  return typeof value === "bigint" || typeof value === "boolean" ? Number(value) : Number.NaN;
}

/**
 * Every tensor of a model once, in the order the forward pass meets them: name to shape. Linear weights are [out, in].
 *
 * @param {ModelConfig} cfg
 * @returns {Record<string, number[]>}
 */
export function parameterShapes(cfg) {
  const { width: c, feed_forward_width: f, heads, kv_heads, head_width, vocabulary_size, bias } = cfg;
  /** @type {Record<string, number[]>} */
  const shapes = { "model.embed_tokens.weight": [vocabulary_size, c] };
  if (cfg.positions === "learned") shapes["model.embed_positions.weight"] = [cfg.context_length, c];
  /** @param {string} name @param {number[]} shape @param {boolean} [biased] */
  const add = (name, shape, biased = bias) => {
    shapes[`${name}.weight`] = shape;
    if (biased) shapes[`${name}.bias`] = [shape[0]];
  };
  /** @param {string} name */
  const norm = (name) => add(name, [c], bias && cfg.norm === "layer_norm");
  const [queries, keys] = [heads * head_width, kv_heads * head_width];
  for (let layer = 0; layer < cfg.layers; layer++) {
    const prefix = `model.layers.${layer}`;
    norm(`${prefix}.input_layernorm`);
    add(`${prefix}.self_attn.q_proj`, [queries, c]);
    add(`${prefix}.self_attn.k_proj`, [keys, c]);
    add(`${prefix}.self_attn.v_proj`, [keys, c]);
    add(`${prefix}.self_attn.o_proj`, [c, queries]);
    norm(`${prefix}.post_attention_layernorm`);
    if (cfg.activation === "swiglu") add(`${prefix}.mlp.gate_proj`, [f, c]);
    add(`${prefix}.mlp.up_proj`, [f, c]);
    add(`${prefix}.mlp.down_proj`, [c, f]);
  }
  norm("model.norm");
  if (!cfg.tied_embeddings) shapes["lm_head.weight"] = [vocabulary_size, c];
  return shapes;
}
