/**
 * @file Refuses a plan that this device, or any WebGPU device, would refuse, before anything is allocated.
 *
 * May import: errors, contracts, plan.
 */

import { repr } from "./contracts/names.js";
import { ConfigError, LimitExceeded } from "./errors.js";

/** @import {BoundSlice, Dispatch, Plan} from "./plan.js" */

/**
 * What a device can do: limits under their WebGPU names, and features.
 *
 * @typedef {object} DeviceProfile
 * @property {Record<string, number>} limits
 * @property {Iterable<string>} features
 */

const ALIGNMENT = 256;

/**
 * Check a plan against a device. A tensor or kernel that exceeds a limit, with the remedy, is LimitExceeded; a broken
 * rule is ConfigError: a slice outside its page, an unaligned offset, one page bound `read` and `read_write` in a
 * dispatch, or overlapping writable slices.
 *
 * @param {Plan} plan
 * @param {DeviceProfile} profile
 */
export function checkPlan(plan, profile) {
  const { limits } = profile;
  const features = new Set(profile.features);
  const missing = plan.requires.features.filter((name) => !features.has(name));
  if (missing.length) {
    throw new LimitExceeded(`plan needs the device feature(s) ${missing.join(", ")}: use precision f32 on this device`);
  }
  for (const [arena, pages] of Object.entries(plan.arenas)) {
    for (const page of pages) {
      if (page > limits.maxBufferSize) {
        throw new LimitExceeded(
          `arena ${repr(arena)}: a page of ${page} bytes exceeds maxBufferSize ${limits.maxBufferSize}`,
        );
      }
    }
  }
  for (const [name, tensor] of Object.entries(plan.tensors)) {
    const page = plan.arenas[tensor.arena]?.[tensor.page];
    if (page === undefined || tensor.offset + tensor.bytes > page) {
      throw new ConfigError(`tensor ${repr(name)} lies outside its arena ${repr(tensor.arena)}`);
    }
    if (tensor.offset % ALIGNMENT) {
      throw new ConfigError(`tensor ${repr(name)} starts at ${tensor.offset}, not at a ${ALIGNMENT}-byte boundary`);
    }
  }
  for (const [name, kernel] of Object.entries(plan.kernels)) {
    if (!(kernel.source in plan.sources)) {
      throw new ConfigError(`kernel ${repr(name)} names the source ${kernel.source}, which the plan does not hold`);
    }
    if (kernel.bindings.length > limits.maxStorageBuffersPerShaderStage) {
      throw new LimitExceeded(
        `kernel ${repr(name)} binds ${kernel.bindings.length} storage buffers: this device allows ` +
          `${limits.maxStorageBuffersPerShaderStage}`,
      );
    }
    const known = kernel.bindings.every(([, access]) => access === "read" || access === "read_write");
    if (!/^[uf]*$/.test(kernel.uniforms) || !known) {
      throw new ConfigError(`kernel ${repr(name)}: malformed uniforms or access modes`);
    }
    const unknown = kernel.features.find((feature) => feature !== "subgroups");
    if (unknown) throw new ConfigError(`kernel ${repr(name)} needs ${repr(unknown)}, which this program cannot enable`);
  }
  for (const [program, commands] of Object.entries(plan.programs)) {
    for (const command of commands) {
      if (command.kind === "dispatch") checkDispatch(plan, command, program, limits);
      else if (!(command.arena in plan.arenas)) {
        throw new ConfigError(
          `program ${repr(program)} clears the arena ${repr(command.arena)}, which the plan does not hold`,
        );
      }
    }
  }
}

/**
 * @param {Plan} plan
 * @param {Dispatch} dispatch
 * @param {string} program
 * @param {Record<string, number>} limits
 */
function checkDispatch(plan, dispatch, program, limits) {
  const where = `program ${repr(program)}, dispatch ${repr(dispatch.label)}`;
  for (const bound of dispatch.bindings) {
    const page = plan.arenas[bound.arena]?.[bound.page];
    if (page === undefined || bound.size <= 0 || bound.offset + bound.size > page) {
      throw new ConfigError(`${where}: a binding lies outside arena ${repr(bound.arena)}`);
    }
    if (bound.offset % limits.minStorageBufferOffsetAlignment) {
      throw new ConfigError(`${where}: binding offset ${bound.offset} is not aligned`);
    }
    if (bound.size > limits.maxStorageBufferBindingSize) {
      throw new LimitExceeded(
        `${where}: a binding of ${bound.size} bytes exceeds maxStorageBufferBindingSize ` +
          `${limits.maxStorageBufferBindingSize}: use a smaller batch, sequence or model`,
      );
    }
  }
  for (const choice of dispatch.choices) {
    const kernel = plan.kernels[choice.kernel];
    if (!kernel) throw new ConfigError(`${where}: unknown kernel ${repr(choice.kernel)}`);
    if (kernel.bindings.length !== dispatch.bindings.length || kernel.uniforms.length !== choice.uniforms.length) {
      throw new ConfigError(
        `${where}: kernel ${repr(choice.kernel)} wants ${kernel.bindings.length} buffers and ` +
          `${kernel.uniforms.length} uniforms, not ${dispatch.bindings.length} and ${choice.uniforms.length}`,
      );
    }
    if (choice.workgroups.some((count) => count < 1 || count > limits.maxComputeWorkgroupsPerDimension)) {
      throw new ConfigError(`${where}: workgroups (${choice.workgroups.join(", ")}) out of range`);
    }
    const conflict = accessConflict(kernel.bindings, dispatch.bindings);
    if (conflict) throw new ConfigError(`${where}: ${conflict}`);
  }
}

/**
 * Why WebGPU would refuse these bindings together, or null: a buffer is either read-only or writable in one dispatch,
 * and writable ranges do not overlap.
 *
 * @param {readonly (readonly [number, string])[]} accesses
 * @param {readonly BoundSlice[]} bindings
 * @returns {string | null}
 */
export function accessConflict(accesses, bindings) {
  /** @type {Map<string, number[]>} */
  const byPage = new Map();
  bindings.forEach(({ arena, page }, index) => {
    const key = `${page} of arena ${repr(arena)}`;
    byPage.set(key, [...(byPage.get(key) ?? []), index]);
  });
  for (const [page, bound] of byPage) {
    const kinds = new Set(bound.map((index) => accesses[index][1]));
    if (kinds.size === 2) return `page ${page} is bound read and read_write at once`;
    if (!kinds.has("read_write")) continue;
    const slices = bound.map((index) => bindings[index]).sort((a, b) => a.offset - b.offset || a.size - b.size);
    const overlap = slices.some((slice, i) => i > 0 && slice.offset < slices[i - 1].offset + slices[i - 1].size);
    if (overlap) return `writable bindings overlap on page ${page}`;
  }
  return null;
}
