/** @file From the text of a `tokenizer.json` to a tokenizer. May import: contracts, errors. */

import { isObject } from "../contracts/values.js";
import { DataContractError } from "../errors.js";
import { openBpe } from "./bpe.js";
import { BYTE_DOCUMENT, ByteTokenizer } from "./bytes.js";
import { CharacterTokenizer } from "./characters.js";
import { sameJson } from "./json_text.js";
import { parseDocument } from "./tokenizer.js";

/** @import { Tokenizer } from "./tokenizer.js" */

/**
 * @param {string} text
 * @returns {Promise<Tokenizer>}
 * @throws {DataContractError} for text that is not JSON, not a tokenizer document, of a model that is not supported, or
 *   that would lose text
 */
export async function openTokenizer(text) {
  const document = parseDocument(text);
  if (sameJson(document, BYTE_DOCUMENT)) return new ByteTokenizer();
  if (!isObject(document.model)) {
    throw new DataContractError('tokenizer.json: "model" is missing, expected an object with a "type" and a "vocab"');
  }
  return document.model.type === "WordLevel" ? CharacterTokenizer.fromDocument(document) : openBpe(text, document);
}
