/** @file Reading a plan's folder, and what is refused there. (`tests/differential` compares the checks with Python's.) */

import assert from "node:assert/strict";
import { test } from "node:test";

import { packUniforms } from "../runtime/executor.js";
import { fetchFiles, loadPlan } from "../runtime/plan.js";
import { sha256 } from "../runtime/sha256.js";
import { memoryStorage, privateStorage } from "../runtime/storage.js";

const WGSL = "@compute @workgroup_size(1) fn main() {}";
const TABLE = Uint8Array.from({ length: 16 }, (_, index) => index);

/** @param {string} text */
const bytes = (text) => new TextEncoder().encode(text);

function smallDocument() {
  const source = sha256(bytes(WGSL));
  return {
    format: "hybrid.plan",
    version: 1,
    requires: { features: [], limits: {} },
    model: { vocabulary_size: 4, context_length: 8 },
    shape: { B: 1, T: 8 },
    precision: "f32",
    settings: {
      optimizer: {},
      groups: [
        { name: "decay", decay: true, names: ["w"] },
        { name: "no_decay", decay: false, names: ["b"] },
      ],
      initial: { w: { init: "normal", std: 0.02 } },
      lossScaling: null,
      dropoutSites: [],
      ringRows: 256,
      scheduleRows: 1024,
      prefillTokens: 8,
    },
    arenas: { tables: { pages: [256] } },
    tensors: { table: { arena: "tables", page: 0, offset: 0, shape: [2, 2], dtype: "f32" } },
    kernels: { k: { source, entry: "main", constants: { FLAG: true }, bindings: [[1, "read"]], uniforms: "u" } },
    sources: { [source]: WGSL },
    constants: { table: { sha256: sha256(TABLE), bytes: 16 } },
    programs: {
      begin: [
        { clear: "tables" },
        {
          choices: [{ kernel: "k", uniforms: [1], workgroups: [1, 1, 1] }],
          bindings: [["tables", 0, 0, 16]],
          label: "x",
        },
      ],
      forward_backward: [],
      evaluate: [],
      optimizer_stats: [],
      optimizer_apply: [],
    },
  };
}

/**
 * @param {unknown} document
 * @param {Record<string, Uint8Array<ArrayBuffer>>} [files]
 */
function load(document, files = { [`${sha256(TABLE)}.bin`]: TABLE }) {
  const all = new Map([...Object.entries(files), ["plan.json", bytes(JSON.stringify(document))]]);
  return loadPlan(async (name) => /** @type {Uint8Array<ArrayBuffer>} */ (all.get(name) ?? new Uint8Array(0)));
}

test("a folder becomes a plan", async () => {
  const plan = await load(smallDocument());
  assert.deepEqual(plan.parameterNames(), ["w", "b"]);
  assert.equal(plan.tensor("table").bytes, 16);
  assert.equal(plan.kernels.k.constants.FLAG, 1);
  assert.equal(plan.programs.begin[0].kind, "clear");
  const [dispatch] = plan.dispatches("begin");
  assert.deepEqual([dispatch.phase, dispatch.productClass, dispatch.choices[0].variant], ["", "", ""]);
  assert.equal(plan.bytes, 256);
  assert.match(plan.hash, /^[0-9a-f]{64}$/);
  assert.throws(() => plan.tensor("other"), { name: "ConfigError", message: /no tensor 'other'/ });
});

test("what is missing, foreign or changed is refused by name", async () => {
  const sha = sha256(TABLE);
  await assert.rejects(load(smallDocument(), {}), { name: "ConfigError", message: /constant 'table' is missing/ });
  const changed = TABLE.slice();
  changed[3]++;
  await assert.rejects(load(smallDocument(), { [`${sha}.bin`]: changed }), /does not have the sha256/);
  await assert.rejects(
    load({ ...smallDocument(), version: 2 }),
    /version 2; this program reads 'hybrid\.plan' version 1/,
  );
  await assert.rejects(load([]), /format None version None/);
  const noPrograms = { ...smallDocument(), programs: { begin: [] } };
  await assert.rejects(load(noPrograms), /malformed document \(programs\.forward_backward is missing\)/);
  const badShape = structuredClone(smallDocument());
  badShape.tensors.table.shape = [2, -2];
  await assert.rejects(load(badShape), /plan\.tensors\.table\.shape\[1\] is -2, expected a whole number/);
  const short = structuredClone(smallDocument());
  short.tensors.table.shape = [2];
  await assert.rejects(load(short), /constant 'table' has 16 bytes, its tensor 8/);
  const text = /** @type {Uint8Array<ArrayBuffer>} */ (bytes("{"));
  await assert.rejects(
    loadPlan(async () => text),
    { name: "ConfigError", message: /plan\.json is not JSON/ },
  );
});

test("uniform structs are words padded to sixteen bytes", () => {
  const packed = packUniforms("uufuu", [1, 0xffffffff, 0.5, 4, 5]);
  assert.equal(packed.length, 32);
  const view = new DataView(packed.buffer);
  assert.deepEqual(
    [0, 4, 12, 16, 20].map((at) => view.getUint32(at, true)),
    [1, 0xffffffff, 4, 5, 0],
  );
  assert.equal(view.getFloat32(8, true), 0.5);
});

test("a file that a server does not have is an error with its address and status", async () => {
  const { fetch } = globalThis;
  try {
    globalThis.fetch = async () => new Response("none", { status: 404, statusText: "Not Found" });
    const read = fetchFiles("http://example.invalid/plans/");
    await assert.rejects(read("plan.json"), {
      name: "ConfigError",
      message: "http://example.invalid/plans/plan.json cannot be read: status 404 Not Found",
    });
  } finally {
    globalThis.fetch = fetch;
  }
});

test("small texts are kept in memory where there is nothing better", async () => {
  for (const storage of [memoryStorage({ a: "1" }), await privateStorage("hybrid")]) {
    await storage.write("b", "2");
    assert.equal(await storage.read("b"), "2");
    assert.equal(await storage.read("c"), null);
  }
});
