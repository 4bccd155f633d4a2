"""Byte-pair encoding through the `tokenizers` library: training, loading, and encoding that keeps text from becoming
control tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from hybrid.data.tokenizers import (
    LARGEST_VOCABULARY,
    SURROGATES,
    StreamDecoder,
    Tokenizer,
    byte_alphabet,
    check_ids,
    document_text,
    parse_document,
)
from hybrid.errors import ConfigError, DataContractError

END_OF_TEXT = "<|endoftext|>"
# Which control token ends a document, when a file has several: the first of these that it has.
END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")


class BpeTokenizer(Tokenizer):
    """A BPE `tokenizer.json`, byte-level or with byte fallback.

    Control tokens are the added tokens marked `special`. `encode` works with a copy of the document that lacks them,
    so that their text inside a document or message is ordinary text; a program that wants the control token uses its
    id (`control_tokens`). Truncation, padding and post-processing of the document are not applied: a document is
    encoded whole and nothing is added. Lone surrogates become U+FFFD.
    """

    kind = "bpe"

    def __init__(self, json_text: str) -> None:
        """json_text: the document, kept verbatim for `to_json`. DataContractError as in `load_tokenizer`."""
        document = parse_document(json_text)
        _require_supported(document)
        self._json_text = json_text
        self._library = _open(json_text)
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataContractError("tokenizer.json: the vocabulary is empty")
        if len(set(vocabulary.values())) < len(vocabulary):
            raise DataContractError("tokenizer.json: two tokens share one id, expected an id of its own for each")
        self.vocabulary_size = max(vocabulary.values()) + 1
        if self.vocabulary_size > LARGEST_VOCABULARY:
            raise DataContractError(
                f"tokenizer.json: id {self.vocabulary_size - 1} is too large, expected below {LARGEST_VOCABULARY}"
            )
        _require_lossless(document, vocabulary)
        added = {
            token.content: (number, token.special) for number, token in self._library.get_added_tokens_decoder().items()
        }
        self.control_tokens = {content: number for content, (number, special) in added.items() if special}
        self.end_of_text = next(
            (self.control_tokens[name] for name in END_OF_TEXT_NAMES if name in self.control_tokens), None
        )
        self._encoder = _open(json.dumps(_without_control_tokens(document, vocabulary, set(self.control_tokens))))
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self._pieces = _byte_pieces(vocabulary, added, self.vocabulary_size) if _is_byte_level(document) else None

    def encode(self, text: str) -> NDArray[np.uint32]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        clean = [SURROGATES.sub("\ufffd", text) for text in texts]
        try:
            encodings = self._encoder.encode_batch_fast(clean, add_special_tokens=False)
        except Exception as error:  # the library has no type of its own for an unknown token that is not there
            raise self._inexpressible(clean, error) from None
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def _inexpressible(self, texts: Sequence[str], error: Exception) -> DataContractError:
        """Names a character that has no token where the unknown token is a control token, which text must not
        become."""
        for character in dict.fromkeys(character for text in texts for character in text):
            try:
                self._encoder.encode(character, add_special_tokens=False)
            except Exception:
                return DataContractError(
                    f"{character!r} cannot be expressed with this tokenizer: tokenizer.json has no token for it but a "
                    "control token; take one that is byte-level or has byte fallback"
                )
        return DataContractError(f"the text cannot be expressed with this tokenizer: {error}")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        values = check_ids(ids, self.vocabulary_size, self.kind).tolist()
        if self._pieces is None:
            return self._library.decode(values, skip_special_tokens=True).encode("utf-8")
        return b"".join([self._pieces[token] for token in values])

    def stream(self) -> StreamDecoder:
        return StreamDecoder(self) if self._pieces is not None else _RedecodingStream(self)

    def to_json(self) -> str:
        return self._json_text


class _RedecodingStream(StreamDecoder):
    """For vocabularies whose tokens have no bytes of their own (SentencePiece style): decodes the last tokens again
    with each new one, and gives out what was added. A character spans at most four byte tokens, so no more than that
    is held back; byte tokens that are not UTF-8 may be repaired otherwise than in the text decoded as a whole.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._all: list[int] = []
        self._start = 0  # decoding begins here: far enough back for the decoder to see what precedes the new tokens
        self._given = 0  # tokens whose text is out

    def push(self, token: int) -> str:
        self._all.append(token)
        before = self._tokenizer.decode(self._all[self._start : self._given])
        now = self._tokenizer.decode(self._all[self._start :])
        if now.endswith("\ufffd") and len(self._all) - self._given < 4:
            return ""
        return self._advance(before, now)

    def finish(self) -> str:
        before = self._tokenizer.decode(self._all[self._start : self._given])
        return self._advance(before, self._tokenizer.decode(self._all[self._start :]))

    def _advance(self, before: str, now: str) -> str:
        self._start, self._given = self._given, len(self._all)
        return now[len(before) :]


def train_bpe(texts: Iterable[str], vocabulary_size: int, *, end_of_text: str | None = END_OF_TEXT) -> BpeTokenizer:
    """A byte-level BPE trained on the texts, in their order; the same texts give the same tokenizer.

    vocabulary_size counts the 256 bytes and the control token `end_of_text` (None: no control token). A small corpus
    may not hold enough pairs; the tokenizer is then smaller. ConfigError if vocabulary_size cannot even hold the
    bytes; DataContractError without any text.
    """
    smallest = 256 + (end_of_text is not None)
    if not smallest <= vocabulary_size <= LARGEST_VOCABULARY:
        raise ConfigError(
            f"a byte-level BPE vocabulary of {vocabulary_size} is not possible, expected "
            f"{smallest}..{LARGEST_VOCABULARY} (256 bytes and the control tokens come first)"
        )
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[end_of_text] if end_of_text is not None else [],
        initial_alphabet=sorted(byte_alphabet()),
        show_progress=False,
    )
    seen = _Counting(SURROGATES.sub("\ufffd", text) for text in texts)
    library.train_from_iterator(seen, trainer)
    if not seen.characters:
        raise DataContractError("cannot train a BPE tokenizer: the corpus has no text")
    return BpeTokenizer(document_text(json.loads(library.to_str())))


class _Counting:
    """Passes texts on and counts their characters."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self.characters = 0

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            self.characters += len(text)
            yield text


def _open(json_text: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json_text)
    except BaseException as error:
        # A panic of the library's native code is not an Exception, and does mean a garbled document.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise DataContractError(
                f"tokenizer.json is not a tokenizer that the tokenizers library can open: {error}"
            ) from None
        raise


def _require_supported(document: dict[str, Any]) -> None:
    given = document.get("model")
    model: dict[str, Any] = given if isinstance(given, dict) else {}
    if model.get("type") != "BPE":
        raise DataContractError(
            f'tokenizer.json: model type {model.get("type")!r} is not supported: expected "BPE", '
            "or a bytes or characters tokenizer of hybrid"
        )
    if model.get("dropout"):
        raise DataContractError("tokenizer.json: model.dropout makes encoding random; set it to null")


def _require_lossless(document: dict[str, Any], vocabulary: dict[str, int]) -> None:
    """The library drops, without a word, what a vocabulary cannot express; so it must be able to express every byte."""
    model = document["model"]
    if _is_byte_level(document):
        lacking = [byte for byte, character in enumerate(byte_alphabet()) if character not in vocabulary]
        remedy = "train it with the whole byte alphabet"
    elif model.get("byte_fallback"):
        lacking = [byte for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary]
        remedy = "its vocabulary needs all of <0x00>..<0xFF>"
    elif model.get("unk_token") in vocabulary:
        return
    else:
        raise DataContractError(
            "tokenizer.json: neither byte-level nor with byte fallback or an unknown token: text would be lost silently"
        )
    if lacking:
        raise DataContractError(
            f"tokenizer.json: {len(lacking)} of the 256 bytes have no token (the first is 0x{lacking[0]:02X}), "
            f"so text would be lost silently; {remedy}"
        )


def _is_byte_level(document: dict[str, Any]) -> bool:
    """Whether each token is the bytes it spells, which takes both ends: the pre-tokenizer that makes it so and the
    decoder."""

    def kinds(part: Any, inner: str) -> set[Any]:
        if not isinstance(part, dict):
            return set()
        if part.get("type") == "Sequence":
            return {piece.get("type") for piece in part.get(inner, ()) if isinstance(piece, dict)}
        return {part.get("type")}

    return "ByteLevel" in kinds(document.get("pre_tokenizer"), "pretokenizers") and kinds(
        document.get("decoder"), "decoders"
    ) == {"ByteLevel"}


def _without_control_tokens(document: dict[str, Any], vocabulary: dict[str, int], control: set[str]) -> dict[str, Any]:
    """The document for encoding: no control token can come out of it, and every other token keeps its id."""
    model = dict(document["model"])
    kept = [token for token in document.get("added_tokens") or [] if not token.get("special")]
    model["vocab"] = {token: number for token, number in model["vocab"].items() if token not in control}
    # An added token that is not in the model would be numbered anew by the library, so it moves into the model with
    # its id.
    model["vocab"].update({token["content"]: vocabulary[token["content"]] for token in kept})
    merges = []
    for merge in model.get("merges") or []:
        left, right = merge if isinstance(merge, list) else merge.split(" ", 1)
        if not control.intersection((left, right, left + right)):
            merges.append(merge)
    model["merges"] = merges
    return {
        **document,
        "added_tokens": kept,
        "model": model,
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }


def _byte_pieces(vocabulary: dict[str, int], added: dict[str, tuple[int, bool]], size: int) -> list[bytes]:
    """The bytes of each id; nothing for control tokens and for ids that have no token."""
    byte_of = {ord(character): byte for byte, character in enumerate(byte_alphabet())}
    spelled = re.compile("[" + re.escape("".join(byte_alphabet())) + "]*")
    pieces = [b""] * size
    for token, number in vocabulary.items():
        if token in added:
            pieces[number] = b"" if added[token][1] else token.encode("utf-8")
        elif spelled.fullmatch(token):
            pieces[number] = token.translate(byte_of).encode("latin-1")
        else:
            pieces[number] = token.encode("utf-8")
    return pieces
