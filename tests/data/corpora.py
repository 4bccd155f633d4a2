"""Small corpora and stores for the tests of the data folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from hybrid.data.corpus import Document
from hybrid.data.split import SplitRule, TokenView
from hybrid.data.store import TokenStore, build_store
from hybrid.data.tokenizers import ByteTokenizer

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def shared(name: str) -> Path:
    """A file of the shared test data, or a skip that names it."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"needs {name} in {SHARED}")
    return path


def documents(*texts: str) -> list[Document]:
    return [Document(f"document {index}", text) for index, text in enumerate(texts)]


def letters(length: int, start: int = 0) -> str:
    """Text whose every token tells its place: the alphabet, over and over."""
    return "".join(chr(ord("a") + (start + index) % 26) for index in range(length))


def store_of(folder: Path, lengths: Sequence[int]) -> TokenStore:
    """A byte store with documents of these lengths; the stream as a whole spells the alphabet over and over."""
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    texts = [letters(length, start) for start, length in zip(starts, lengths, strict=True)]
    rule = SplitRule(by="share", validation_share=0.0)
    return build_store(documents(*texts), ByteTokenizer(), folder / "store", split=rule, replace=True).store


def view_of(folder: Path, lengths: Sequence[int]) -> TokenView:
    return store_of(folder, lengths).split("all")
