/**
 * @file Files of JSON lines in a run folder: one object a line, written and flushed as it happens.
 *
 * A process that is killed can leave half a line at the end; reading stops there. A resumed run cuts what lies beyond its
 * checkpoint, and keeps the cut rows beside it. May import: folders.
 */

import { readPieces } from "../folders/folder.js";

/** @import { Directory, FileSink } from "../folders/folder.js" */

const NEWLINE = 10;

/** An append-only file of rows that have a `step`, in step order. It grows in its folder, not in memory. */
export class JsonLines {
  #folder;
  #file;
  #discarded;
  /** @type {FileSink | null} */
  #sink = null;

  /**
   * @param {Directory} folder
   * @param {string} file
   * @param {string} discarded the file of the rows that were cut
   */
  constructor(folder, file, discarded) {
    this.#folder = folder;
    this.#file = file;
    this.#discarded = discarded;
  }

  /** Write one row and flush it. @param {Record<string, unknown>} row */
  async append(row) {
    this.#sink ??= await this.#folder.append(this.#file);
    await this.#sink.write(new TextEncoder().encode(`${JSON.stringify(row)}\n`));
    await this.#sink.flush();
  }

  /**
   * Move the rows after `step` to the discarded file. Half a line at the end is dropped.
   *
   * @param {number} step
   * @returns {Promise<number>} how many there were
   */
  async cut(step) {
    await this.close();
    const size = await this.#folder.size(this.#file);
    if (size === null) return 0;
    let keep = 0;
    let count = 0;
    /** @type {FileSink | null} */
    let cut = null;
    for await (const { line, row } of this.#lines()) {
      if (cut || row.step > step) {
        cut ??= await this.#folder.append(this.#discarded);
        await cut.write(line);
        count++;
      } else keep += line.length;
    }
    await cut?.close();
    if (keep !== size) await (await this.#folder.append(this.#file, keep)).close();
    return count;
  }

  /** The step of the newest row; 0 without any. */
  async last() {
    let last = 0;
    for await (const row of this.rows()) last = Math.max(last, row.step);
    return last;
  }

  /** The complete rows; none if there is no file. */
  async *rows() {
    if ((await this.#folder.size(this.#file)) === null) return;
    for await (const { row } of this.#lines()) yield row;
  }

  async close() {
    const sink = this.#sink;
    this.#sink = null;
    await sink?.close();
  }

  /** @returns {AsyncGenerator<{line: Uint8Array, row: {step: number} & Record<string, unknown>}, void, void>} */
  async *#lines() {
    const decoder = new TextDecoder("utf-8", { fatal: true });
    let rest = new Uint8Array(0);
    for await (const piece of readPieces(this.#folder, this.#file)) {
      const bytes = new Uint8Array(rest.length + piece.length);
      bytes.set(rest);
      bytes.set(piece, rest.length);
      let begin = 0;
      for (let end = bytes.indexOf(NEWLINE); end >= 0; end = bytes.indexOf(NEWLINE, begin)) {
        const line = bytes.subarray(begin, end + 1);
        const row = parsed(decoder, line);
        if (!row) return;
        yield { line, row };
        begin = end + 1;
      }
      rest = bytes.subarray(begin);
    }
  }
}

/**
 * @param {TextDecoder} decoder
 * @param {Uint8Array} line
 * @returns {({step: number} & Record<string, unknown>) | null} null for what is no row
 */
function parsed(decoder, line) {
  try {
    const row = JSON.parse(decoder.decode(line));
    return Number.isInteger(row?.step) ? row : null;
  } catch {
    return null;
  }
}
