"""Tokenizers: exact round trips, no control tokens from text, documents that other programs open, hostile documents."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from data.corpora import shared
from hybrid.data.bpe import BpeTokenizer, train_bpe
from hybrid.data.tokenizers import BYTE_DOCUMENT, ByteTokenizer, CharacterTokenizer, Tokenizer, load_tokenizer
from hybrid.errors import ConfigError, DataContractError

TEXTS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox does not.\n" * 5,
    "def encode(text):\n    return [byte for byte in text.encode('utf-8')]\n" * 5,
    "Grüße aus Köln: naïve café, 東京 and a smile 🙂.\n" * 3,
]
SIZE = 340  # of the trained vocabularies: less than the texts could fill


@pytest.fixture(scope="module")
def bpe() -> BpeTokenizer:
    return train_bpe(TEXTS, SIZE)


def everything() -> list[Tokenizer]:
    return [ByteTokenizer(), CharacterTokenizer.from_texts(TEXTS), train_bpe(TEXTS, SIZE)]


@pytest.mark.parametrize("tokenizer", everything(), ids=lambda tokenizer: tokenizer.kind)
class TestEveryTokenizer:
    def test_text_comes_back(self, tokenizer: Tokenizer) -> None:
        for text in ["", *TEXTS]:
            ids = tokenizer.encode(text)
            assert ids.dtype == "uint32"
            assert tokenizer.decode(ids) == text
            assert all(ids < tokenizer.vocabulary_size)

    def test_a_batch_is_encoded_as_its_texts_are(self, tokenizer: Tokenizer) -> None:
        batch = tokenizer.encode_batch(["", *TEXTS])
        assert [ids.tolist() for ids in batch] == [tokenizer.encode(text).tolist() for text in ["", *TEXTS]]

    def test_its_document_restores_it(self, tokenizer: Tokenizer) -> None:
        restored = load_tokenizer(tokenizer.to_json())
        assert type(restored) is type(tokenizer)
        assert (restored, restored.hash, restored.end_of_text) == (tokenizer, tokenizer.hash, tokenizer.end_of_text)
        assert restored.to_json() == tokenizer.to_json()
        assert restored.encode(TEXTS[2]).tolist() == tokenizer.encode(TEXTS[2]).tolist()

    def test_the_hash_is_of_the_content_not_of_the_layout(self, tokenizer: Tokenizer) -> None:
        document = json.loads(tokenizer.to_json())
        shuffled = json.dumps(dict(reversed(document.items())))
        assert load_tokenizer(shuffled).hash == tokenizer.hash

    def test_the_tokenizers_library_opens_the_document_and_agrees(self, tokenizer: Tokenizer) -> None:
        library = tokenizers.Tokenizer.from_str(tokenizer.to_json())
        assert library.get_vocab_size() == tokenizer.vocabulary_size
        for text in TEXTS:
            ids = tokenizer.encode(text).tolist()
            assert library.encode(text, add_special_tokens=False).ids == ids
            assert library.decode(ids) == text

    def test_streamed_pieces_join_to_the_whole(self, tokenizer: Tokenizer) -> None:
        for text in TEXTS:
            stream = tokenizer.stream()
            pieces = [stream.push(int(token)) for token in tokenizer.encode(text)]
            assert "".join(pieces) + stream.finish() == text
            assert not any("\ufffd" in piece for piece in pieces)

    @pytest.mark.parametrize("wrong", [-1, "vocabulary_size", 2**32])
    def test_an_id_outside_the_vocabulary_is_named(self, tokenizer: Tokenizer, wrong: Any) -> None:
        wrong = tokenizer.vocabulary_size if wrong == "vocabulary_size" else wrong
        with pytest.raises(
            DataContractError, match=rf"id {wrong} at position 1 .*0\.\.{tokenizer.vocabulary_size - 1}"
        ):
            tokenizer.decode([0, wrong])


def test_the_hashes_tell_tokenizers_apart() -> None:
    kinds = [*everything(), CharacterTokenizer.from_texts(["abc"]), train_bpe(TEXTS, 300)]
    assert len({tokenizer.hash for tokenizer in kinds}) == len(kinds)


class TestBytes:
    def test_ids_are_the_utf8_bytes(self) -> None:
        assert ByteTokenizer().encode("aé€").tolist() == [0x61, 0xC3, 0xA9, 0xE2, 0x82, 0xAC]
        assert ByteTokenizer().vocabulary_size == 256
        assert ByteTokenizer().end_of_text is None

    def test_undecodable_bytes_survive_as_surrogate_escapes(self) -> None:
        raw = bytes(range(256))
        ids = ByteTokenizer().encode(raw.decode("utf-8", "surrogateescape"))
        assert ByteTokenizer().decode_bytes(ids) == raw

    def test_other_lone_surrogates_become_the_replacement_character(self) -> None:
        assert ByteTokenizer().decode(ByteTokenizer().encode("a\ud83dz")) == "a\ufffdz"
        assert ByteTokenizer().decode_bytes(ByteTokenizer().encode("\ud83d\udc80\udcff")) == b"\xef\xbf\xbd\x80\xff"

    @given(st.lists(st.integers(0, 255), max_size=40))
    def test_streaming_equals_decoding_for_any_bytes(self, ids: list[int]) -> None:
        stream = ByteTokenizer().stream()
        assert "".join([stream.push(token) for token in ids]) + stream.finish() == ByteTokenizer().decode(ids)


class TestCharacters:
    def test_tinyshakespeare_has_65_characters_and_comes_back(self) -> None:
        text = shared("tinyshakespeare.txt").read_text(encoding="utf-8")
        tokenizer = CharacterTokenizer.from_texts([text])
        assert tokenizer.vocabulary_size == 65
        assert "".join(tokenizer.characters) == "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
        ids = tokenizer.encode(text)
        assert len(ids) == 1_115_394
        assert tokenizer.decode(ids) == text

    def test_ids_are_ranks_in_code_point_order(self) -> None:
        tokenizer = CharacterTokenizer.from_texts(["b🙂", "aé"])
        assert tokenizer.characters == ("a", "b", "é", "🙂")
        assert tokenizer.encode("🙂ba").tolist() == [3, 1, 0]

    def test_an_unknown_character_is_named_with_its_offset(self) -> None:
        tokenizer = CharacterTokenizer.from_texts(["abc"])
        with pytest.raises(DataContractError, match=r"character 'é' \(U\+00E9\) at offset 2 is not among the 3"):
            tokenizer.encode("abé")
        with pytest.raises(DataContractError, match=r"U\+D83D"):
            tokenizer.encode("\ud83d")

    @pytest.mark.parametrize("characters", [[], ["ab"], ["a", "b", "a"], [""], ["\ud800"]])
    def test_what_is_no_set_of_characters_is_refused(self, characters: list[str]) -> None:
        with pytest.raises(DataContractError):
            CharacterTokenizer(characters)

    @given(st.text(alphabet=st.characters(exclude_categories=("Cs",)), min_size=1))
    def test_any_text_comes_back_also_through_the_library(self, text: str) -> None:
        tokenizer = CharacterTokenizer.from_texts([text])
        assert tokenizer.decode(tokenizer.encode(text)) == text
        library = tokenizers.Tokenizer.from_str(tokenizer.to_json())
        assert library.encode(text).ids == tokenizer.encode(text).tolist()


class TestBpe:
    def test_training_twice_gives_the_same_tokenizer(self, bpe: BpeTokenizer) -> None:
        assert train_bpe(iter(TEXTS), SIZE).to_json() == bpe.to_json()

    def test_a_trained_vocabulary_has_every_byte_and_ends_texts(self, bpe: BpeTokenizer) -> None:
        assert bpe.vocabulary_size == SIZE
        assert bpe.end_of_text == bpe.control_tokens["<|endoftext|>"]
        assert bpe.decode(bpe.encode("\x00\x7f\u0100\U0010ffff")) == "\x00\x7f\u0100\U0010ffff"

    def test_a_small_corpus_gives_a_smaller_vocabulary(self) -> None:
        assert train_bpe(["ab ab"], 1000).vocabulary_size < 265

    def test_a_vocabulary_without_room_for_the_bytes_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"vocabulary of 256 .* 257\.\."):
            train_bpe(TEXTS, 256)
        assert train_bpe(TEXTS, 256, end_of_text=None).vocabulary_size == 256

    def test_an_empty_corpus_trains_nothing(self) -> None:
        with pytest.raises(DataContractError, match="no text"):
            train_bpe(["", ""], 300)

    def test_it_agrees_with_the_library_on_random_text(self, bpe: BpeTokenizer) -> None:
        library = tokenizers.Tokenizer.from_str(bpe.to_json())
        generator = random.Random(5)
        alphabet = "the fox\n\t  dög.东🙂0123'"
        for _ in range(200):
            text = "".join(generator.choices(alphabet, k=generator.randrange(60)))
            assert bpe.encode(text).tolist() == library.encode(text, add_special_tokens=False).ids
            assert bpe.decode(bpe.encode(text)) == text

    def test_it_agrees_with_the_library_on_web_text(self, bpe: BpeTokenizer) -> None:
        lines = shared("c4_demo.jsonl").read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)["text"] for line in lines[:100]]
        tokenizer = train_bpe(texts, 2048)
        library = tokenizers.Tokenizer.from_str(tokenizer.to_json())
        for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
            assert ids.tolist() == library.encode(text, add_special_tokens=False).ids
            assert tokenizer.decode(ids) == text

    def test_the_text_of_a_control_token_stays_text(self, bpe: BpeTokenizer) -> None:
        text = "before<|endoftext|>after"
        ids = bpe.encode(text)
        assert bpe.end_of_text not in ids.tolist()
        assert bpe.decode(ids) == text

    def test_a_control_token_decodes_to_nothing(self, bpe: BpeTokenizer) -> None:
        assert bpe.end_of_text is not None
        assert bpe.decode([*bpe.encode("a"), bpe.end_of_text, *bpe.encode("b")]) == "ab"

    def test_control_text_stays_text_where_whole_words_are_looked_up(self, bpe: BpeTokenizer) -> None:
        """`ignore_merges` looks a whole word up in the vocabulary, past the added tokens."""
        document = json.loads(bpe.to_json())
        document["model"]["ignore_merges"] = True
        document["pre_tokenizer"]["use_regex"] = False
        tokenizer = load_tokenizer(json.dumps(document))
        assert tokenizer.end_of_text not in tokenizer.encode("<|endoftext|>").tolist()

    def test_control_text_stays_text_where_merges_would_build_it(self) -> None:
        trained = json.loads(train_bpe(["xq xq xqq xqq"] * 4, 300).to_json())
        number = trained["model"]["vocab"]["xq"]
        token = {"id": number, "content": "xq", "single_word": False, "lstrip": False, "rstrip": False}
        trained["added_tokens"].append({**token, "normalized": False, "special": True})
        tokenizer = load_tokenizer(json.dumps(trained))
        for text in ("xq", "a xq bxq", "xqq xqq"):
            assert number not in tokenizer.encode(text).tolist()
            assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_added_tokens_that_are_not_control_tokens_keep_their_ids(self, bpe: BpeTokenizer) -> None:
        library = tokenizers.Tokenizer.from_str(bpe.to_json())
        library.add_special_tokens(["<|a|>"])
        library.add_tokens(["    ", "<tool>"])
        library.add_special_tokens(["<|b|>"])
        tokenizer = load_tokenizer(library.to_str())
        text = "x    y<tool>"
        ids = tokenizer.encode(text).tolist()
        assert ids == library.encode(text, add_special_tokens=False).ids
        assert {SIZE + 1, SIZE + 2} <= set(ids)
        assert tokenizer.decode(ids) == text
        assert not {SIZE, SIZE + 3} & set(tokenizer.encode("<|a|><|b|>").tolist())

    def test_truncation_padding_and_templates_of_a_document_are_not_applied(self, bpe: BpeTokenizer) -> None:
        library = tokenizers.Tokenizer.from_str(bpe.to_json())
        library.enable_truncation(4)
        library.enable_padding(length=50)
        library.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
        tokenizer = load_tokenizer(library.to_str())
        assert tokenizer.encode(TEXTS[0]).tolist() == bpe.encode(TEXTS[0]).tolist()

    def test_lone_surrogates_become_the_replacement_character(self, bpe: BpeTokenizer) -> None:
        assert bpe.decode(bpe.encode("a\ud83dz")) == "a\ufffdz"

    @settings(max_examples=50)
    @given(ids=st.lists(st.integers(0, SIZE - 1), max_size=30))
    def test_streaming_equals_decoding_for_any_ids(self, ids: list[int], bpe: BpeTokenizer) -> None:
        stream = bpe.stream()
        assert "".join([stream.push(token) for token in ids]) + stream.finish() == bpe.decode(ids)

    def test_tokens_that_javascript_cannot_have_as_keys_are_hashed_too(self) -> None:
        document = json.loads(train_bpe(TEXTS, SIZE).to_json())
        document["model"]["vocab"]["__proto__"] = SIZE
        tokenizer = load_tokenizer(json.dumps(document))
        assert tokenizer.vocabulary_size == SIZE + 1
        assert len(tokenizer.hash) == 64


class TestByteFallback:
    """Vocabularies in the SentencePiece style: spaces are written as U+2581, unknown characters as byte tokens."""

    @pytest.fixture
    def document(self) -> dict[str, Any]:
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁ab"]
        merges = [["a", "b"], ["▁", "ab"]]
        library = tokenizers.Tokenizer(
            tokenizers.models.BPE(
                vocab={token: index for index, token in enumerate(tokens)},
                merges=[(left, right) for left, right in merges],
                unk_token="<unk>",
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        library.normalizer = tokenizers.normalizers.Replace(" ", "▁")
        library.decoder = tokenizers.decoders.Sequence(
            [
                tokenizers.decoders.Replace("▁", " "),
                tokenizers.decoders.ByteFallback(),
                tokenizers.decoders.Fuse(),
            ]
        )
        library.add_special_tokens(["<unk>", "<s>", "</s>"])
        return dict(json.loads(library.to_str()))

    def test_text_comes_back_and_streams(self, document: dict[str, Any]) -> None:
        tokenizer = load_tokenizer(json.dumps(document))
        assert tokenizer.end_of_text == 2
        text = "ab ab 🙂é</s> b"
        ids = tokenizer.encode(text).tolist()
        assert 2 not in ids
        assert tokenizer.decode(ids) == text
        stream = tokenizer.stream()
        pieces = [stream.push(token) for token in ids]
        assert "".join(pieces) + stream.finish() == text
        assert not any("\ufffd" in piece for piece in pieces)

    def test_broken_bytes_are_not_held_back_for_ever(self, document: dict[str, Any]) -> None:
        tokenizer = load_tokenizer(json.dumps(document))
        stream = tokenizer.stream()
        pieces = [stream.push(3 + 0xFF) for _ in range(8)]
        assert any(pieces)

    def test_a_missing_byte_token_is_refused(self, document: dict[str, Any]) -> None:
        vocabulary = {token: index for token, index in document["model"]["vocab"].items() if token != "<0x0A>"}
        changed = {**document, "model": {**document["model"], "vocab": vocabulary}}
        with pytest.raises(DataContractError, match=r"1 of the 256 bytes have no token \(the first is 0x0A\)"):
            load_tokenizer(json.dumps(changed))

    def test_a_character_that_only_a_control_token_could_stand_for_is_named(self, document: dict[str, Any]) -> None:
        changed = {**document, "model": {**document["model"], "byte_fallback": False}}
        tokenizer = load_tokenizer(json.dumps(changed))
        assert tokenizer.decode(tokenizer.encode("ab b")) == "ab b"
        with pytest.raises(DataContractError, match="'z' cannot be expressed with this tokenizer"):
            tokenizer.encode_batch(["ab", "abz"])


class TestHostileDocuments:
    @pytest.mark.parametrize(
        "text",
        [
            "",
            "{}",
            "[]",
            "null",
            "\x00",
            "{",
            '{"model": 3}',
            '{"model": {"type": "BPE"}}',
            "[" * 100_000,
            '"' + "a" * 10,
        ],
    )
    def test_what_is_no_tokenizer_is_refused(self, text: str) -> None:
        with pytest.raises(DataContractError, match=r"tokenizer\.json"):
            load_tokenizer(text)

    @pytest.mark.parametrize("kind", ["WordPiece", "Unigram", "Something", None])
    def test_models_that_are_not_supported_are_named(self, kind: str | None) -> None:
        with pytest.raises(DataContractError, match=rf"model type {kind!r} is not supported"):
            load_tokenizer(json.dumps({**BYTE_DOCUMENT, "model": {"type": kind, "vocab": {}}}))

    @pytest.mark.parametrize(
        "vocab", [{}, {"a": 1}, {"a": 0, "b": 0}, {"ab": 0}, {"a": -1}, {"a": 0.0}, {"a": True}, {"a": "0"}, [], None]
    )
    def test_garbled_characters_are_refused(self, vocab: Any) -> None:
        document = json.loads(CharacterTokenizer.from_texts(["abc"]).to_json())
        document["model"]["vocab"] = vocab
        with pytest.raises(DataContractError):
            load_tokenizer(json.dumps(document))

    def test_a_character_tokenizer_with_a_normalizer_is_refused(self) -> None:
        document = json.loads(CharacterTokenizer.from_texts(["abc"]).to_json())
        with pytest.raises(DataContractError, match="settings beyond its characters"):
            load_tokenizer(json.dumps({**document, "normalizer": {"type": "Lowercase"}}))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"dropout": 0.1}, "encoding random"),
            ({"vocab": {"a": -1}}, "cannot|not a tokenizer"),
            ({"merges": [["x", "y"]]}, "not a tokenizer"),
            ({"vocab": {}}, "empty|have no token"),
        ],
    )
    def test_garbled_bpe_is_refused(self, bpe: BpeTokenizer, change: dict[str, Any], message: str) -> None:
        document = json.loads(bpe.to_json())
        document["model"].update(change)
        if "vocab" in change:
            document["model"]["merges"], document["added_tokens"] = [], []
        with pytest.raises(DataContractError, match=message):
            load_tokenizer(json.dumps(document))

    def test_a_vocabulary_that_cannot_spell_every_byte_is_refused(self, bpe: BpeTokenizer) -> None:
        """The library would drop such text without a word."""
        document = json.loads(bpe.to_json())
        del document["model"]["vocab"]["ĉ"]
        document["model"]["merges"] = []
        with pytest.raises(DataContractError, match=r"1 of the 256 bytes have no token \(the first is 0x09\)"):
            load_tokenizer(json.dumps(document))

    def test_an_absurd_id_is_refused(self, bpe: BpeTokenizer) -> None:
        document = json.loads(bpe.to_json())
        document["model"]["vocab"]["zzz"] = 2**31
        with pytest.raises(DataContractError, match=f"id {2**31} is too large"):
            load_tokenizer(json.dumps(document))

    def test_two_tokens_with_one_id_are_refused(self, bpe: BpeTokenizer) -> None:
        document = json.loads(bpe.to_json())
        document["model"]["vocab"]["zzz"] = SIZE - 1
        with pytest.raises(DataContractError, match="share one id"):
            load_tokenizer(json.dumps(document))

    @given(st.integers(0, 10**9), st.sampled_from(list('{}[]",:0a \\\n')))
    @settings(max_examples=60, deadline=None)
    def test_a_flipped_character_gives_a_tokenizer_or_a_data_error(self, place: int, character: str) -> None:
        text = train_bpe(["ab ab abc"], 260).to_json()
        place %= len(text)
        try:
            load_tokenizer(text[:place] + character + text[place + 1 :])
        except DataContractError as error:
            assert "tokenizer.json" in str(error)
