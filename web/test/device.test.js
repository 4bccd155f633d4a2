/** @file Opening a device: what is asked for, what is said when there is none, what happens when it goes away. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { DEFAULT_LIMITS, Device, NoAdapter, openDevice, remedy } from "../runtime/device.js";
import { DeviceLost, LimitExceeded } from "../runtime/errors.js";

const AGENTS = {
  firefox: "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0",
  chromeOnLinux:
    "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/156.0.0.0 Safari/537.36",
  chromeOnWindows:
    "Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/156.0.0.0 Safari/537.36",
  safari:
    "Mozilla/5.0 (Macintosh; Intel Mac OS X 10_15_7) AppleWebKit/605.1.15 (KHTML, like Gecko) Version/18.0 Safari/605.1.15",
  node: "Node.js/22",
  deno: "Deno/2.9.6",
};

/**
 * A stand-in for `navigator.gpu`.
 *
 * @param {object} offered
 * @param {string[]} [offered.features]
 * @param {Record<string, number>} [offered.limits]
 * @param {unknown} [offered.fails] what requestDevice throws
 */
function fakeGpu({ features = [], limits = {}, fails } = {}) {
  const events = new EventTarget();
  /** @type {(info: GPUDeviceLostInfo) => void} */
  let lose = () => {};
  const lost = new Promise((resolve) => {
    lose = resolve;
  });
  /** @type {any[]} */
  const asked = [];
  const adapter = {
    info: { vendor: "acme", architecture: "anvil", device: "", description: "" },
    features: new Set(features),
    limits: { ...DEFAULT_LIMITS, ...limits },
    requestDevice: async (/** @type {any} */ descriptor) => {
      asked.push(descriptor);
      if (fails) throw fails;
      return { lost, addEventListener: events.addEventListener.bind(events), destroy() {} };
    },
  };
  const gpu = /** @type {GPU} */ (/** @type {unknown} */ ({ requestAdapter: async () => adapter }));
  return { gpu, asked, lose, events };
}

test("each browser is told what to do in its own words", () => {
  assert.match(remedy(AGENTS.firefox, true), /Firefox.*about:config/);
  assert.match(remedy(AGENTS.chromeOnLinux, true), /chrome:\/\/gpu.*--enable-unsafe-webgpu/);
  assert.doesNotMatch(remedy(AGENTS.chromeOnWindows, true), /--enable-unsafe-webgpu/);
  assert.match(remedy(AGENTS.safari, true), /Safari 26/);
  assert.match(remedy(AGENTS.node, true), /npm package webgpu/);
  assert.match(remedy(AGENTS.deno, true), /Vulkan driver/);
  assert.match(remedy("", true), /browser with WebGPU/);
  assert.match(remedy(AGENTS.chromeOnLinux, false), /https/);
});

test("no adapter, a throwing search and a refused device are sentences", async () => {
  const none = /** @type {GPU} */ (/** @type {unknown} */ ({ requestAdapter: async () => null }));
  await assert.rejects(openDevice({ gpu: none }), { name: "NoAdapter", message: /found no graphics adapter\. .+/ });
  const throws = /** @type {GPU} */ (
    /** @type {unknown} */ ({ requestAdapter: () => Promise.reject(new Error("the process is gone")) })
  );
  await assert.rejects(openDevice({ gpu: throws }), { name: "NoAdapter", message: /the process is gone/ });
  const { gpu } = fakeGpu({ fails: new Error("too much") });
  await assert.rejects(openDevice({ gpu }), {
    name: "NoAdapter",
    message: /'acme anvil' cannot open a device \(too much\)/,
  });
  assert.ok(new NoAdapter("x") instanceof Error);
});

test("limits are raised to what the adapter has, and only some of them", async () => {
  const { gpu, asked } = fakeGpu({ limits: { maxBufferSize: 2 ** 32, maxBindGroups: 32 } });
  const device = await openDevice({ gpu });
  assert.equal(device.limits.maxBufferSize, 2 ** 32);
  assert.equal(device.limits.maxBindGroups, 4);
  assert.deepEqual(asked[0].requiredLimits, device.limits);
  await openDevice({ gpu, defaultLimits: true });
  assert.deepEqual(asked[1].requiredLimits, DEFAULT_LIMITS);
});

test("an adapter below the defaults is opened with what it has", async () => {
  const { gpu } = fakeGpu({ limits: { maxStorageBuffersPerShaderStage: 4, minStorageBufferOffsetAlignment: 512 } });
  const device = await openDevice({ gpu });
  assert.equal(device.limits.maxStorageBuffersPerShaderStage, 4);
  assert.equal(device.limits.minStorageBufferOffsetAlignment, 512);
});

test("features are asked for where they are offered", async () => {
  const { gpu, asked } = fakeGpu({ features: ["shader-f16", "texture-compression-bc"] });
  const device = await openDevice({ gpu });
  assert.deepEqual(asked[0].requiredFeatures, ["shader-f16"]);
  assert.equal(device.hasF16, true);
  assert.equal(device.hasTimestamps, false);
});

test("a loss ends every open wait and all later calls with DeviceLost", async () => {
  const { gpu, lose } = fakeGpu();
  const device = await openDevice({ gpu });
  const waits = [device.wait(new Promise(() => {})), device.wait(new Promise(() => {}))];
  device.check();
  lose(/** @type {GPUDeviceLostInfo} */ ({ reason: "unknown", message: "the driver was reset" }));
  for (const wait of waits)
    await assert.rejects(wait, { name: "DeviceLost", message: /'acme anvil'.*driver was reset/ });
  assert.throws(() => device.check(), DeviceLost);
  await assert.rejects(device.wait(Promise.resolve(1)), DeviceLost);
  assert.equal(device.isLost, true);
});

test("a call that fails just before the loss is known is a loss too; any other failure stays itself", async () => {
  const { gpu, lose } = fakeGpu();
  const device = await openDevice({ gpu });
  await assert.rejects(device.wait(Promise.reject(new Error("odd"))), /odd/);
  const failing = device.wait(Promise.reject(new Error("map failed")));
  lose(/** @type {GPUDeviceLostInfo} */ ({ reason: "destroyed", message: "" }));
  await assert.rejects(failing, DeviceLost);
});

test("an error that no call saw comes out at the next one", async () => {
  const { gpu, events } = fakeGpu();
  const device = await openDevice({ gpu });
  const event = Object.assign(new Event("uncapturederror", { cancelable: true }), {
    error: new Error("bad bind group"),
  });
  events.dispatchEvent(event);
  assert.throws(() => device.check(), { name: "HybridError", message: /refused a call: bad bind group/ });
  await assert.rejects(device.wait(Promise.resolve()), /bad bind group/);
});

test("a scope reports what is wrong with what was made, and lets the caller name it", async () => {
  const { gpu } = fakeGpu();
  const opened = await openDevice({ gpu });
  const scopes = { errors: /** @type {(Error | null)[]} */ ([]) };
  const raw = Object.assign(opened.device, {
    pushErrorScope() {},
    popErrorScope: async () => scopes.errors.shift() ?? null,
  });
  const device = new Device(raw, opened.info, [], DEFAULT_LIMITS);
  assert.equal(await device.scoped(() => 5), 5);
  scopes.errors = [new Error("invalid size"), null];
  await assert.rejects(
    device.scoped(() => 5),
    /refused a call: invalid size/,
  );
  scopes.errors = [null, new Error("no room")];
  await assert.rejects(
    device.scoped(
      () => 5,
      (error) => new LimitExceeded(`arena: ${error.message}`),
    ),
    { name: "LimitExceeded", message: "arena: no room" },
  );
});
