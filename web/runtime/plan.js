/**
 * @file The plan document: reading it from JSON, with every field checked, and its binary constants beside it.
 *
 * A plan holds arenas (lists of buffers, called pages), tensors (slices of pages), kernels (WGSL and constants) and
 * programs (lists of commands). `docs/formats/plan.md` describes it; `plan_check.js` holds it against a device. May
 * import: errors, contracts, sha256.
 */

import { repr } from "./contracts/names.js";
import { stableHash } from "./contracts/stable_json.js";
import { isObject } from "./contracts/values.js";
import { ConfigError } from "./errors.js";
import { sha256, subtleSha256 } from "./sha256.js";

export const FORMAT = "hybrid.plan";
export const VERSION = 1;
/** @type {Readonly<Record<string, number>>} */
export const ITEM_BYTES = Object.freeze({ f32: 4, f16: 2, u32: 4 });
/** The programs of a step. A plan that only evaluates and generates has none of them. */
export const TRAINING_PROGRAMS = Object.freeze(["begin", "forward_backward", "optimizer_stats", "optimizer_apply"]);

/**
 * A named slice of one page. Offset and bytes in bytes.
 *
 * @typedef {object} PlanTensor
 * @property {string} arena
 * @property {number} page
 * @property {number} offset
 * @property {readonly number[]} shape
 * @property {string} dtype "f32", "f16" or "u32"
 * @property {number} elements
 * @property {number} bytes
 */

/**
 * A compute pipeline. `bindings`: [binding number, access] of its storage buffers; binding 0 is the uniform struct,
 * whose scalar types are the letters of `uniforms` ("u" for u32, "f" for f32). `features`: what its WGSL needs enabled
 * besides `f16`, by directives that the executor adds.
 *
 * @typedef {object} PlanKernel
 * @property {string} source
 * @property {string} entry
 * @property {Record<string, number>} constants
 * @property {readonly (readonly [number, string])[]} bindings
 * @property {string} uniforms
 * @property {readonly string[]} features
 */

/**
 * One way to run a dispatch: kernel name, its uniform values, its grid, and what this way is called among the variants
 * of its product class.
 *
 * @typedef {object} Choice
 * @property {string} kernel
 * @property {readonly number[]} uniforms
 * @property {readonly [number, number, number]} workgroups
 * @property {string} variant
 */

/**
 * A range of a page, in bytes, bound to one binding.
 *
 * @typedef {object} BoundSlice
 * @property {string} arena
 * @property {number} page
 * @property {number} offset
 * @property {number} size
 */

/**
 * One dispatch. All choices take the same bindings; the first is the default. `phase` is "forward", "backward" or "".
 *
 * @typedef {object} Dispatch
 * @property {"dispatch"} kind
 * @property {readonly Choice[]} choices
 * @property {readonly BoundSlice[]} bindings
 * @property {string} label
 * @property {string} phase
 * @property {string} productClass "" where there is nothing to choose
 */

/**
 * Zero whole pages of an arena.
 *
 * @typedef {object} Clear
 * @property {"clear"} kind
 * @property {string} arena
 */

/** @typedef {Dispatch | Clear} Command */

/**
 * How a parameter starts: "normal" with standard deviation `std`, "ones" or "zeros".
 *
 * @typedef {object} Initial
 * @property {string} init
 * @property {number} std
 */

/**
 * What the host needs beside the programs.
 *
 * @typedef {object} PlanSettings
 * @property {Record<string, unknown>} optimizer
 * @property {readonly {name: string, decay: boolean, names: readonly string[]}[]} groups
 * @property {Record<string, Initial>} initial
 * @property {Record<string, unknown> | null} lossScaling
 * @property {readonly string[]} dropoutSites
 * @property {number} ringRows
 * @property {number} scheduleRows
 * @property {number} prefillTokens
 */

/**
 * Reads a file of a plan's folder.
 *
 * @typedef {(name: string) => Promise<Uint8Array<ArrayBuffer>>} ReadFile
 */

/** A plan in memory. Made by `Plan.from` or `loadPlan`, which check what they read. */
export class Plan {
  /**
   * @param {Record<string, unknown>} document the JSON, as it was read
   * @param {Map<string, Uint8Array<ArrayBuffer>>} constantData by sha256
   */
  constructor(document, constantData) {
    const root = new Reader(document, "plan");
    const requires = root.member("requires");
    this.requires = { features: requires.texts("features"), limits: requires.record("limits", wholeNumber) };
    this.model = root.object("model");
    this.shape = { B: root.member("shape").whole("B", 1), T: root.member("shape").whole("T", 1) };
    this.precision = root.oneOf("precision", ["f32", "mixed-f16"]);
    this.settings = readSettings(root.member("settings"));
    /** @type {Record<string, readonly number[]>} page sizes by arena */
    this.arenas = root.recordOf("arenas", (arena) => arena.wholes("pages"));
    this.tensors = root.recordOf("tensors", readTensor);
    this.kernels = root.recordOf("kernels", readKernel);
    /** @type {Record<string, string>} WGSL by sha256 */
    this.sources = root.record("sources", text);
    /** @type {Record<string, string>} tensor name to the sha256 of its bytes */
    this.constants = root.recordOf("constants", (constant) => constant.text("sha256"));
    /** @type {Record<string, readonly Command[]>} */
    this.programs = root.recordOf("programs", (commands) => commands.items().map(readCommand));
    /** Whether it trains; otherwise it evaluates and generates only. */
    this.trains = TRAINING_PROGRAMS.some((name) => name in this.programs);
    for (const name of [...(this.trains ? TRAINING_PROGRAMS : []), "evaluate"]) {
      if (!(name in this.programs)) throw malformed(`programs.${name} is missing`);
    }
    this.constantData = constantData;
    /** Stable hash of the document. */
    this.hash = stableHash(document);
  }

  /**
   * Parse a document and compare every hash in it.
   *
   * @param {unknown} document
   * @param {Iterable<readonly [string, Uint8Array<ArrayBuffer>]>} constantData by sha256
   * @returns {Promise<Plan>}
   * @throws {ConfigError} for a foreign format or version, a malformed document, and content that does not have its hash
   */
  static async from(document, constantData) {
    const { format, version } = isObject(document) ? document : { format: undefined, version: undefined };
    if (!isObject(document) || format !== FORMAT || version !== VERSION) {
      throw new ConfigError(
        `plan: format ${repr(format)} version ${repr(version)}; this program reads ${repr(FORMAT)} version ${VERSION}: ` +
          "compile the plan again",
      );
    }
    const plan = new Plan(document, new Map(constantData));
    for (const [name, sha] of Object.entries(plan.constants)) {
      const data = plan.constantData.get(sha);
      const tensor = plan.tensors[name];
      if (!data || (await digest(data)) !== sha) {
        throw new ConfigError(`plan: constant ${repr(name)} is missing or does not have the sha256 ${sha}`);
      }
      if (tensor?.bytes !== data.length) {
        throw new ConfigError(
          `plan: constant ${repr(name)} has ${data.length} bytes, its tensor ${tensor?.bytes ?? "none"}`,
        );
      }
    }
    const encoder = new TextEncoder();
    for (const [sha, source] of Object.entries(plan.sources)) {
      if ((await digest(encoder.encode(source))) !== sha) {
        throw new ConfigError(`plan: source ${sha} does not have that sha256`);
      }
    }
    return plan;
  }

  /**
   * @param {string} program
   * @returns {Dispatch[]}
   */
  dispatches(program) {
    return /** @type {Dispatch[]} */ (this.programs[program].filter((command) => command.kind === "dispatch"));
  }

  /** The names of the parameters, group by group. */
  parameterNames() {
    return this.settings.groups.flatMap((group) => group.names);
  }

  /**
   * @param {string} name
   * @returns {PlanTensor}
   */
  tensor(name) {
    const tensor = this.tensors[name];
    if (!tensor) throw new ConfigError(`plan: there is no tensor ${repr(name)}`);
    return tensor;
  }

  /** Bytes of all arenas. */
  get bytes() {
    return Object.values(this.arenas)
      .flat()
      .reduce((sum, size) => sum + size, 0);
  }
}

/**
 * The choice of a dispatch when `variants` says which variant of each product class to take.
 *
 * @param {Dispatch} dispatch
 * @param {Record<string, string>} variants
 * @returns {Choice}
 */
export function choiceOf(dispatch, variants) {
  const name = dispatch.productClass ? variants[dispatch.productClass] : undefined;
  return dispatch.choices.find((choice) => choice.variant === name) ?? dispatch.choices[0];
}

/**
 * Read a plan's folder: `plan.json` and `<sha256>.bin` for each constant.
 *
 * @param {ReadFile} read
 * @returns {Promise<Plan>}
 */
export async function loadPlan(read) {
  /** @type {unknown} */
  let document;
  try {
    document = JSON.parse(new TextDecoder().decode(await read("plan.json")));
  } catch (error) {
    if (error instanceof SyntaxError) throw malformed(`plan.json is not JSON (${error.message})`);
    throw error;
  }
  const constants = isObject(document) && isObject(document.constants) ? Object.values(document.constants) : [];
  const wanted = new Set(constants.map((constant) => (isObject(constant) ? String(constant.sha256) : "")));
  const data = await Promise.all(
    [...wanted].map(async (sha) => /** @type {const} */ ([sha, await read(`${sha}.bin`)])),
  );
  return Plan.from(document, data);
}

/**
 * Files below an address.
 *
 * @param {string | URL} base the address of the folder, with a slash at its end
 * @returns {ReadFile}
 * @throws {ConfigError} from the reader, naming address and status
 */
export function fetchFiles(base) {
  return async (name) => {
    const address = new URL(name, base);
    const response = await fetch(address);
    if (!response.ok)
      throw new ConfigError(`${address} cannot be read: status ${response.status} ${response.statusText}`);
    return new Uint8Array(await response.arrayBuffer());
  };
}

/** @param {Uint8Array<ArrayBuffer>} bytes */
function digest(bytes) {
  return globalThis.crypto?.subtle ? subtleSha256(bytes) : sha256(bytes);
}

// Reading JSON that may be anything

/** @param {string} what */
function malformed(what) {
  return new ConfigError(`plan: malformed document (${what})`);
}

/** @param {unknown} value @param {string} where @returns {string} */
function text(value, where) {
  if (typeof value !== "string") throw malformed(`${where} is ${repr(value, 40)}, expected text`);
  return value;
}

/** @param {unknown} value @param {string} where @returns {number} */
function number(value, where) {
  if (typeof value !== "number") throw malformed(`${where} is ${repr(value, 40)}, expected a number`);
  return value;
}

/** @param {unknown} value @param {string} where @param {number} [least] @returns {number} */
function wholeNumber(value, where, least = 0) {
  if (!Number.isSafeInteger(value) || /** @type {number} */ (value) < least) {
    throw malformed(`${where} is ${repr(value, 40)}, expected a whole number of at least ${least}`);
  }
  return /** @type {number} */ (value);
}

/** A JSON value and the path that leads to it. */
class Reader {
  /**
   * @param {unknown} value
   * @param {string} path
   */
  constructor(value, path) {
    this.value = value;
    this.path = path;
  }

  /** @param {string} name */
  has(name) {
    return isObject(this.value) && this.value[name] !== undefined;
  }

  /** @param {string} name @returns {Reader} */
  member(name) {
    const object = this.fields();
    if (!Object.hasOwn(object, name)) throw malformed(`${this.path}.${name} is missing`);
    return new Reader(object[name], `${this.path}.${name}`);
  }

  /** @returns {Record<string, unknown>} */
  fields() {
    if (!isObject(this.value)) throw malformed(`${this.path} is ${repr(this.value, 40)}, expected an object`);
    return this.value;
  }

  /** @returns {Reader[]} */
  items() {
    if (!Array.isArray(this.value)) throw malformed(`${this.path} is ${repr(this.value, 40)}, expected a list`);
    return this.value.map((item, index) => new Reader(item, `${this.path}[${index}]`));
  }

  /** @param {string} name */
  object(name) {
    return this.member(name).fields();
  }

  /** @param {string} name */
  text(name) {
    return text(this.member(name).value, `${this.path}.${name}`);
  }

  /** @param {string} name @param {number} [least] */
  whole(name, least) {
    return wholeNumber(this.member(name).value, `${this.path}.${name}`, least);
  }

  /** @param {string} name */
  number(name) {
    return number(this.member(name).value, `${this.path}.${name}`);
  }

  /** @param {string} name */
  texts(name) {
    return this.member(name)
      .items()
      .map((item) => text(item.value, item.path));
  }

  /** @param {string} name */
  wholes(name) {
    return this.member(name)
      .items()
      .map((item) => wholeNumber(item.value, item.path));
  }

  /** @param {string} name */
  numbers(name) {
    return this.member(name)
      .items()
      .map((item) => number(item.value, item.path));
  }

  /** @param {string} name @param {readonly string[]} known */
  oneOf(name, known) {
    const value = this.text(name);
    if (!known.includes(value))
      throw malformed(`${this.path}.${name} is ${repr(value)}, expected ${known.join(" or ")}`);
    return value;
  }

  /**
   * @template T
   * @param {string} name
   * @param {(value: unknown, where: string) => T} read
   * @returns {Record<string, T>}
   */
  record(name, read) {
    return this.recordOf(name, (item) => read(item.value, item.path));
  }

  /**
   * @template T
   * @param {string} name
   * @param {(item: Reader) => T} read
   * @returns {Record<string, T>}
   */
  recordOf(name, read) {
    const member = this.member(name);
    const entries = Object.entries(member.fields());
    return Object.fromEntries(entries.map(([key, value]) => [key, read(new Reader(value, `${member.path}.${key}`))]));
  }
}

/** @param {Reader} item @returns {PlanSettings} */
function readSettings(item) {
  const scaling = item.member("lossScaling");
  return {
    optimizer: item.object("optimizer"),
    groups: item
      .member("groups")
      .items()
      .map((group) => ({
        name: group.text("name"),
        decay: group.member("decay").value === true,
        names: group.texts("names"),
      })),
    initial: item.recordOf("initial", (initial) => ({
      init: initial.oneOf("init", ["normal", "ones", "zeros"]),
      std: initial.number("std"),
    })),
    lossScaling: scaling.value === null ? null : scaling.fields(),
    dropoutSites: item.texts("dropoutSites"),
    ringRows: item.whole("ringRows", 2),
    scheduleRows: item.whole("scheduleRows", 2),
    prefillTokens: item.whole("prefillTokens", 1),
  };
}

/** @param {Reader} item @returns {PlanTensor} */
function readTensor(item) {
  const shape = item.wholes("shape");
  const dtype = item.oneOf("dtype", Object.keys(ITEM_BYTES));
  const elements = shape.reduce((product, extent) => product * extent, 1);
  return {
    arena: item.text("arena"),
    page: item.whole("page"),
    offset: item.whole("offset"),
    shape,
    dtype,
    elements,
    bytes: elements * ITEM_BYTES[dtype],
  };
}

/** @param {Reader} item @returns {PlanKernel} */
function readKernel(item) {
  return {
    source: item.text("source"),
    entry: item.text("entry"),
    constants: item.record("constants", (value, where) => (typeof value === "boolean" ? +value : number(value, where))),
    bindings: item
      .member("bindings")
      .items()
      .map((pair) => {
        const [binding, access] = pair.items();
        if (!binding || !access) throw malformed(`${pair.path} is not a pair`);
        return /** @type {const} */ ([wholeNumber(binding.value, binding.path, 1), text(access.value, access.path)]);
      }),
    uniforms: item.text("uniforms"),
    features: item.has("features") ? item.texts("features") : [],
  };
}

/** @param {Reader} item @returns {Command} */
function readCommand(item) {
  if (item.has("clear")) return { kind: "clear", arena: item.text("clear") };
  const choices = item
    .member("choices")
    .items()
    .map((choice) => {
      const [x, y, z, more] = choice.wholes("workgroups");
      if (z === undefined || more !== undefined) throw malformed(`${choice.path}.workgroups is not three numbers`);
      return {
        kernel: choice.text("kernel"),
        uniforms: choice.numbers("uniforms"),
        workgroups: /** @type {const} */ ([x, y, z]),
        variant: choice.has("variant") ? choice.text("variant") : "",
      };
    });
  if (!choices.length) throw malformed(`${item.path}.choices is empty`);
  const bindings = item
    .member("bindings")
    .items()
    .map((bound) => {
      const [arena, page, offset, size, more] = bound.items();
      if (!size || more) throw malformed(`${bound.path} is not [arena, page, offset, size]`);
      return {
        arena: text(arena.value, arena.path),
        page: wholeNumber(page.value, page.path),
        offset: wholeNumber(offset.value, offset.path),
        size: wholeNumber(size.value, size.path),
      };
    });
  return {
    kind: "dispatch",
    choices,
    bindings,
    label: item.text("label"),
    phase: item.has("phase") ? item.text("phase") : "",
    productClass: item.has("class") ? item.text("class") : "",
  };
}
