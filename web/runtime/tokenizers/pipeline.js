/**
 * @file The parts of a BPE `tokenizer.json` around its model: what happens to text before, and to tokens after it.
 *
 * Each part does exactly what the `tokenizers` library does (a fuzz compares them). One that would need more than that
 * is refused: other ids than everywhere else are worse than none. Splitting by a pattern is the npm library's.
 *
 * May import: contracts, errors.
 */

import { isObject } from "../contracts/values.js";
import { DataContractError } from "../errors.js";
import { BYTE_ALPHABET } from "./bytes.js";
import { jsonText } from "./json_text.js";
import { newDecoder } from "./tokenizer.js";

/** A part of a document, such as `{"type": "ByteLevel", ...}`. @typedef {Record<string, any>} Part */
/** @typedef {(text: string, atStart: boolean) => string[]} Splitter pieces of a text, which may begin the document */
/** @typedef {(tokens: string[]) => string[]} Decoder */
/**
 * Cuts a text before and after each match of a pattern.
 *
 * @typedef {(pattern: Part, matchesOnly: boolean) => (text: string) => string[]} PatternSplitter
 */

/** What a ByteLevel part with `use_regex` splits by: GPT-2's pattern. */
const GPT2_PATTERN = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

/** @param {unknown} part @returns {Part | null} */
const partOf = (part) => (isObject(part) ? part : null);

/**
 * @param {string} where
 * @param {unknown} part
 * @returns {DataContractError}
 */
function unsupported(where, part) {
  return new DataContractError(
    `tokenizer.json: the ${where} ${jsonText(part).slice(0, 200)} is not supported in JavaScript, where it could give ` +
      "other ids than elsewhere; build the token store with `hybrid data build`",
  );
}

/**
 * What is done to text first.
 *
 * @param {unknown} given the document's "normalizer"
 * @returns {(text: string) => string}
 */
export function normalizerOf(given) {
  const part = partOf(given);
  switch (part ? part.type : null) {
    case null:
      if (given === null || given === undefined) return (text) => text;
      break;
    case "Sequence": {
      const steps = listOf(part?.normalizers).map(normalizerOf);
      return (text) => steps.reduce((done, step) => step(done), text);
    }
    case "NFC":
    case "NFD":
    case "NFKC":
    case "NFKD":
      return (text) => text.normalize(part?.type);
    case "Lowercase":
      // Character by character: what a letter becomes does not depend on its neighbours, unlike in JavaScript.
      return (text) => Array.from(text, (character) => character.toLowerCase()).join("");
    case "Prepend":
      if (typeof part?.prepend !== "string") break;
      return (text) => text && part.prepend + text;
    case "Replace": {
      const replace = replacement(part);
      if (replace) return replace;
    }
  }
  throw unsupported("normalizer", given);
}

/** @param {unknown} list @returns {unknown[]} */
function listOf(list) {
  return Array.isArray(list) ? list : [];
}

/** @param {Part | null} part @returns {((text: string) => string) | null} null for a pattern that is no plain text */
function replacement(part) {
  const from = part?.pattern?.String;
  return typeof from === "string" && from && typeof part?.content === "string"
    ? (text) => text.split(from).join(part.content)
    : null;
}

/**
 * How text falls into the pieces that the model sees one at a time.
 *
 * @param {unknown} given the document's "pre_tokenizer"
 * @param {PatternSplitter} split
 * @returns {Splitter}
 */
export function splitterOf(given, split) {
  const part = partOf(given);
  switch (part ? part.type : null) {
    case null:
      if (given === null || given === undefined) return (text) => [text];
      break;
    case "Sequence": {
      const steps = listOf(part?.pretokenizers).map((step) => splitterOf(step, split));
      return (text, atStart) =>
        steps.reduce((pieces, step) => pieces.flatMap((piece, place) => step(piece, atStart && !place)), [text]);
    }
    case "ByteLevel": {
      const words = part?.use_regex === false ? null : split({ Regex: GPT2_PATTERN }, false);
      return (text) => {
        const prefixed = part?.add_prefix_space && !text.startsWith(" ") ? ` ${text}` : text;
        return (words ? words(prefixed) : [prefixed]).map(spell);
      };
    }
    case "Split": {
      const { behavior, invert, pattern } = /** @type {Part} */ (part);
      if (!isObject(pattern)) break;
      if (behavior === "Isolated") return split(pattern, false);
      if (behavior === "Removed" && invert === true) return split(pattern, true);
      break;
    }
    case "Metaspace": {
      const { replacement: mark, prepend_scheme: scheme, split: cut } = /** @type {Part} */ (part);
      if (typeof mark !== "string" || !mark || !["always", "first", "never"].includes(scheme)) break;
      return (text, atStart) => {
        const marked = text.replaceAll(" ", () => mark);
        const prefix = (scheme === "always" || (scheme === "first" && atStart)) && !marked.startsWith(mark);
        const whole = prefix ? mark + marked : marked;
        return cut === false ? [whole] : cutBefore(whole, mark);
      };
    }
  }
  throw unsupported("pre_tokenizer", given);
}

/** @param {string} text @param {string} mark @returns {string[]} pieces, each but perhaps the first beginning with a mark */
function cutBefore(text, mark) {
  const [head, ...tail] = text.split(mark);
  const marked = tail.map((piece) => mark + piece);
  return head ? [head, ...marked] : marked;
}

const UTF8 = new TextEncoder();

/** @param {string} text @returns {string} its bytes, each as the character that stands for it */
function spell(text) {
  let spelled = "";
  for (const byte of UTF8.encode(text)) spelled += BYTE_ALPHABET[byte];
  return spelled;
}

const BYTE_OF = new Map(BYTE_ALPHABET.map((character, byte) => [character, byte]));

/** @param {string} token @returns {number[] | null} the bytes that it spells; null if one of its characters stands for none */
export function spelledBytes(token) {
  const bytes = [];
  for (const character of token) {
    const byte = BYTE_OF.get(character);
    if (byte === undefined) return null;
    bytes.push(byte);
  }
  return bytes;
}

/**
 * How tokens become text: the results joined.
 *
 * @param {unknown} given the document's "decoder"
 * @returns {Decoder}
 */
export function decoderOf(given) {
  const part = partOf(given);
  switch (part ? part.type : null) {
    case null:
      if (given === null || given === undefined) return (tokens) => [tokens.join(" ")];
      break;
    case "Sequence": {
      const steps = listOf(part?.decoders).map(decoderOf);
      return (tokens) => steps.reduce((done, step) => step(done), tokens);
    }
    case "ByteLevel":
      return (tokens) => {
        const bytes = tokens.flatMap((token) => spelledBytes(token) ?? [...UTF8.encode(token)]);
        return [newDecoder().decode(Uint8Array.from(bytes))];
      };
    case "Fuse":
      return (tokens) => [tokens.join("")];
    case "ByteFallback":
      return fallback;
    case "Replace": {
      const replace = replacement(part);
      if (replace) return (tokens) => tokens.map(replace);
      break;
    }
    case "Strip": {
      const { content, start, stop } = /** @type {Part} */ (part);
      if (typeof content !== "string" || !Number.isInteger(start) || !Number.isInteger(stop)) break;
      return (tokens) => tokens.map((token) => strip([...token], content, start, stop));
    }
    case "Metaspace": {
      const { replacement: mark, prepend_scheme: scheme } = /** @type {Part} */ (part);
      if (typeof mark !== "string" || !mark) break;
      return (tokens) =>
        tokens.map((token, place) => token.replaceAll(mark, () => (place || scheme === "never" ? " " : "")));
    }
  }
  throw unsupported("decoder", given);
}

/** @param {string[]} tokens `<0x0A>` is the byte 10; runs of bytes that are not UTF-8 become U+FFFD for each byte */
function fallback(tokens) {
  /** @type {string[]} */
  const texts = [];
  /** @type {number[]} */
  let bytes = [];
  const flush = () => {
    if (!bytes.length) return;
    const text = newDecoder().decode(Uint8Array.from(bytes));
    texts.push(isUtf8(bytes) ? text : "\ufffd".repeat(bytes.length));
    bytes = [];
  };
  for (const token of tokens) {
    const found = /^<0x([0-9A-Fa-f]{2})>$/.exec(token);
    if (found) {
      bytes.push(Number.parseInt(found[1], 16));
    } else {
      flush();
      texts.push(token);
    }
  }
  flush();
  return texts;
}

/** @param {number[]} bytes */
function isUtf8(bytes) {
  try {
    new TextDecoder("utf-8", { fatal: true }).decode(Uint8Array.from(bytes));
    return true;
  } catch {
    return false;
  }
}

/**
 * @param {string[]} characters
 * @param {string} content
 * @param {number} start at most so many of it are taken away in front
 * @param {number} stop and at the end
 */
function strip(characters, content, start, stop) {
  let begin = 0;
  let end = characters.length;
  while (begin < start && characters[begin] === content) begin++;
  while (characters.length - end < stop && end > 0 && characters[end - 1] === content) end--;
  return begin < end ? characters.slice(begin, end).join("") : "";
}
