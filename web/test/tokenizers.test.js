/** @file Tokenizers on their own; `tests/differential/test_tokenizers.py` compares them with Python's. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { DataContractError } from "../runtime/errors.js";
import { BYTE_ALPHABET, ByteTokenizer } from "../runtime/tokenizers/bytes.js";
import { CharacterSet, CharacterTokenizer } from "../runtime/tokenizers/characters.js";
import { jsonText, sameJson } from "../runtime/tokenizers/json_text.js";
import { openTokenizer } from "../runtime/tokenizers/open.js";

/** A byte-level BPE that knows the words of "the fox", with a control token. */
function bpeDocument() {
  const merges = ["t h", "th e", "Ġ f", "Ġf o", "Ġfo x", "< |"].map((merge) => merge.split(" "));
  const tokens = ["<|endoftext|>", ...BYTE_ALPHABET, ...merges.map((pair) => pair.join(""))];
  return {
    version: "1.0",
    truncation: null,
    padding: null,
    added_tokens: [
      {
        id: 0,
        content: "<|endoftext|>",
        single_word: false,
        lstrip: false,
        rstrip: false,
        normalized: false,
        special: true,
      },
    ],
    normalizer: null,
    pre_tokenizer: { type: "ByteLevel", add_prefix_space: false, trim_offsets: true, use_regex: true },
    post_processor: null,
    decoder: { type: "ByteLevel", add_prefix_space: true, trim_offsets: true, use_regex: true },
    model: {
      type: "BPE",
      dropout: null,
      unk_token: null,
      continuing_subword_prefix: null,
      end_of_word_suffix: null,
      fuse_unk: false,
      byte_fallback: false,
      ignore_merges: false,
      vocab: Object.fromEntries(tokens.map((token, id) => [token, id])),
      merges,
    },
  };
}

test("bytes are the ids, and come back", async () => {
  const tokenizer = new ByteTokenizer();
  assert.equal(tokenizer.hash, "763a28805631461de9e34e4e562e5946e63adc587560e084455bfb42c55e99f6");
  assert.deepEqual([...tokenizer.encode("aé€")], [0x61, 0xc3, 0xa9, 0xe2, 0x82, 0xac]);
  // An undecodable byte that came as half of a pair is that byte again; other halves are repaired.
  assert.deepEqual([...tokenizer.encode("a\udcffz\ud83d")], [0x61, 0xff, 0x7a, 0xef, 0xbf, 0xbd]);
  assert.equal(tokenizer.decode([0xef, 0xbb, 0xbf, 0x61, 0xff]), "\ufeffa\ufffd");
  const again = await openTokenizer(tokenizer.toJson());
  assert.deepEqual([again.kind, again.toJson()], ["bytes", tokenizer.toJson()]);
});

test("characters are numbered in code point order, whatever object names do in JavaScript", async () => {
  const set = new CharacterSet();
  set.add("b1🙂");
  set.add("a0é");
  const tokenizer = set.tokenizer();
  assert.deepEqual([...tokenizer.encode("01abé🙂")], [0, 1, 2, 3, 4, 5]);
  assert.equal(tokenizer.decode([5, 0, 4]), "🙂0é");
  assert.ok(tokenizer.toJson().includes('"0": 0,\n   "1": 1,\n   "a": 2'));
  const again = await openTokenizer(tokenizer.toJson());
  assert.deepEqual([again.kind, again.hash], ["characters", tokenizer.hash]);
  assert.throws(() => tokenizer.encode("a🙂x"), /character 'x' \(U\+0078\) at offset 2 is not among the 6/);
  assert.throws(() => new CharacterTokenizer(["a", "b", "a"]), /'a' \(U\+0061\) appears twice/);
});

test("the text of a control token stays text", async () => {
  const tokenizer = await openTokenizer(JSON.stringify(bpeDocument()));
  assert.deepEqual([tokenizer.kind, tokenizer.endOfText, tokenizer.vocabularySize], ["bpe", 0, 263]);
  const text = "the fox<|endoftext|> the<|";
  const ids = [...tokenizer.encode(text)];
  assert.ok(!ids.includes(0));
  assert.equal(tokenizer.decode(ids), text);
  assert.equal(tokenizer.decode([...ids.slice(0, 2), 0]), "the fox");
  assert.equal(ids.length, 2 + "<|endoftext|>".length - 1 + 1 + 1 + 1);
});

test("what can be expressed only by a control token is refused", async () => {
  const document = bpeDocument();
  const vocab = { "<|endoftext|>": 0, a: 1, b: 2 };
  for (const fuse of [true, false]) {
    const model = { ...document.model, vocab, merges: [], unk_token: "<|endoftext|>", fuse_unk: fuse };
    const lossy = { ...document, pre_tokenizer: null, decoder: { type: "Fuse" }, model };
    const tokenizer = await openTokenizer(JSON.stringify(lossy));
    assert.deepEqual([...tokenizer.encode("ab")], [1, 2]);
    assert.throws(() => tokenizer.encode("abc"), /'abc' cannot be expressed with this tokenizer/);
  }
});

test("pieces of a stream join to the whole, and no half character is given out", async () => {
  const bpe = await openTokenizer(JSON.stringify(bpeDocument()));
  const characters = await openTokenizer(new CharacterTokenizer(["a", "é", "🙂"]).toJson());
  for (const [tokenizer, text] of /** @type {const} */ ([
    [new ByteTokenizer(), "aé🙂 \ufeff€"],
    [bpe, "the fox 🙂é"],
    [characters, "é🙂a"],
  ])) {
    const stream = tokenizer.stream();
    const pieces = Array.from(tokenizer.encode(text), (id) => stream.push(id));
    assert.equal(pieces.join("") + stream.finish(), text);
    assert.ok(!pieces.join("").includes("\ufffd"));
  }
  const stream = new ByteTokenizer().stream();
  assert.equal(stream.push(0xf0) + stream.finish(), "\ufffd");
});

test("an id outside the vocabulary is named", async () => {
  for (const tokenizer of [new ByteTokenizer(), await openTokenizer(JSON.stringify(bpeDocument()))]) {
    for (const wrong of [-1, tokenizer.vocabularySize, 2 ** 32, 0.5]) {
      assert.throws(() => tokenizer.decode([1, wrong]), DataContractError);
      assert.throws(() => tokenizer.stream().push(wrong), /id .* at position 0 is outside the vocabulary/);
    }
  }
});

test("a long word takes no longer than its length says", async () => {
  const tokenizer = await openTokenizer(JSON.stringify(bpeDocument()));
  const text = "the".repeat(100_000);
  assert.equal(tokenizer.encode(text).length, 100_000);
});

test("a damaged document gives a tokenizer or a refusal", async () => {
  const text = JSON.stringify(bpeDocument());
  let refused = 0;
  for (let place = 0; place < text.length; place += 37) {
    for (const character of '{}[]",:0a \\') {
      try {
        const damaged = await openTokenizer(text.slice(0, place) + character + text.slice(place + 1));
        damaged.decode(damaged.encode("the fox 🙂"));
      } catch (error) {
        assert.ok(error instanceof DataContractError, `${place} ${character}: ${error}`);
        assert.match(error.message, /tokenizer\.json/);
        refused += 1;
      }
    }
  }
  assert.ok(refused > 500);
});

test("JSON text has the order of Maps", () => {
  const value = new Map(
    /** @type {[string, unknown][]} */ ([
      ["b", [1, 2.5, 1e-7]],
      ["1", new Map()],
    ]),
  );
  assert.equal(jsonText(value), '{"b": [1, 2.5, 1e-07], "1": {}}');
  assert.equal(jsonText({ é: "\u2028" }), '{"\\u00e9": "\\u2028"}');
  assert.ok(sameJson({ 1: {}, b: [1, 2.5, 1e-7] }, value));
  assert.ok(!sameJson({ 1: [], b: [1, 2.5, 1e-7] }, value));
});
