"""Text becomes the same ids, and ids the same text, in both languages, whatever document the tokenizer comes from."""

from __future__ import annotations

import base64
import json
from random import Random
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from differential.both import Node, agree, draw
from differential.inputs import value
from hybrid.data.bpe import train_bpe
from hybrid.data.tokenizers import BYTE_DOCUMENT, ByteTokenizer, CharacterTokenizer, Tokenizer, load_tokenizer
from hybrid.errors import DataContractError

pytestmark = pytest.mark.node

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox doesn't.\n" * 5,
    "def encode(text):\n    return [byte for byte in text.encode('utf-8')]  # 0123 456\n" * 5,
    "Grüße aus Köln: naïve café, 東京 and a smile 🙂. It's WE'LL i'd\r\n\tx\n\n\n" * 3,
]
# White space of every kind, apostrophes, control tokens, marks, digits of other scripts, characters beyond the BMP.
PIECES = (
    *("the", " fox", "The ", "dog", "  ", " ", "\n", "\r\n", "\t", "'s", "'S", "'ll", "'re", "n't", "'", "'\u017f"),
    *("12", "3456", "٣٤", "½", "Ⅷ", "é", "e\u0301", "ß", "İ", "Σ", "ΟΔΟΣ", "東京", "🙂", "👩\u200d👩", "\ufeff"),
    *("\u0085", "\u00a0", "\u2028", "\x00", "\x1c", "\x7f", "\u180e", "\u3000", "_", "-", "...", "a", "b", "ab"),
    *("<|endoftext|>", "<|a|>", "<tool>", "    ", "</s>", "<s>", "▁", "▁ab", "<0x41>", "Ġ", "ĠĠ", "\ufffd", "ﬁ"),
    *("{", "}}", "((", "def", "x=1", "http://a.b/c?d=e&f"),
)
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def random_text(random: Random, lone: bool = True) -> str:
    text = "".join(random.choice(PIECES) for _ in range(random.randrange(14)))
    return text + random.choice(("\ud83d", "\udc80", "\udcff")) if lone and random.random() < 0.1 else text


def split_like(pattern: str, **more: Any) -> Any:
    behavior = more.pop("behavior", "isolated")
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior, **more),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def with_parts(document: str, **parts: Any) -> str:
    library = tokenizers.Tokenizer.from_str(document)
    for name, part in parts.items():
        setattr(library, name, part)
    return library.to_str()


def sentencepiece(**metaspace: Any) -> str:
    """A small vocabulary in the style of SentencePiece: marks for spaces, byte tokens for unknown characters."""
    words = ("a", "b", "e", "h", "t", "o", "f", "x", "▁", "ab", "▁ab", "th", "the", "▁the", "fo", "fox", "▁fox", "▁▁")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [("a", "b"), ("▁", "ab"), ("t", "h"), ("th", "e"), ("▁", "the"), ("f", "o"), ("fo", "x"), ("▁", "fox")]
    library = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=[*merges, ("▁", "▁")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    if metaspace:
        library.pre_tokenizer = pre_tokenizers.Metaspace(**metaspace)
        library.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=metaspace["prepend_scheme"])]
        )
    else:
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        library.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return library.to_str()


def with_unknown() -> str:
    vocabulary = {token: number for number, token in enumerate(("?", *"the foxdg.", "th", "the"))}
    library = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("t", "h"), ("th", "e")], unk_token="?", fuse_unk=True)
    )
    library.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    return library.to_str()


def added(document: str) -> str:
    library = tokenizers.Tokenizer.from_str(document)
    library.add_special_tokens(["<|a|>"])
    library.add_tokens(["    ", "<tool>", "he", "fo", "fox j"])
    token = tokenizers.AddedToken
    library.add_tokens(
        [token("dog", single_word=True), token("12", lstrip=True, rstrip=True), token("THE", normalized=True)]
    )
    library.add_special_tokens(["<|b|>"])
    return library.to_str()


def documents() -> dict[str, str]:
    trained = train_bpe(CORPUS, 400).to_json()
    ignoring = json.loads(trained)
    ignoring["model"]["ignore_merges"] = True
    texts = json.loads(trained)
    texts["model"]["merges"] = [" ".join(pair) for pair in texts["model"]["merges"]]
    texts["model"]["vocab"]["__proto__"] = 400
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return {
        "bytes": ByteTokenizer().to_json(),
        "trained": trained,
        "whole words": json.dumps(ignoring),
        "merges as texts": json.dumps(texts),
        "without an end of text": train_bpe(CORPUS, 300, end_of_text=None).to_json(),
        "prefix space": with_parts(trained, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
        "no words": with_parts(trained, pre_tokenizer=whole),
        "llama 3": with_parts(trained, pre_tokenizer=split_like(LLAMA3_PATTERN)),
        "matches only": with_parts(trained, pre_tokenizer=split_like(r"\s+|\S{1,4}", behavior="removed", invert=True)),
        "normalised": with_parts(
            trained, normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
        ),
        "compatible": with_parts(trained, normalizer=normalizers.NFKC()),
        "added": added(trained),
        "added and normalised": added(with_parts(trained, normalizer=normalizers.Lowercase())),
        "sentencepiece": sentencepiece(),
        "metaspace first": sentencepiece(prepend_scheme="first", split=False),
        "metaspace always": sentencepiece(prepend_scheme="always", split=True),
        "metaspace never": sentencepiece(prepend_scheme="never", split=True),
        "metaspace added": added(sentencepiece(prepend_scheme="first", split=False)),
        "unknown": with_unknown(),
    }


def answer(work: Any) -> Any:
    try:
        return work()
    except DataContractError as error:
        return f"DataContractError: {error}"


def python(case: dict[str, Any]) -> dict[str, Any]:
    tokenizer: Tokenizer
    if case["characters"]:
        tokenizer = CharacterTokenizer.from_texts(case["texts"])
    else:
        tokenizer = load_tokenizer(case["document"])

    def streamed(ids: list[int]) -> str:
        stream = tokenizer.stream()
        return "".join([stream.push(token) for token in ids]) + stream.finish()

    return {
        "about": [tokenizer.kind, tokenizer.vocabulary_size, tokenizer.end_of_text, tokenizer.hash],
        "document": base64.b64encode(tokenizer.to_json().encode()).decode(),
        "encoded": [answer(lambda text=text: tokenizer.encode(text).tolist()) for text in case["texts"]],
        "decoded": [answer(lambda ids=ids: tokenizer.decode(ids)) for ids in case["ids"]],
        "streamed": [answer(lambda ids=ids: streamed(ids)) for ids in case["ids"]],
    }


@pytest.mark.parametrize(("name", "document"), documents().items(), ids=documents())
def test_documents(node: Node, name: str, document: str) -> None:
    random = draw(f"tokenizer {name}")
    size = load_tokenizer(document).vocabulary_size
    ids = [[random.randrange(size) for _ in range(random.randrange(12))] for _ in range(60)]
    texts = [random_text(random) for _ in range(120)] + CORPUS
    ids += [[0, size], [-1], [2**32]]
    case = {"document": document, "characters": False, "texts": texts, "ids": ids}
    assert agree(node, "tokenizer", [case], python) == {"value": 1}


def test_characters(node: Node) -> None:
    random = draw("characters")
    cases = []
    for _ in range(60):
        texts = [random_text(random, random.random() < 0.1) for _ in range(random.randrange(4))]
        size = len(set("".join(texts)))
        ids = [[random.randrange(size) for _ in range(10)] for _ in range(3 if size else 0)] + [[size]]
        cases.append({"document": None, "characters": True, "texts": texts, "ids": ids})
    counts = agree(node, "tokenizer", cases, python)
    assert counts["value"] > 30 and counts["DataContractError"] > 0
    known = CharacterTokenizer.from_texts(["the fox 🙂"]).to_json()
    texts = ["the fox", "fox 🙂 the", "🙂🙂x", "dog", "\ud83d", ""]
    case = {"document": known, "characters": False, "texts": texts, "ids": [[0, 1, 2], [99]]}
    assert agree(node, "tokenizer", [case], python) == {"value": 1}


def test_what_is_refused(node: Node) -> None:
    """By the same error; by the same message where it is not a parser's or the native library's own."""
    trained = json.loads(train_bpe(CORPUS, 300).to_json())
    characters = json.loads(CharacterTokenizer.from_texts(["abc"]).to_json())

    def changed(document: dict[str, Any], **model: Any) -> str:
        return json.dumps({**document, "model": {**document["model"], **model}})

    def lacking(token: str) -> dict[str, int]:
        return {name: number for name, number in trained["model"]["vocab"].items() if name != token}

    documents = [
        *("{}", "[]", "null", "3", '"x"', '{"model": 3}', '{"model": {"type": "WordPiece"}}', '{"model": {}}'),
        *(
            changed(characters, vocab=vocab)
            for vocab in ({}, {"a": 1}, {"a": 0, "b": 0}, {"ab": 0}, {"a": -1}, [], None)
        ),
        *(changed(characters, vocab=vocab) for vocab in ({"a": True}, {"a": "0"}, {"\ud800": 0})),
        json.dumps({**characters, "normalizer": {"type": "Lowercase"}}),
        json.dumps({**characters, "pre_tokenizer": {"type": "Whitespace", "a": ["é", None, 1.5]}}),
        changed(trained, dropout=0.1),
        changed(trained, vocab={**trained["model"]["vocab"], "zzz": 2**31}),
        changed(trained, vocab={**trained["model"]["vocab"], "zzz": 299}),
        changed(trained, vocab=lacking("ĉ"), merges=[]),
        json.dumps({**trained, "decoder": {"type": "Fuse"}}),
        *(json.dumps({**BYTE_DOCUMENT, "model": {"type": kind, "vocab": {}}}) for kind in ("Unigram", None)),
    ]
    cases = [{"document": document, "characters": False, "texts": [], "ids": []} for document in documents]
    unclosed = {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    garbled = [
        *("", "{", "\x00", "[" * 100_000, '"' + "a" * 10),
        *(changed(trained, vocab={"a": -1}), changed(trained, merges=[["x", "y"]]), changed(trained, merges=["a b c"])),
        *(changed(trained, merges=3), changed(trained, vocab={"a": "0"})),
        json.dumps({**trained, "added_tokens": [{"content": "x"}]}),
        json.dumps({**BYTE_DOCUMENT, "model": {"type": "BPE", "vocab": {}}}),
        json.dumps({**trained, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [unclosed, byte_level]}}),
    ]
    for document, theirs in zip(
        garbled, node.ask("tokenizer", [{**cases[0], "document": text} for text in garbled]), strict=True
    ):
        with pytest.raises(DataContractError) as error:
            load_tokenizer(document)
        name, message = theirs["error"]
        assert name == "DataContractError"
        assert message.split(":")[0] == str(error.value).split(":")[0]
    assert agree(node, "tokenizer", cases, python) == {"DataContractError": len(cases)}


def test_what_only_javascript_refuses(node: Node) -> None:
    """Parts that the npm library does otherwise than the other one: no ids are better than other ids."""
    trained = train_bpe(CORPUS, 300).to_json()
    words = with_parts(
        trained,
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(use_regex=False)]),
    )
    digits = with_parts(
        trained, pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()])
    )
    merged = with_parts(trained, pre_tokenizer=split_like(" ", behavior="merged_with_next"))
    accents = with_parts(trained, normalizer=normalizers.StripAccents())
    cases = [
        {"document": text, "characters": False, "texts": [], "ids": []} for text in (words, digits, merged, accents)
    ]
    for case, theirs in zip(cases, node.ask("tokenizer", cases), strict=True):
        assert load_tokenizer(case["document"]).kind == "bpe"
        assert theirs["error"][0] == "DataContractError"
        assert "is not supported in JavaScript, where it could give other ids" in theirs["error"][1]


def test_json_text(node: Node) -> None:
    random = draw("json text")
    cases = [{"value": value(random, 4, 'abcé\n"<'), "indent": random.choice((None, 1, 2))} for _ in range(400)]
    cases = [case for case in cases if exact(case["value"])]
    assert len(cases) > 100

    def python(case: dict[str, Any]) -> str:
        return json.dumps(case["value"], indent=case["indent"], ensure_ascii=case["indent"] is None)

    assert agree(node, "json_text", cases, python) == {"value": len(cases)}


def exact(item: Any) -> bool:
    """Whether JavaScript keeps what Python's writer tells apart: 1.0 and 1, large integers, lone surrogates."""
    if isinstance(item, dict):
        return all(exact(key) and exact(inner) for key, inner in item.items())
    if isinstance(item, list):
        return all(map(exact, item))
    if isinstance(item, float):
        return not item.is_integer()
    if isinstance(item, int):
        return abs(item) < 2**53
    return not isinstance(item, str) or not any("\ud800" <= letter <= "\udfff" for letter in item)
