/** @file UTF-8 that says where it ends. May import: nothing. */

/**
 * @param {Uint8Array} bytes
 * @param {boolean} [complete] whether the text ends here; else a character that is cut at the end is left out
 * @returns {{text: string} | {offset: number}} the text, or where the first character begins that is not UTF-8; a byte
 *   order mark is a character like any other
 */
export function decodeUtf8(bytes, complete = true) {
  /** @param {number} length @param {boolean} stream */
  const decode = (length, stream) =>
    new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes.subarray(0, length), { stream });
  try {
    return { text: decode(bytes.length, !complete) };
  } catch {
    // The longest beginning that could go on well: bytes `good` belongs to the broken character, or begins it.
    let good = 0;
    for (let bad = bytes.length + 1; bad - good > 1; ) {
      const middle = (good + bad) >> 1;
      try {
        decode(middle, true);
        good = middle;
      } catch {
        bad = middle;
      }
    }
    return { offset: good - unfinished(bytes, good) };
  }
}

/**
 * @param {Uint8Array} bytes
 * @param {number} end
 * @returns {number} bytes before `end` of a character that is not complete there
 */
function unfinished(bytes, end) {
  for (let back = 1; back <= Math.min(3, end); back++) {
    const byte = bytes[end - back];
    if (byte >= 0xc0) return back < (byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : 2) ? back : 0;
    if (byte < 0x80) return 0;
  }
  return 0;
}
