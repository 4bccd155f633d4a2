/** @file The 256 byte values of UTF-8; id and byte are the same number. May import: contracts, errors. */

import { jsonText } from "./json_text.js";
import { byteStream, checkIds, documentHash, newDecoder, plainDocument } from "./tokenizer.js";

/** @import { Tokenizer } from "./tokenizer.js" */

/**
 * The visible character that stands for each byte in byte-level vocabularies: GPT-2's convention. Printable Latin-1
 * stands for itself; the other bytes, in order, are U+0100, U+0101, ...
 */
export const BYTE_ALPHABET = byteAlphabet();

const BYTE_LEVEL = { type: "ByteLevel", add_prefix_space: false, trim_offsets: true, use_regex: false };

export const BYTE_DOCUMENT = plainDocument(BYTE_LEVEL, BYTE_LEVEL, {
  type: "BPE",
  dropout: null,
  unk_token: null,
  continuing_subword_prefix: null,
  end_of_word_suffix: null,
  fuse_unk: false,
  byte_fallback: false,
  ignore_merges: false,
  vocab: new Map(BYTE_ALPHABET.map((character, byte) => [character, byte])),
  merges: [],
});

/**
 * There is no end-of-text id: the vocabulary stays at 256. A lone surrogate that stands for an undecodable byte (Python's
 * `surrogateescape`) becomes that byte again; any other one becomes U+FFFD.
 *
 * @implements {Tokenizer}
 */
export class ByteTokenizer {
  /** @type {"bytes"} */
  kind = "bytes";
  vocabularySize = 256;
  /** @type {null} */
  endOfText = null;
  #utf8 = new TextEncoder();

  get hash() {
    return documentHash(BYTE_DOCUMENT);
  }

  /** @param {string} text @returns {Uint32Array} */
  encode(text) {
    // Even places are text, odd ones half a surrogate pair.
    const parts = text.split(/(\p{Cs})/u);
    if (parts.length === 1) return Uint32Array.from(this.#utf8.encode(text));
    return Uint32Array.from(
      parts.flatMap((part, place) => {
        const code = part.charCodeAt(0);
        return place % 2 && code >= 0xdc80 && code <= 0xdcff ? [code & 0xff] : [...this.#utf8.encode(part)];
      }),
    );
  }

  /** @param {Iterable<number>} ids */
  decode(ids) {
    return newDecoder().decode(Uint8Array.from(checkIds(ids, this)));
  }

  stream() {
    return byteStream((id) => Uint8Array.from(checkIds([id], this)));
  }

  toJson() {
    return `${jsonText(BYTE_DOCUMENT, 1)}\n`;
  }
}

function byteAlphabet() {
  let other = 0x100;
  return Array.from({ length: 256 }, (_, byte) => {
    const printable = (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte !== 0xad);
    return String.fromCharCode(printable ? byte : other++);
  });
}
