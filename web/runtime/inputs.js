/**
 * @file Where a batch's tensors lie in the input arena, so that one upload carries them all.
 *
 * May import: errors, executor, ngram, row_index.
 */

import { ConfigError } from "./errors.js";
import { ngramBuckets, ngramTables } from "./ngram.js";
import { RowIndexer } from "./row_index.js";

/** @import {Batch} from "./batch.js" */
/** @import {Executor} from "./executor.js" */
/** @import {NgramTable} from "./ngram.js" */
/** @import {PlanTensor} from "./plan.js" */
/** @import {RowIndex} from "./row_index.js" */

const ARENA = "inputs";

export class InputUpload {
  /** @type {Map<string, PlanTensor>} */
  #tensors = new Map();
  #begin;
  #words;
  #tokens;
  /** @type {RowIndexer | null} */
  #positions = null;
  /** @type {{ table: NgramTable, rows: Uint32Array, indexer: RowIndexer }[]} */
  #ngrams = [];

  /** @param {Executor} executor */
  constructor(executor) {
    this.executor = executor;
    const inputs = Object.entries(executor.plan.tensors).filter(([, tensor]) => tensor.arena === ARENA);
    const batch = inputs.filter(([name]) => !name.includes("/"));
    this.#tensors = new Map(batch);
    const { shape, elements } = executor.plan.tensor("ids");
    /** @type {readonly [number, number]} */
    this.shape = [shape[0], shape[1]];
    this.#begin = Math.min(...batch.map(([, tensor]) => tensor.offset));
    const end = Math.max(...batch.map(([, tensor]) => tensor.offset + tensor.bytes));
    const between = inputs.some(([name, { offset }]) => name.includes("/") && this.#begin < offset && offset < end);
    if (between || batch.some(([, tensor]) => tensor.page)) {
      throw new ConfigError("plan: the batch's tensors do not lie side by side on one page of the input arena");
    }
    this.#words = new Uint32Array((end - this.#begin) / 4);
    this.#tokens = new RowIndexer(elements);
    if (this.#tensors.has("pos_row_order")) this.#positions = new RowIndexer(elements);
    this.#ngrams = ngramTables(this.#tensors.keys()).map((table) => ({
      table,
      rows: new Uint32Array(elements),
      indexer: new RowIndexer(elements),
    }));
  }

  /** @param {Batch} batch of the session's shape */
  write(batch) {
    this.#set("ids", batch.ids);
    this.#set("targets", batch.targets);
    this.#set("positions", batch.positions);
    this.#set("segment_ids", batch.segmentIds);
    this.#set("sample_ids", batch.sampleIds);
    this.#setIndex("", this.#tokens.of(batch.ids));
    if (this.#positions) this.#setIndex("pos_", this.#positions.of(batch.positions));
    for (const { table, rows, indexer } of this.#ngrams) {
      ngramBuckets(batch.ids, batch.segmentIds, this.shape[1], table, rows);
      this.#setIndex(table.prefix, indexer.of(rows));
    }
    this.executor.writeWords(ARENA, 0, this.#begin, this.#words);
  }

  /**
   * @param {string} prefix
   * @param {RowIndex} index
   */
  #setIndex(prefix, index) {
    this.#set(`${prefix}row_order`, index.order);
    this.#set(`${prefix}row_starts`, index.starts);
    this.#set(`${prefix}row_ids`, index.ids);
    this.#set(`${prefix}row_count`, index.count);
  }

  /**
   * A plan lists the inputs that its programs read: others have no place.
   *
   * @param {string} name
   * @param {Uint32Array} values
   */
  #set(name, values) {
    const tensor = this.#tensors.get(name);
    if (tensor) this.#words.set(values, (tensor.offset - this.#begin) / 4);
  }
}
