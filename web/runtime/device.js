/**
 * @file Adapters and devices: finding a GPU, opening it with the limits that training wants, and noticing its loss.
 *
 * Runs on a page, in a worker, in Deno (`navigator.gpu`) and in Node (the `gpu` object of the npm package `webgpu`).
 * May import: errors.
 */

import { DeviceLost, HybridError, LimitExceeded } from "./errors.js";

// What a device is asked for when the adapter offers it. Plans say themselves what they cannot do without.
export const WANTED_FEATURES = Object.freeze(["shader-f16", "timestamp-query", "subgroups"]);

// What every WebGPU implementation grants without asking (the specification's table, compute only): a plan that fits
// these runs anywhere.
/** @type {Readonly<Record<string, number>>} */
export const DEFAULT_LIMITS = Object.freeze({
  maxBindGroups: 4,
  maxBindingsPerBindGroup: 1000,
  maxDynamicUniformBuffersPerPipelineLayout: 8,
  maxDynamicStorageBuffersPerPipelineLayout: 4,
  maxStorageBuffersPerShaderStage: 8,
  maxUniformBuffersPerShaderStage: 12,
  maxUniformBufferBindingSize: 65_536,
  maxStorageBufferBindingSize: 134_217_728,
  minUniformBufferOffsetAlignment: 256,
  minStorageBufferOffsetAlignment: 256,
  maxBufferSize: 268_435_456,
  maxComputeWorkgroupStorageSize: 16_384,
  maxComputeInvocationsPerWorkgroup: 256,
  maxComputeWorkgroupSizeX: 256,
  maxComputeWorkgroupSizeY: 256,
  maxComputeWorkgroupSizeZ: 64,
  maxComputeWorkgroupsPerDimension: 65_535,
});

// Raised to what the adapter has, because more of each means fewer slices and larger tiles. All others stay at their
// defaults, so that nothing comes to depend by accident on what one machine happens to offer.
const RAISED_LIMITS = [
  "maxStorageBufferBindingSize",
  "maxBufferSize",
  "maxStorageBuffersPerShaderStage",
  "maxComputeWorkgroupStorageSize",
  "maxComputeInvocationsPerWorkgroup",
  "maxComputeWorkgroupSizeX",
  "maxComputeWorkgroupSizeY",
];

// How long a failed call waits for the news that the device is lost: implementations report the two in either order.
const LOSS_GRACE_MS = 250;

/**
 * One adapter as the browser describes it; text is empty where it tells nothing.
 *
 * @typedef {object} AdapterInfo
 * @property {string} name what to call it
 * @property {string} vendor
 * @property {string} architecture
 * @property {string} device
 * @property {string} description
 * @property {boolean} isFallbackAdapter whether it is a software driver
 */

/**
 * @typedef {object} OpenOptions
 * @property {GPU | null} [gpu] where adapters come from; without it, `navigator.gpu`
 * @property {GPUPowerPreference} [powerPreference] "high-performance" unless said otherwise
 * @property {boolean} [forceFallbackAdapter] take the software driver
 * @property {readonly string[]} [features] the ones to ask for; those that the adapter lacks are left out
 * @property {boolean} [defaultLimits] ask for no more than WebGPU's default limits, as the most modest browser would
 */

/** There is no WebGPU adapter to use; the message says what to do in this browser. */
export class NoAdapter extends HybridError {
  static title = "NoAdapter";
}

/** An open device. `limits` and `features` are what was granted, under their WebGPU names. */
export class Device {
  /** @type {GPUDeviceLostInfo | null} */
  #lost = null;
  /** @type {Set<(error: Error) => void>} waits that end when the device is lost */
  #waiting = new Set();
  /** @type {HybridError | null} the first error that no call reported */
  #failure = null;
  /** @type {Promise<void>} */
  #loss;

  /**
   * @param {GPUDevice} device
   * @param {AdapterInfo} info
   * @param {readonly string[]} features
   * @param {Record<string, number>} limits
   */
  constructor(device, info, features, limits) {
    this.device = device;
    this.info = info;
    /** @type {ReadonlySet<string>} */
    this.features = new Set(features);
    this.limits = limits;
    this.#loss = device.lost.then((lost) => {
      this.#lost = lost;
      const error = this.#lostError();
      for (const reject of this.#waiting) reject(error);
      this.#waiting.clear();
    });
    device.addEventListener("uncapturederror", (event) => {
      event.preventDefault();
      this.#failure ??= deviceError(/** @type {GPUUncapturedErrorEvent} */ (event).error, this.name);
    });
  }

  get queue() {
    return this.device.queue;
  }

  get name() {
    return this.info.name;
  }

  get hasF16() {
    return this.features.has("shader-f16");
  }

  get hasTimestamps() {
    return this.features.has("timestamp-query");
  }

  /** Whether the device is gone. */
  get isLost() {
    return this.#lost !== null;
  }

  /**
   * Resolves when the device is gone, with the reason.
   *
   * @returns {Promise<GPUDeviceLostInfo>}
   */
  get lost() {
    return this.device.lost;
  }

  /** Throws DeviceLost once the device is gone, and any error of an earlier call that only the device has seen. */
  check() {
    if (this.#lost) throw this.#lostError();
    if (this.#failure) throw this.#failure;
  }

  /**
   * Waits for something the device does; a loss of the device ends the wait with DeviceLost. (`Promise.race` with the
   * loss would keep every wait of a long run in memory.)
   *
   * @template T
   * @param {Promise<T>} promise
   * @returns {Promise<T>}
   */
  wait(promise) {
    if (this.#lost) {
      promise.catch(() => {});
      return Promise.reject(this.#lostError());
    }
    return new Promise((resolve, reject) => {
      this.#waiting.add(reject);
      promise.then(
        (value) => {
          this.#waiting.delete(reject);
          try {
            this.check();
            resolve(value);
          } catch (error) {
            reject(error);
          }
        },
        async (error) => {
          await Promise.race([this.#loss, new Promise((done) => setTimeout(done, LOSS_GRACE_MS))]);
          this.#waiting.delete(reject);
          reject(this.#lost ? this.#lostError() : error);
        },
      );
    });
  }

  /**
   * Runs calls that make things, and reports what is wrong with them at once.
   *
   * @template T
   * @param {() => T} make
   * @param {(error: GPUError) => Error} [describe] the error to throw instead of the usual one
   * @returns {Promise<T>}
   */
  async scoped(make, describe) {
    this.check();
    this.device.pushErrorScope("out-of-memory");
    this.device.pushErrorScope("validation");
    /** @type {T} */
    let made;
    let validation = null;
    let memory = null;
    try {
      made = make();
    } finally {
      const scopes = Promise.all([this.device.popErrorScope(), this.device.popErrorScope()]);
      [validation, memory] = await this.wait(scopes);
    }
    const error = validation ?? memory;
    if (error) throw describe?.(error) ?? deviceError(error, this.name);
    return made;
  }

  /** Gives the device back; waits that are open end with DeviceLost. */
  destroy() {
    this.device.destroy();
  }

  #lostError() {
    const why = this.#lost?.message || this.#lost?.reason || "no reason given";
    return new DeviceLost(`the device '${this.name}' was lost (${why})`);
  }
}

/**
 * Open a device.
 *
 * @param {OpenOptions} [options]
 * @returns {Promise<Device>}
 * @throws {NoAdapter} when there is none, with a sentence that says what to do
 */
export async function openDevice(options = {}) {
  const { powerPreference = "high-performance", features = WANTED_FEATURES, defaultLimits = false } = options;
  const gpu = options.gpu ?? globalThis.navigator?.gpu;
  if (!gpu) throw new NoAdapter(`this ${place()} has no WebGPU. ${remedy()}`);
  let adapter = null;
  try {
    adapter = await gpu.requestAdapter({
      powerPreference,
      forceFallbackAdapter: options.forceFallbackAdapter ?? false,
    });
  } catch (error) {
    throw new NoAdapter(`WebGPU failed to look for a graphics adapter (${text(error)}). ${remedy()}`, { cause: error });
  }
  if (!adapter) throw new NoAdapter(`WebGPU found no graphics adapter. ${remedy()}`);

  const granted = features.filter((name) => adapter.features.has(name));
  const offered = /** @type {Record<string, number | undefined>} */ (/** @type {unknown} */ (adapter.limits));
  /** @type {Record<string, number>} */
  const limits = { ...DEFAULT_LIMITS };
  for (const name of defaultLimits ? [] : RAISED_LIMITS) limits[name] = Math.max(limits[name], offered[name] ?? 0);
  /** @type {Record<string, number>} */
  const required = {};
  for (const [name, value] of Object.entries(limits)) {
    const most = offered[name];
    if (most === undefined) continue; // not known to this implementation: it cannot be asked for
    // A compatibility-mode adapter, say; the plan is judged by what was granted.
    limits[name] = name.startsWith("min") ? Math.max(value, most) : Math.min(value, most);
    required[name] = limits[name];
  }
  const info = describe(adapter);
  try {
    const device = await adapter.requestDevice({
      requiredFeatures: /** @type {GPUFeatureName[]} */ (granted),
      requiredLimits: required,
    });
    return new Device(device, info, granted, limits);
  } catch (error) {
    throw new NoAdapter(`the adapter '${info.name}' cannot open a device (${text(error)}). ${remedy()}`, {
      cause: error,
    });
  }
}

/**
 * @param {GPUAdapter} adapter
 * @returns {AdapterInfo}
 */
function describe(adapter) {
  const {
    vendor = "",
    architecture = "",
    device = "",
    description = "",
    isFallbackAdapter = false,
  } = adapter.info ?? {};
  const name = description || [vendor, architecture].filter(Boolean).join(" ") || "unnamed adapter";
  return { name, vendor, architecture, device, description, isFallbackAdapter };
}

/**
 * @param {GPUError} error
 * @param {string} name
 */
function deviceError(error, name) {
  const message = error.message.trim();
  const outOfMemory = globalThis.GPUOutOfMemoryError && error instanceof GPUOutOfMemoryError;
  if (outOfMemory)
    return new LimitExceeded(`the device '${name}' is out of memory: use a smaller batch or model (${message})`);
  return new HybridError(`the device '${name}' refused a call: ${message}`);
}

/** @param {unknown} error */
function text(error) {
  return error instanceof Error ? error.message || error.name : String(error);
}

/** What we run in, for a sentence. */
function place() {
  if ("Deno" in globalThis || "process" in globalThis) return "program";
  return "browser";
}

/**
 * What somebody here can do to get an adapter. Written for the browsers of 2026; each sentence names the setting.
 *
 * @param {string} [agent] the browser's description of itself
 * @param {boolean} [secure] whether the page may use WebGPU at all
 */
export function remedy(agent = globalThis.navigator?.userAgent ?? "", secure = globalThis.isSecureContext ?? true) {
  if (!secure) return "WebGPU is only for secure pages: open this one over https:// or from http://localhost.";
  if (/^Node/.test(agent)) {
    return "Install the npm package webgpu and a Vulkan driver, and pass its gpu object (`create([])`).";
  }
  if (/^Deno/.test(agent)) return "Install a Vulkan driver (on Debian: apt install mesa-vulkan-drivers).";
  const linux = /Linux|X11/.test(agent) && !/Android/.test(agent);
  if (/Firefox\//.test(agent)) {
    return "In Firefox use version 141 or newer, set dom.webgpu.enabled to true in about:config, and restart it.";
  }
  if (/Chrome\//.test(agent)) {
    const start = linux ? "; on Linux start it with --enable-unsafe-webgpu --enable-features=Vulkan" : "";
    return (
      "Use version 113 or newer, turn on “Use graphics acceleration when available” in its settings (System), restart it, " +
      `and see chrome://gpu for what it thinks of the graphics driver${start}.`
    );
  }
  if (/Safari\//.test(agent)) {
    return "Use Safari 26 or newer, or turn on WebGPU under Develop, Feature Flags, and restart it.";
  }
  return "Use a browser with WebGPU (Chrome or Edge 113, Firefox 141, Safari 26 or newer) with graphics acceleration on.";
}
