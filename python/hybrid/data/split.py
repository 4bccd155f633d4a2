"""Training and validation parts of a token store, as ranges of its tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hybrid.contracts.stable_json import stable_hash
from hybrid.errors import ConfigError, DataContractError
from hybrid.random.philox_numpy import philox4x32
from hybrid.random.streams import stream_key

if TYPE_CHECKING:
    from hybrid.data.store import TokenStore

NAMES = ("train", "validation", "all")


@dataclass(frozen=True)
class SplitRule:
    """What is held out.

    by "document": document d belongs to validation iff word 0 of the Philox block with counter (d mod 2^32, d >> 32,
    0, 0) under stream_key(seed, "split") is below floor(validation_share * 2^32); so a document keeps its side when
    others are added behind it. by "share": the tokens from floor(tokens * (1 - validation_share)) on, in one piece.
    """

    by: str = "document"
    validation_share: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.by not in ("document", "share"):
            raise ConfigError(f'the split is by {self.by!r}, expected "document" or "share"')
        if not 0 <= self.validation_share < 1:
            raise ConfigError(f"the validation share is {self.validation_share}, expected a number from 0 to below 1")

    @classmethod
    def from_manifest(cls, value: dict[str, Any]) -> SplitRule:
        return cls(by=value["by"], validation_share=float(value["validationShare"]), seed=value["seed"])

    def to_manifest(self) -> dict[str, Any]:
        return {"by": self.by, "validationShare": self.validation_share, "seed": self.seed}

    def held_out(self, documents: int) -> NDArray[np.bool_]:
        """Which of the documents 0..documents-1 belong to validation; bool [documents]. For the rule by document."""
        index = np.arange(documents, dtype=np.uint64)
        counters = np.zeros((documents, 4), dtype=np.uint32)
        counters[:, 0] = (index & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        counters[:, 1] = (index >> np.uint64(32)).astype(np.uint32)
        words = philox4x32(counters, stream_key(self.seed, "split"))[:, 0]
        return words.astype(np.uint64) < np.uint64(math.floor(self.validation_share * 2**32))


@dataclass(frozen=True)
class TokenView:
    """A part of a store, read as one stream: pieces of documents one after the other, none of them empty.

    name: "train", "validation" or "all". rule: the rule in force (see `of`). starts: int64 [pieces], where each piece
    begins in the store. bounds: int64 [pieces + 1], where each begins in the stream; bounds[-1] is the length of the
    stream.
    """

    store: TokenStore
    name: str
    rule: SplitRule
    starts: NDArray[np.int64]
    bounds: NDArray[np.int64]

    @classmethod
    def of(cls, store: TokenStore, name: str, rule: SplitRule) -> TokenView:
        """The part `name` of `store`. Where a split by document would leave a side empty (a corpus of one file, say),
        the rule in force is by share; `rule` says so. Errors as in `TokenStore.split`."""
        if name not in NAMES:
            raise ConfigError(f"there is no split {name!r}, expected one of {', '.join(NAMES)}")
        begins, ends = store.offsets[:-1], store.offsets[1:]
        held_out = np.zeros(store.document_count, dtype=np.bool_)
        if rule.by == "document" and rule.validation_share > 0:
            held_out = rule.held_out(store.document_count)
            sizes = ends - begins
            if not sizes[held_out].any() or not sizes[~held_out].any():
                rule = replace(rule, by="share")
        if name != "all" and rule.by == "document":
            wanted = held_out if name == "validation" else ~held_out
            begins, ends = begins[wanted], ends[wanted]
        elif name != "all":
            cut = math.floor(store.token_count * (1 - rule.validation_share))
            begins, ends = (begins, np.minimum(ends, cut)) if name == "train" else (np.maximum(begins, cut), ends)
        filled = ends > begins
        begins, ends = begins[filled], ends[filled]
        if not begins.size:
            raise DataContractError(
                f"{store.path}: the {name} part is empty: {store.token_count} tokens in {store.document_count} "
                f"documents, split by {rule.by} with a validation share of {rule.validation_share:g}; "
                "change the share or add text"
            )
        bounds = np.concatenate(([0], np.cumsum(ends - begins)))
        return cls(store, name, rule, begins, bounds)

    def __len__(self) -> int:
        """Tokens in the stream."""
        return int(self.bounds[-1])

    @property
    def pieces(self) -> int:
        """Documents and parts of documents in the stream."""
        return len(self.starts)

    @property
    def vocabulary_size(self) -> int:
        return self.store.vocabulary_size

    @property
    def fingerprint(self) -> str:
        """The stable hash of the store's fingerprint, the rule in force and the name."""
        return stable_hash({"store": self.store.fingerprint, "split": self.rule.to_manifest(), "name": self.name})

    def describe(self) -> dict[str, Any]:
        """Plain data for `inspect` and for logs."""
        return {"name": self.name, "tokens": len(self), "documents": self.pieces, "split": self.rule.to_manifest()}

    def read(self, begin: int, end: int) -> NDArray[np.uint32]:
        """Tokens begin..end-1 of the stream, uint32 [end - begin], checked against the vocabulary."""
        if not 0 <= begin <= end <= len(self):
            raise DataContractError(f"tokens {begin}..{end} are outside the {name_of(self)}: it has {len(self)} tokens")
        parts = []
        piece = int(np.searchsorted(self.bounds, begin, side="right")) - 1
        while begin < end:
            first, last = int(self.bounds[piece]), int(self.bounds[piece + 1])
            stop = min(end, last)
            at = int(self.starts[piece]) - first
            parts.append(self.store.read(at + begin, at + stop))
            begin, piece = stop, piece + 1
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype=np.uint32), *parts])


def name_of(view: TokenView) -> str:
    """How error messages call a view."""
    return f"{view.name} part of {view.store.path}"
