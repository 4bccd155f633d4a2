/**
 * @file The decoding programs: tokens into the key/value cache, the logits of one of them back.
 *
 * May import: executor.
 */

/** @import {Executor} from "./executor.js" */

const PROGRAMS = ["prefill", "decode"];

export class Decoder {
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
    for (let start = 0; start < ids.length; start += this.chunk) {
      const part = ids.slice(start, start + this.chunk);
      const padded = [...part, ...Array(this.chunk - part.length).fill(0)];
      logits = await this.#run("prefill", padded, start, part.length - 1);
    }
    return logits;
  }

  /**
   * Append one id at its position.
   *
   * @param {number} id
   * @param {number} position
   */
  decode(id, position) {
    return this.#run("decode", [id], position, 0);
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
    executor.run(program);
    return new Float32Array((await executor.readTensor("logits")).buffer);
  }
}
