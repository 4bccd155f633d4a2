/**
 * @file What subgroups are like on a device, as far as nobody can be asked: how WGSL spells them, and their size.
 *
 * May import: device.
 */

/** @import {Device} from "./device.js" */

const FEATURE = "subgroups";
// Every implementation of the standard wants the directive; wgpu used to refuse it.
const DIRECTIVES = ["enable subgroups;\n", ""];
const MAP_READ = 0x0001;
const COPY_SRC = 0x0004;
const COPY_DST = 0x0008;
const STORAGE = 0x0080;

const PROBE = `
@group(0) @binding(0) var<storage, read_write> size: array<u32>;
@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) lane: u32, @builtin(subgroup_size) subgroup: u32) {
  if (lane == 0u) { size[0] = subgroup; }
}
`;

/** @type {WeakMap<Device, Promise<string | null>>} */
const directives = new WeakMap();

/**
 * What must stand before WGSL that uses subgroups; null where it cannot.
 *
 * @param {Device} device
 * @returns {Promise<string | null>}
 */
export function subgroupDirective(device) {
  let directive = directives.get(device);
  if (!directive) {
    directive = findDirective(device);
    directives.set(device, directive);
  }
  return directive;
}

/** @param {Device} device */
async function findDirective(device) {
  if (!device.features.has(FEATURE)) return null;
  for (const directive of DIRECTIVES) {
    try {
      await device.scoped(() => device.device.createShaderModule({ code: directive + PROBE }));
      return directive;
    } catch {
      device.check(); // a lost device is no answer
    }
  }
  return null;
}

/**
 * How many invocations run in lockstep, measured in a shader; 0 without subgroups. Drivers report a range, and some
 * report it wrongly, so nothing but `@builtin(subgroup_size)` is believed.
 *
 * @param {Device} device
 * @returns {Promise<number>}
 */
export async function probeSubgroupSize(device) {
  const directive = await subgroupDirective(device);
  if (directive === null) return 0;
  const gpu = device.device;
  const buffers = await device.scoped(() => {
    const module = gpu.createShaderModule({ code: directive + PROBE });
    const pipeline = gpu.createComputePipeline({ layout: "auto", compute: { module, entryPoint: "main" } });
    const size = gpu.createBuffer({ size: 4, usage: STORAGE | COPY_SRC });
    const staging = gpu.createBuffer({ size: 4, usage: COPY_DST | MAP_READ });
    const group = gpu.createBindGroup({
      layout: pipeline.getBindGroupLayout(0),
      entries: [{ binding: 0, resource: { buffer: size } }],
    });
    const encoder = gpu.createCommandEncoder();
    const pass = encoder.beginComputePass();
    pass.setPipeline(pipeline);
    pass.setBindGroup(0, group);
    pass.dispatchWorkgroups(1);
    pass.end();
    encoder.copyBufferToBuffer(size, 0, staging, 0, 4);
    gpu.queue.submit([encoder.finish()]);
    return { size, staging };
  });
  await device.wait(buffers.staging.mapAsync(MAP_READ));
  const [size] = new Uint32Array(buffers.staging.getMappedRange());
  buffers.size.destroy();
  buffers.staging.destroy();
  return size;
}

/**
 * What the plan compiler may rely on for this device, as JSON.
 *
 * @param {Device} device
 * @returns {Promise<{limits: Record<string, number>, features: string[], subgroup_size: number, cpu: boolean | null}>}
 */
export async function deviceProfile(device) {
  const size = await probeSubgroupSize(device);
  const features = [...device.features].filter((name) => name !== FEATURE || size);
  // A fallback adapter is a software one; other adapters do not say what they are.
  const cpu =
    device.info.isFallbackAdapter || /swiftshader|llvmpipe|basic render/i.test(device.info.name) ? true : null;
  return { limits: { ...device.limits }, features, subgroup_size: size, cpu };
}
