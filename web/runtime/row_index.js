/**
 * @file The row index of an embedding: which positions of a batch hold which id.
 *
 * The gradient of a table row is the sum over the positions that read it. With positions sorted by id on the host, a
 * device adds each row's positions in a fixed order, without floating-point atomics, so that two runs give the same
 * bits. May import: nothing.
 */

/**
 * @typedef {object} RowIndex
 * @property {Uint32Array<ArrayBuffer>} order [N] positions 0..N-1 sorted by id, equal ids in order of position
 * @property {Uint32Array<ArrayBuffer>} starts [N + 1]
 * @property {Uint32Array<ArrayBuffer>} ids [N]
 * @property {Uint32Array<ArrayBuffer>} count [1]
 */

/**
 * Makes the row index of N ids at a time, in arrays that it uses again: distinct id number u (of `count[0]`) is `ids[u]`,
 * at the positions `order[starts[u] .. starts[u + 1]]`. Beyond the count, starts are N and ids 0.
 */
export class RowIndexer {
  #keys;

  /** @param {number} size N, at most 2^20: an id and a position together are an exact float64 */
  constructor(size) {
    if (size > 2 ** 20)
      throw new RangeError(`a batch of ${size} tokens has no row index: at most ${2 ** 20} are possible`);
    this.size = size;
    this.#keys = new Float64Array(size);
    /** @type {RowIndex} */
    this.index = {
      order: new Uint32Array(size),
      starts: new Uint32Array(size + 1),
      ids: new Uint32Array(size),
      count: new Uint32Array(1),
    };
  }

  /**
   * @param {Uint32Array} values N ids
   * @returns {RowIndex} valid until the next call
   */
  of(values) {
    const { size } = this;
    const keys = this.#keys;
    const { order, starts, ids, count } = this.index;
    for (let i = 0; i < size; i++) keys[i] = values[i] * size + i;
    keys.sort();
    let unique = 0;
    let previous = -1;
    for (let i = 0; i < size; i++) {
      const id = Math.floor(keys[i] / size);
      order[i] = keys[i] - id * size;
      if (id !== previous) {
        starts[unique] = i;
        ids[unique] = id;
        unique++;
        previous = id;
      }
    }
    starts.fill(size, unique);
    ids.fill(0, unique);
    count[0] = unique;
    return this.index;
  }
}
