/**
 * @file Runs a plan's programs through WebGPU.
 *
 * Everything is made once: buffers for the arenas' pages, pipelines, bind groups, the staging buffer for readback.
 * Running a program then only encodes dispatches. The counters say so, and a test holds them to it. May import: errors,
 * contracts, device, subgroups, plan, plan_check, command_stream.
 */

import { CommandStream } from "./command_stream.js";
import { repr } from "./contracts/names.js";
import { HybridError, LimitExceeded } from "./errors.js";
import { choiceOf } from "./plan.js";
import { checkPlan } from "./plan_check.js";
import { subgroupDirective } from "./subgroups.js";

/** @import {Device} from "./device.js" */
/** @import {Choice, Dispatch, Plan, PlanTensor} from "./plan.js" */
/** @import {Encoded, Prepared, Timestamps} from "./command_stream.js" */

const STAGING_BYTES = 16 * 1024 * 1024;
const WRITE_BYTES = 64 * 1024 * 1024; // queue writes are staged by the driver; a whole page at once would double the peak
const SMALLEST_BUFFER = 256;

// The specification's flags, which not every runtime has as globals.
const MAP_READ = 0x0001;
const COPY_SRC = 0x0004;
const COPY_DST = 0x0008;
const UNIFORM = 0x0040;
const STORAGE = 0x0080;
const QUERY_RESOLVE = 0x0200;
const COMPUTE_STAGE = 0x4;
const READ_MODE = 0x0001;

/**
 * Says how far a long preparation is.
 *
 * @typedef {(text: string, done: number, total: number) => void} Progress
 */

/**
 * @typedef {object} Counters
 * @property {number} submits
 * @property {number} readbacks
 * @property {number} buffersCreated
 * @property {number} pipelinesCreated
 * @property {number} fences
 */

/** @typedef {Uint32Array<ArrayBuffer> | Float32Array<ArrayBuffer> | Uint8Array<ArrayBuffer>} HostArray */

/**
 * Allocates a plan on a device and runs its programs. `choices` maps product classes to the name of the variant to use.
 *
 * Errors: LimitExceeded when the device cannot hold the plan; DeviceLost from any call once the device is gone.
 */
export class Executor {
  /** @type {Map<string, GPUBuffer[]>} pages by arena */
  #pages = new Map();
  /** @type {Map<string, GPUShaderModule>} by sha256 */
  #modules = new Map();
  /** @type {Map<string, GPUBindGroupLayout>} by access modes */
  #layouts = new Map();
  /** @type {Map<string, GPUComputePipeline>} by kernel */
  #pipelines = new Map();
  /** @type {Map<string, GPUBindGroup>} */
  #groups = new Map();
  /** @type {Map<string, Prepared[]>} */
  #programs = new Map();
  /** @type {Map<string, {offset: number, size: number}>} */
  #uniformAt = new Map();
  /** @type {GPUBuffer | null} */
  #uniforms = null;
  /** @type {GPUBuffer | null} */
  #staging = null;
  /** @type {Promise<unknown>} the last readback, which the next one waits for: they share a buffer */
  #reading = Promise.resolve();
  /** @param {GPUCommandBuffer} commands */
  #submit = (commands) => {
    this.counters.submits++;
    this.device.queue.submit([commands]);
  };

  /**
   * Use `Executor.create`.
   *
   * @param {Device} device
   * @param {Plan} plan
   */
  constructor(device, plan) {
    this.device = device;
    this.plan = plan;
    /** @type {Counters} */
    this.counters = { submits: 0, readbacks: 0, buffersCreated: 0, pipelinesCreated: 0, fences: 0 };
    /** @type {Record<string, string>} */
    this.choices = {};
    /** Dispatches in one submit at most; see `command_stream.js`. */
    this.dispatchesPerSubmit = Number.POSITIVE_INFINITY;
  }

  /**
   * @param {Device} device
   * @param {Plan} plan
   * @returns {Promise<Executor>}
   */
  static async create(device, plan) {
    checkPlan(plan, { limits: device.limits, features: device.features });
    const executor = new Executor(device, plan);
    try {
      await executor.#allocate();
      await device.scoped(() => executor.#uploadUniforms());
    } catch (error) {
      executor.close();
      throw error;
    }
    for (const [name, sha] of Object.entries(plan.constants)) {
      executor.writeTensor(name, /** @type {Uint8Array<ArrayBuffer>} */ (plan.constantData.get(sha)));
    }
    return executor;
  }

  // Set-up

  /**
   * @param {number} size
   * @param {number} usage
   */
  #buffer(size, usage) {
    this.counters.buffersCreated++;
    return this.device.device.createBuffer({ size, usage });
  }

  async #allocate() {
    for (const [arena, sizes] of Object.entries(this.plan.arenas)) {
      /** @type {GPUBuffer[]} */
      const pages = [];
      this.#pages.set(arena, pages);
      for (const size of sizes) {
        const padded = Math.max(SMALLEST_BUFFER, Math.ceil(size / 4) * 4);
        await this.device.scoped(
          () => pages.push(this.#buffer(padded, STORAGE | COPY_SRC | COPY_DST)),
          (error) =>
            new LimitExceeded(
              `arena ${repr(arena)}: ${size} bytes could not be allocated on ${repr(this.device.name)} (the plan needs ` +
                `${this.plan.bytes} in all): use a smaller batch or model, or recompute (${error.message.trim()})`,
            ),
        );
      }
    }
  }

  /** One uniform buffer holds the structs of all dispatches at aligned steps, each distinct struct once. */
  #uploadUniforms() {
    const alignment = this.device.limits.minUniformBufferOffsetAlignment;
    /** @type {Uint8Array[]} */
    const structs = [];
    let end = 0;
    for (const program of Object.keys(this.plan.programs)) {
      for (const { choices } of this.plan.dispatches(program)) {
        for (const { kernel, uniforms } of choices) {
          const types = this.plan.kernels[kernel].uniforms;
          const key = uniformKey(types, uniforms);
          if (!types || this.#uniformAt.has(key)) continue;
          const data = packUniforms(types, uniforms);
          this.#uniformAt.set(key, { offset: end, size: data.length });
          const padded = new Uint8Array(Math.ceil(data.length / alignment) * alignment);
          padded.set(data);
          structs.push(padded);
          end += padded.length;
        }
      }
    }
    const all = new Uint8Array(Math.max(SMALLEST_BUFFER, end));
    let offset = 0;
    for (const struct of structs) {
      all.set(struct, offset);
      offset += struct.length;
    }
    this.#uniforms = this.#buffer(all.length, UNIFORM | COPY_DST);
    this.device.queue.writeBuffer(this.#uniforms, 0, all);
  }

  /**
   * @param {string} name
   * @returns {Promise<GPUComputePipeline>}
   */
  async #pipeline(name) {
    const kernel = this.plan.kernels[name];
    const gpu = this.device.device;
    const directive = kernel.features.length ? ((await subgroupDirective(this.device)) ?? "") : "";
    let module = this.#modules.get(kernel.source);
    if (!module) {
      // An error in the source comes back when the pipeline is made; the scope keeps it from being reported twice.
      gpu.pushErrorScope("validation");
      module = gpu.createShaderModule({ code: directive + this.plan.sources[kernel.source], label: name });
      gpu.popErrorScope().catch(() => {});
      this.#modules.set(kernel.source, module);
    }
    this.counters.pipelinesCreated++;
    try {
      return await this.device.wait(
        gpu.createComputePipelineAsync({
          label: name,
          layout: gpu.createPipelineLayout({ bindGroupLayouts: [this.#layout(name)] }),
          compute: { module, entryPoint: kernel.entry, constants: kernel.constants },
        }),
      );
    } catch (error) {
      if (error instanceof HybridError) throw error;
      const { messages } = await this.device.wait(module.getCompilationInfo());
      const fault = messages.find((message) => message.type === "error");
      const where = fault ? `line ${fault.lineNum}: ${fault.message.trim()}` : String(error);
      throw new HybridError(`kernel ${repr(name)} does not compile on ${repr(this.device.name)} (${where})`, {
        cause: error,
      });
    }
  }

  /** @param {string} kernelName */
  #layout(kernelName) {
    const { bindings, uniforms } = this.plan.kernels[kernelName];
    const key = `${uniforms ? "u" : ""}${JSON.stringify(bindings)}`;
    let layout = this.#layouts.get(key);
    if (!layout) {
      /** @type {GPUBindGroupLayoutEntry[]} */
      const entries = bindings.map(([binding, access]) => ({
        binding,
        visibility: COMPUTE_STAGE,
        buffer: { type: access === "read" ? "read-only-storage" : "storage" },
      }));
      if (uniforms) entries.unshift({ binding: 0, visibility: COMPUTE_STAGE, buffer: { type: "uniform" } });
      layout = this.device.device.createBindGroupLayout({ entries });
      this.#layouts.set(key, layout);
    }
    return layout;
  }

  /**
   * The dispatch with its pipeline, which `compile` has made, and its bind group; groups are shared between equal
   * dispatches.
   *
   * @param {Dispatch} dispatch
   * @param {Choice} choice
   * @returns {Encoded}
   */
  encoded(dispatch, choice) {
    const pipeline = this.#pipelines.get(choice.kernel);
    if (!pipeline) throw new Error(`kernel ${choice.kernel}: compile comes first`);
    const { bindings, uniforms } = this.plan.kernels[choice.kernel];
    const slices = dispatch.bindings.map(({ arena, page, offset, size }) => `${arena}/${page}/${offset}/${size}`);
    const key = `${choice.kernel} ${choice.uniforms} ${slices}`;
    let group = this.#groups.get(key);
    if (!group) {
      /** @type {GPUBindGroupEntry[]} */
      const entries = dispatch.bindings.map(({ arena, page, offset, size }, index) => ({
        binding: bindings[index][0],
        // WebGPU wants sizes in whole words; a page always has room for the last one.
        resource: { buffer: this.#page(arena, page), offset, size: Math.ceil(size / 4) * 4 },
      }));
      if (uniforms) {
        const at = this.#uniformAt.get(uniformKey(uniforms, choice.uniforms));
        entries.unshift({ binding: 0, resource: { buffer: /** @type {GPUBuffer} */ (this.#uniforms), ...at } });
      }
      group = this.device.device.createBindGroup({ layout: this.#layout(choice.kernel), entries });
      this.#groups.set(key, group);
    }
    const [x, y, z] = choice.workgroups;
    return { pipeline, group, x, y, z, phase: dispatch.phase };
  }

  /**
   * Compile kernels side by side, off the calling thread.
   *
   * @param {Iterable<string>} kernels
   * @param {Progress} [progress]
   */
  async compile(kernels, progress) {
    const names = [...new Set(kernels)].filter((name) => !this.#pipelines.has(name));
    if (!names.length) return;
    let done = 0;
    progress?.("compiling kernels", 0, names.length);
    await Promise.all(
      names.map(async (name) => {
        this.#pipelines.set(name, await this.#pipeline(name));
        progress?.("compiling kernels", ++done, names.length);
      }),
    );
  }

  /**
   * Make pipelines and bind groups of these programs (those not made yet), with the current `choices`.
   *
   * @param {Iterable<string>} programs
   * @param {Progress} [progress]
   */
  async prepare(programs, progress) {
    const wanted = [...programs].filter((name) => !this.#programs.has(name));
    if (!wanted.length) return;
    const dispatches = wanted.flatMap((name) => this.plan.dispatches(name));
    await this.compile(
      dispatches.map((dispatch) => this.choice(dispatch).kernel),
      progress,
    );
    await this.device.scoped(() => {
      for (const name of wanted) {
        const commands = this.plan.programs[name].map((command) =>
          command.kind === "clear" ? this.#arena(command.arena) : this.encoded(command, this.choice(command)),
        );
        this.#programs.set(name, commands);
      }
    });
  }

  /**
   * @param {Dispatch} dispatch
   * @returns {Choice}
   */
  choice(dispatch) {
    return choiceOf(dispatch, this.choices);
  }

  // Running

  /**
   * What records programs and copies and submits them.
   *
   * @param {Timestamps | null} [timestamps]
   * @returns {CommandStream}
   */
  stream(timestamps = null) {
    this.device.check();
    return new CommandStream(this.device.device, this.#submit, this.dispatchesPerSubmit, timestamps);
  }

  /**
   * The commands of a prepared program.
   *
   * @param {string} name
   * @returns {readonly Prepared[]}
   */
  program(name) {
    const commands = this.#programs.get(name);
    if (!commands) throw new Error(`program ${name}: prepare comes first`);
    return commands;
  }

  /**
   * How many dispatches a prepared program has, and how many compute passes they make when phases are timed apart.
   *
   * @param {string} name
   * @returns {{dispatches: number, passes: number}}
   */
  size(name) {
    let dispatches = 0;
    let passes = 0;
    /** @type {string | null} the phase of the pass that is open */
    let open = null;
    for (const command of this.program(name)) {
      if (Array.isArray(command)) {
        open = null;
        continue;
      }
      dispatches++;
      if (open === null || (command.phase && open && command.phase !== open)) passes++;
      open = command.phase || open || "";
    }
    return { dispatches, passes };
  }

  /**
   * Encode and submit programs in order.
   *
   * @param {...string} programs
   */
  run(...programs) {
    const stream = this.stream();
    for (const name of programs) stream.program(this.program(name));
    stream.finish();
  }

  /**
   * Resolves when everything submitted so far has run.
   *
   * @returns {Promise<void>}
   */
  fence() {
    this.counters.fences++;
    return this.device.wait(this.device.queue.onSubmittedWorkDone());
  }

  // Data

  /**
   * Upload a tensor's bytes in the plan's dtype: all of them, or from element number `first` on.
   *
   * @param {string} name
   * @param {HostArray} data
   * @param {number} [first]
   */
  writeTensor(name, data, first) {
    const tensor = this.plan.tensor(name);
    const begin = ((first ?? 0) * tensor.bytes) / tensor.elements;
    const fits = first === undefined ? data.byteLength === tensor.bytes : begin + data.byteLength <= tensor.bytes;
    if (!fits) {
      const at = first === undefined ? "" : ` from element ${first} on`;
      throw new RangeError(`tensor ${repr(name)} has ${tensor.bytes} bytes, not ${data.byteLength}${at}`);
    }
    let bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
    if (bytes.length % 4) {
      const padded = new Uint8Array(Math.ceil(bytes.length / 4) * 4);
      padded.set(bytes);
      bytes = padded;
    }
    const page = this.#page(tensor.arena, tensor.page);
    this.device.check();
    for (let done = 0; done < bytes.length; done += WRITE_BYTES) {
      const size = Math.min(WRITE_BYTES, bytes.length - done);
      this.device.queue.writeBuffer(page, tensor.offset + begin + done, bytes, done, size);
    }
  }

  /**
   * Upload words to a page.
   *
   * @param {string} arena
   * @param {number} page
   * @param {number} offset in bytes
   * @param {Uint32Array<ArrayBuffer>} words
   */
  writeWords(arena, page, offset, words) {
    this.device.check();
    this.device.queue.writeBuffer(this.#page(arena, page), offset, words);
  }

  /**
   * Zero arenas.
   *
   * @param {readonly string[]} arenas
   */
  clear(arenas) {
    const stream = this.stream();
    const { encoder } = stream;
    for (const arena of arenas) for (const page of this.#pages.get(arena) ?? []) encoder.clearBuffer(page);
    stream.finish();
  }

  /**
   * A host copy of a tensor's bytes. Waits for the device.
   *
   * @param {string} name
   * @returns {Promise<Uint8Array<ArrayBuffer>>}
   */
  readTensor(name) {
    const tensor = this.plan.tensor(name);
    return this.readBytes(tensor.arena, tensor.page, tensor.offset, tensor.bytes);
  }

  /**
   * A host copy of a range of a page, as it is after everything submitted so far. Goes through one staging buffer, made
   * at first use.
   *
   * @param {string} arena
   * @param {number} page
   * @param {number} offset
   * @param {number} size
   * @returns {Promise<Uint8Array<ArrayBuffer>>}
   */
  readBytes(arena, page, offset, size) {
    const result = this.#reading.then(() => this.#read(this.#page(arena, page), offset, size));
    this.#reading = result.catch(() => {});
    return result;
  }

  /**
   * @param {GPUBuffer} source
   * @param {number} offset
   * @param {number} size
   */
  async #read(source, offset, size) {
    this.#staging ??= this.#buffer(STAGING_BYTES, COPY_DST | MAP_READ);
    const staging = this.#staging;
    const result = new Uint8Array(size);
    for (let begin = 0; begin < size; begin += STAGING_BYTES) {
      const count = Math.min(STAGING_BYTES, size - begin);
      const words = Math.ceil(count / 4) * 4;
      const stream = this.stream();
      stream.encoder.copyBufferToBuffer(source, offset + begin, staging, 0, words);
      stream.finish();
      this.counters.readbacks++;
      await this.device.wait(staging.mapAsync(READ_MODE, 0, words));
      result.set(new Uint8Array(staging.getMappedRange(0, words)).subarray(0, count), begin);
      staging.unmap();
    }
    return result;
  }

  /**
   * A buffer that results are copied into and mapped from.
   *
   * @param {number} size
   */
  readbackBuffer(size) {
    return this.#buffer(size, COPY_DST | MAP_READ);
  }

  /**
   * A buffer that queries are resolved into.
   *
   * @param {number} size
   */
  queryBuffer(size) {
    return this.#buffer(size, QUERY_RESOLVE | COPY_SRC);
  }

  /**
   * Map a readback buffer after the copies submitted so far.
   *
   * @param {GPUBuffer} buffer
   * @returns {Promise<void>}
   */
  map(buffer) {
    this.counters.readbacks++;
    return this.device.wait(buffer.mapAsync(READ_MODE));
  }

  /**
   * The buffer that a tensor lies in.
   *
   * @param {PlanTensor} tensor
   */
  page(tensor) {
    return this.#page(tensor.arena, tensor.page);
  }

  /**
   * @param {string} arena
   * @param {number} page
   */
  #page(arena, page) {
    return this.#arena(arena)[page];
  }

  /** @param {string} arena */
  #arena(arena) {
    const pages = this.#pages.get(arena);
    if (!pages) throw new Error(`the executor is closed, or has no arena ${arena}`);
    return pages;
  }

  /**
   * Bytes of device memory by arena, and in all.
   *
   * @returns {Record<string, number> & {total: number}}
   */
  memory() {
    const sizes = Object.entries(this.plan.arenas).map(
      ([arena, pages]) => /** @type {const} */ ([arena, pages.reduce((sum, size) => sum + size, 0)]),
    );
    return { ...Object.fromEntries(sizes), total: this.plan.bytes };
  }

  /** Free every buffer. Nothing else may be called afterwards. */
  close() {
    for (const pages of this.#pages.values()) for (const page of pages) page.destroy();
    this.#uniforms?.destroy();
    this.#staging?.destroy();
    this.#staging = null;
    for (const made of [this.#pages, this.#programs, this.#groups, this.#pipelines, this.#modules]) made.clear();
  }
}

/**
 * @param {string} types
 * @param {readonly number[]} values
 */
function uniformKey(types, values) {
  return `${types} ${values}`;
}

/**
 * The bytes of a uniform struct of u32 ("u") and f32 ("f") scalars, padded to 16 bytes.
 *
 * @param {string} types
 * @param {readonly number[]} values
 * @returns {Uint8Array<ArrayBuffer>}
 */
export function packUniforms(types, values) {
  const view = new DataView(new ArrayBuffer(Math.ceil(types.length / 4) * 16));
  for (let i = 0; i < types.length; i++) {
    if (types[i] === "u") view.setUint32(4 * i, values[i], true);
    else view.setFloat32(4 * i, values[i], true);
  }
  return new Uint8Array(view.buffer);
}
