/** @file N-gram tables choose the rows of the golden vectors, and a plan that has them gets their row indices. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { InputUpload } from "../runtime/inputs.js";
import { ngramBuckets, ngramTables } from "../runtime/ngram.js";
import { load } from "./support/vectors.js";

test("the rows of n-grams are golden", () => {
  const { cases } = load("ngram");
  for (const { ids, segment_ids: segments, rows: expected, ...table } of cases) {
    const rows = new Uint32Array(expected.flat().length);
    ngramBuckets(Uint32Array.from(ids.flat()), Uint32Array.from(segments.flat()), ids[0].length, table, rows);
    assert.deepEqual([...rows], expected.flat());
  }
  assert.equal(cases.length, 32);
});

test("tables are known by the names of their row indices", () => {
  const names = ["ids", "row_order", "pos_row_order", "ngram_4_29744_7_row_order", "ngram_4_29744_7_row_ids"];
  assert.deepEqual(ngramTables(names), [{ prefix: "ngram_4_29744_7_", order: 4, buckets: 29744, seed: 7 }]);
});

test("a batch is uploaded with the row index of every n-gram table", () => {
  const prefix = "ngram_2_3_0_";
  /** @type {Record<string, number[]>} */
  const shapes = {
    ids: [2, 4],
    segment_ids: [2, 4],
    [`${prefix}row_order`]: [8],
    [`${prefix}row_starts`]: [9],
    [`${prefix}row_ids`]: [8],
    [`${prefix}row_count`]: [1],
  };
  let offset = 0;
  /** @type {Record<string, any>} */
  const tensors = {};
  for (const [name, shape] of Object.entries(shapes)) {
    const elements = shape.reduce((a, b) => a * b, 1);
    tensors[name] = { arena: "inputs", page: 0, offset, shape, elements, bytes: 4 * elements };
    offset += 4 * elements;
  }
  let uploaded = new Uint32Array();
  const executor = {
    plan: { tensors, tensor: (/** @type {string} */ name) => tensors[name] },
    writeWords: (/** @type {unknown[]} */ ...given) => {
      uploaded = /** @type {Uint32Array<ArrayBuffer>} */ (given[3]).slice();
    },
  };
  const ids = Uint32Array.from([5, 6, 5, 6, 6, 5, 6, 5]);
  const segmentIds = Uint32Array.from([1, 1, 2, 2, 1, 1, 1, 1]);
  const unused = new Uint32Array(8);
  const batch = { ids, segmentIds, targets: unused, positions: unused, sampleIds: new Uint32Array(2) };
  new InputUpload(/** @type {any} */ (executor)).write(/** @type {any} */ (batch));

  const rows = new Uint32Array(8);
  ngramBuckets(ids, segmentIds, 4, { order: 2, buckets: 3, seed: 0 }, rows);
  const part = (/** @type {string} */ name) => {
    const { offset: begin, elements } = tensors[prefix + name];
    return [...uploaded.subarray(begin / 4, begin / 4 + elements)];
  };
  const order = [...rows.keys()].sort((a, b) => rows[a] - rows[b] || a - b);
  const distinct = [...new Set(order.map((position) => rows[position]))];
  assert.deepEqual(part("row_order"), order);
  assert.deepEqual(part("row_count"), [distinct.length]);
  assert.deepEqual(part("row_ids").slice(0, distinct.length), distinct);
  assert.equal(rows[0], rows[2], "the first tokens of two segments");
});
