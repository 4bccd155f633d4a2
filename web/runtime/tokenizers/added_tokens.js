/**
 * @file Added tokens of a BPE `tokenizer.json`: which ids they have, and where they are in a text.
 *
 * May import: nothing.
 */

/**
 * @typedef {object} AddedToken
 * @property {string} content
 * @property {number} id the one that it really has
 * @property {boolean} special whether it is a control token
 * @property {boolean} normalized whether it is looked for after the normalizer
 * @property {boolean} single_word
 * @property {boolean} lstrip whether it takes the white space before it
 * @property {boolean} rstrip and after it
 */

/**
 * The added tokens with the ids that the `tokenizers` library gives them: that of the model's token of this name, or one
 * behind all others, whatever the document says.
 *
 * @param {readonly any[]} listed
 * @param {ReadonlyMap<string, number>} vocabulary of the model
 * @returns {Map<string, AddedToken>} by content
 */
export function numbered(listed, vocabulary) {
  /** @type {Map<string, AddedToken>} */
  const added = new Map();
  let largest = -1;
  for (const token of listed) {
    if (!token.content) continue;
    const known = added.get(token.content)?.id ?? vocabulary.get(token.content);
    const id = known ?? Math.max(largest + 1, vocabulary.size);
    largest = Math.max(largest, id);
    added.set(token.content, { ...token, id });
  }
  return added;
}

const WORD_ENDS = /[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}]$/u;
const WORD_BEGINS = /^[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}]/u;

/** A part of a text: an added token, or text between them. @typedef {AddedToken | string} Section */

/**
 * Cuts texts into added tokens and what lies between; of several tokens at one place the longest wins.
 *
 * @param {readonly (readonly [content: string, token: AddedToken])[]} tokens
 * @returns {(text: string) => Section[]}
 */
export function finder(tokens) {
  const found = new Map(tokens);
  if (!found.size) return (text) => (text ? [text] : []);
  const longestFirst = [...found.keys()].sort((a, b) => b.length - a.length);
  const pattern = new RegExp(longestFirst.map((text) => text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&")).join("|"), "gu");
  return (text) => {
    /** @type {Section[]} */
    const sections = [];
    let done = 0;
    for (const match of text.matchAll(pattern)) {
      const token = /** @type {AddedToken} */ (found.get(match[0]));
      let begin = match.index;
      let end = begin + match[0].length;
      if (token.single_word && (WORD_ENDS.test(text.slice(0, begin)) || WORD_BEGINS.test(text.slice(end)))) continue;
      if (token.lstrip) begin = Math.max(done, begin - spaces(/\p{White_Space}*$/u, text.slice(0, begin)));
      if (token.rstrip) end += spaces(/^\p{White_Space}*/u, text.slice(end));
      if (done < begin) sections.push(text.slice(done, begin));
      sections.push(token);
      done = end;
    }
    if (done < text.length) sections.push(text.slice(done));
    return sections;
  };
}

/** @param {RegExp} pattern @param {string} text */
const spaces = (pattern, text) => pattern.exec(text)?.[0].length ?? 0;
