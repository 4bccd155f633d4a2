"""Text to token ids and back: bytes, characters, byte-pair encoding.

Every tokenizer writes itself as a `tokenizer.json` of the `tokenizers` library, so a checkpoint's tokenizer opens in
other programs and gives the same ids there. The kind is recognised from that document, not from a field of ours (the
library refuses unknown fields).
"""

from __future__ import annotations

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid.contracts.stable_json import stable_hash
from hybrid.errors import DataContractError

# Ids stay below this: a larger one in a file is damage, not a vocabulary.
LARGEST_VOCABULARY = 2**24
SURROGATES = re.compile("[\ud800-\udfff]")


class StreamDecoder:
    """Turns ids into text one at a time, holding back the bytes of an unfinished character.

    The pieces joined with `finish()` are exactly `decode` of all the ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that became certain with this id; may be empty. DataContractError for an id outside the
        vocabulary."""
        return self._decoder.decode(self._tokenizer.decode_bytes((token,)))

    def finish(self) -> str:
        """What is left: U+FFFD for an unfinished character, else nothing."""
        return self._decoder.decode(b"", final=True)


class Tokenizer(ABC):
    """What the data pipeline, the sampler and the checkpoint know about a tokenizer.

    kind: "bytes", "characters" or "bpe". vocabulary_size: every id is below it. end_of_text: the id that ends a
    document, None where documents are told apart by segment ids alone.
    """

    kind: str
    vocabulary_size: int
    end_of_text: int | None = None

    @abstractmethod
    def encode(self, text: str) -> NDArray[np.uint32]:
        """The ids of `text`, uint32 [tokens]. Text that looks like a control token is encoded as the text it is."""

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """`encode` of each text; one that works in parallel where the tokenizer can."""
        return [self.encode(text) for text in texts]

    @abstractmethod
    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The UTF-8 of the ids, not repaired where it is broken. Control tokens give nothing. DataContractError for
        an id outside the vocabulary, naming it."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD. Errors as in `decode_bytes`."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def stream(self) -> StreamDecoder:
        """A decoder for ids that arrive one by one."""
        return StreamDecoder(self)

    @abstractmethod
    def to_json(self) -> str:
        """The text of `tokenizer.json`; `load_tokenizer` restores the tokenizer from it."""

    @cached_property
    def hash(self) -> str:
        """sha256 (hex) of the stable JSON of the document, with `model.vocab` as the list of [token, id] by id:
        independent of the document's layout, and of which tokens may be keys of an object in JavaScript."""
        document = json.loads(self.to_json())
        vocabulary = sorted(document["model"]["vocab"].items(), key=lambda item: item[1])
        return stable_hash({**document, "model": {**document["model"], "vocab": [list(item) for item in vocabulary]}})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)


class ByteTokenizer(Tokenizer):
    """The 256 byte values of UTF-8; id and byte are the same number.

    The vocabulary stays at 256: there is no end-of-text id, documents are separated by segment ids. A lone surrogate
    that stands for an undecodable byte (Python's `surrogateescape`) becomes that byte again; any other lone surrogate
    becomes U+FFFD.
    """

    kind = "bytes"
    vocabulary_size = 256

    def encode(self, text: str) -> NDArray[np.uint32]:
        try:
            raw = text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raw = re.sub("[\ud800-\udc7f\udd00-\udfff]", "\ufffd", text).encode("utf-8", "surrogateescape")
        return np.frombuffer(raw, dtype=np.uint8).astype(np.uint32)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return check_ids(ids, self.vocabulary_size, self.kind).astype(np.uint8).tobytes()

    def to_json(self) -> str:
        return document_text(BYTE_DOCUMENT)


class CharacterTokenizer(Tokenizer):
    """The characters of a corpus; id = rank of the character in code point order (a loaded file may order them
    otherwise)."""

    kind = "characters"

    def __init__(self, characters: Sequence[str]) -> None:
        """characters: id i is characters[i]. DataContractError if there are none, or one is repeated, longer, or a
        lone surrogate."""
        if not characters:
            raise DataContractError(
                "a character tokenizer needs at least one character, and got none: the corpus is empty"
            )
        for index, character in enumerate(characters):
            if not isinstance(character, str) or len(character) != 1:
                raise DataContractError(f"character tokenizer: entry {index} is {character!r}, expected one character")
            if SURROGATES.match(character):
                raise DataContractError(
                    f"character tokenizer: entry {index} is {_named(character)}, a lone surrogate, which "
                    "UTF-8 cannot hold; repair the text or use the bytes tokenizer"
                )
        codes = np.array([ord(character) for character in characters], dtype=np.uint32)
        order = np.argsort(codes, kind="stable")
        repeated = np.flatnonzero(np.diff(codes[order]) == 0)
        if repeated.size:
            name = _named(characters[order[repeated[0]]])
            raise DataContractError(f"character tokenizer: {name} appears twice among the characters")
        self.characters = tuple(characters)
        self.vocabulary_size = len(characters)
        self._sorted_codes = codes[order]
        self._sorted_ids = order.astype(np.uint32)
        self._pieces = tuple(character.encode("utf-8") for character in characters)

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> CharacterTokenizer:
        """The tokenizer of exactly the characters that occur in the texts."""
        found: set[str] = set()
        for text in texts:
            found.update(text)
        return cls(sorted(found))

    def encode(self, text: str) -> NDArray[np.uint32]:
        """As the base class says. DataContractError names a character that is not in the vocabulary, and its offset."""
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        places = np.minimum(np.searchsorted(self._sorted_codes, codes), self.vocabulary_size - 1)
        unknown = np.flatnonzero(self._sorted_codes[places] != codes)
        if unknown.size:
            offset = int(unknown[0])
            raise DataContractError(
                f"character {_named(text[offset])} at offset {offset} is not among the "
                f"{self.vocabulary_size} characters of this tokenizer; "
                "use text with the characters of its corpus, or the bytes tokenizer"
            )
        return self._sorted_ids[places]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(self._pieces[token] for token in check_ids(ids, self.vocabulary_size, self.kind).tolist())

    def to_json(self) -> str:
        document = _document(
            pre_tokenizer=CHARACTER_SPLIT,
            decoder={"type": "Fuse"},
            model={
                "type": "WordLevel",
                "vocab": {character: index for index, character in enumerate(self.characters)},
                # Not in the vocabulary on purpose: the library then refuses an unknown character instead of replacing
                # it.
                "unk_token": "<unknown>",
            },
        )
        return document_text(document)


def load_tokenizer(json_text: str) -> Tokenizer:
    """Restore a tokenizer from its `tokenizer.json`, ours or one made elsewhere with a BPE model.

    DataContractError for text that is not JSON, not a tokenizer document, of a model that is not supported, or that
    would lose text.
    """
    document = parse_document(json_text)
    if document == BYTE_DOCUMENT:
        return ByteTokenizer()
    model = document.get("model")
    if not isinstance(model, dict):
        raise DataContractError('tokenizer.json: "model" is missing, expected an object with a "type" and a "vocab"')
    if model.get("type") == "WordLevel":
        return _load_characters(document, model)
    from hybrid.data.bpe import BpeTokenizer

    return BpeTokenizer(json_text)


def parse_document(json_text: str) -> dict[str, Any]:
    """The object in `json_text`, or DataContractError."""
    try:
        document = json.loads(json_text)
    except (ValueError, RecursionError) as error:
        raise DataContractError(f"tokenizer.json is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise DataContractError(f"tokenizer.json holds a {type(document).__name__}, expected an object")
    return document


def _load_characters(document: dict[str, Any], model: dict[str, Any]) -> CharacterTokenizer:
    if document.get("pre_tokenizer") != CHARACTER_SPLIT:
        raise DataContractError(
            "tokenizer.json: a WordLevel model is supported with one token a character "
            f"(pre_tokenizer {json.dumps(CHARACTER_SPLIT)}), got {json.dumps(document.get('pre_tokenizer'))[:200]}"
        )
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, dict):
        raise DataContractError(f'tokenizer.json: "model.vocab" is {type(vocabulary).__name__}, expected an object')
    characters: list[str | None] = [None] * len(vocabulary)
    for character, index in vocabulary.items():
        if type(index) is not int or not 0 <= index < len(vocabulary) or characters[index] is not None:
            raise DataContractError(
                f"tokenizer.json: the id of {character!r} is {index!r}, "
                f"expected each of 0..{len(vocabulary) - 1} exactly once"
            )
        characters[index] = character
    tokenizer = CharacterTokenizer([character for character in characters if character is not None])
    if json.loads(tokenizer.to_json()) != document:
        raise DataContractError(
            "tokenizer.json: a character tokenizer with settings beyond its characters is not supported"
        )
    return tokenizer


def byte_alphabet() -> tuple[str, ...]:
    """The visible character that stands for each byte in byte-level vocabularies: GPT-2's convention.

    Printable Latin-1 stands for itself; the other bytes, in order, are U+0100, U+0101, ...
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte) if byte in printable else chr(next(others)) for byte in range(256))


def document_text(document: dict[str, Any]) -> str:
    """A tokenizer document as text: readable, the same on every machine."""
    return json.dumps(document, ensure_ascii=False, indent=1) + "\n"


def _document(*, pre_tokenizer: dict[str, Any], decoder: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
CHARACTER_SPLIT = {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False}
BYTE_DOCUMENT = _document(
    pre_tokenizer=BYTE_LEVEL,
    decoder=BYTE_LEVEL,
    model={
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {character: byte for byte, character in enumerate(byte_alphabet())},
        "merges": [],
    },
)


def check_ids(ids: Iterable[int], vocabulary_size: int, kind: str) -> NDArray[np.int64]:
    """The ids as int64, all inside the vocabulary."""
    values = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64).ravel()
    outside = np.flatnonzero((values < 0) | (values >= vocabulary_size))
    if outside.size:
        place = int(outside[0])
        raise DataContractError(
            f"id {values[place]} at position {place} is outside the vocabulary of the {kind} tokenizer: "
            f"expected 0..{vocabulary_size - 1}"
        )
    return values


def _named(character: str) -> str:
    return f"{character!r} (U+{ord(character):04X})"
