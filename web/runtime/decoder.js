/**
 * @file The decoding programs: tokens into the key/value cache, the logits of one of them back.
 *
 * May import: executor, ngram.
 */

import { NO_TOKEN } from "./ngram.js";

/** @import {Executor} from "./executor.js" */

const PROGRAMS = ["prefill", "decode"];

export class Decoder {
  /** What the cache holds, the latest last: n-gram tables look back at it. @type {number[]} */
  #seen = [];

  /**
   * @param {Executor} executor
   * @param {number} contextLength
   */
  constructor(executor, contextLength) {
    this.executor = executor;
    this.contextLength = contextLength;
    this.chunk = executor.plan.settings.prefillTokens;
  }

  prepare() {
    return this.executor.prepare(PROGRAMS);
  }

  /**
   * Fill the cache from its first row on; the logits after the last id.
   *
   * @param {readonly number[]} ids at least one
   * @returns {Promise<Float32Array<ArrayBuffer>>}
   */
  async prefill(ids) {
    let logits = new Float32Array(0);
    this.#seen = [];
    for (let start = 0; start < ids.length; start += this.chunk) {
      const part = ids.slice(start, start + this.chunk);
      const padded = [...part, ...Array(this.chunk - part.length).fill(0)];
      logits = await this.#run("prefill", padded, start, part.length - 1);
      this.#seen.push(...part);
    }
    return logits;
  }

  /**
   * Append one id at its position.
   *
   * @param {number} id
   * @param {number} position
   */
  async decode(id, position) {
    const logits = await this.#run("decode", [id], position, 0);
    this.#seen.push(id);
    return logits;
  }

  /**
   * @param {string} program
   * @param {readonly number[]} ids
   * @param {number} start position of the first of them
   * @param {number} last which of them the logits are wanted of
   * @returns {Promise<Float32Array<ArrayBuffer>>}
   */
  async #run(program, ids, start, last) {
    const { executor, contextLength } = this;
    const positions = ids.map((_, index) => Math.min(start + index, contextLength - 1));
    executor.writeTensor(`${program}/ids`, Uint32Array.from(ids));
    executor.writeTensor(`${program}/positions`, Uint32Array.from(positions));
    executor.writeTensor(`${program}/start`, Uint32Array.of(start));
    executor.writeTensor(`${program}/last`, Uint32Array.of(last));
    const previous = executor.plan.tensors[`${program}/previous_ids`];
    if (previous) {
      const before = [...Array(previous.elements).fill(NO_TOKEN), ...this.#seen];
      executor.writeTensor(`${program}/previous_ids`, Uint32Array.from(before.slice(-previous.elements)));
    }
    executor.run(program);
    return new Float32Array((await executor.readTensor("logits")).buffer);
  }
}
