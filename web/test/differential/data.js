/** @file What `answer.js` can be asked about tokenizers, token stores and batches. */

import { Buffer } from "node:buffer";
import { CharacterSet } from "../../runtime/tokenizers/characters.js";
import { jsonText } from "../../runtime/tokenizers/json_text.js";
import { openTokenizer } from "../../runtime/tokenizers/open.js";

/** @type {Record<string, (one: any) => unknown>} */
export const DATA_TASKS = {
  json_text: ({ value, indent }) => jsonText(value, indent ?? undefined),
  tokenizer: async ({ document, texts, ids, characters }) => {
    let tokenizer;
    if (characters) {
      const set = new CharacterSet();
      for (const text of texts) set.add(text);
      tokenizer = set.tokenizer();
    } else {
      tokenizer = await openTokenizer(document);
    }
    /** @param {() => unknown} work */
    const answer = (work) => {
      try {
        return work();
      } catch (error) {
        return String(error);
      }
    };
    const { kind, vocabularySize, endOfText, hash } = tokenizer;
    return {
      about: [kind, vocabularySize, endOfText, hash],
      document: Buffer.from(tokenizer.toJson()).toString("base64"),
      encoded: texts.map((/** @type {string} */ text) => answer(() => [...tokenizer.encode(text)])),
      decoded: ids.map((/** @type {number[]} */ list) => answer(() => tokenizer.decode(list))),
      streamed: ids.map((/** @type {number[]} */ list) =>
        answer(() => {
          const stream = tokenizer.stream();
          return list.map((id) => stream.push(id)).join("") + stream.finish();
        }),
      ),
    };
  },
};
