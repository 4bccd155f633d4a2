"""The token store: documents as ids in one file, with an index and a manifest. The format is
docs/formats/token_store.md."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid.data.corpus import Document
from hybrid.data.files import (
    CHUNK_BYTES,
    DigestWriter,
    Progress,
    ShouldStop,
    check_size,
    new_folder,
    stop_if,
    verify_file,
)
from hybrid.data.manifest import FORMAT, VERSION, content_fingerprint, read_manifest, seal
from hybrid.data.split import SplitRule, TokenView
from hybrid.data.tokenizers import Tokenizer, load_tokenizer
from hybrid.errors import DataContractError

# Documents are encoded in groups of about this many characters: enough to keep every core of a parallel tokenizer busy.
GROUP_CHARACTERS = 2**20
GROUP_DOCUMENTS = 1024


@dataclass(frozen=True)
class BuildReport:
    """What `build_store` made: the opened store and how it went."""

    store: TokenStore
    documents: int
    empty_documents: int
    tokens: int
    bytes_on_disk: int


class TokenStore:
    """An open token store. Reading is memory-mapped: opening costs the document index, not the tokens."""

    def __init__(self, path: Path, manifest: dict[str, Any], offsets: NDArray[np.int64]) -> None:
        self.path = path
        self.manifest = manifest
        self.offsets = offsets  # int64 [documents + 1]: document d is tokens[offsets[d] : offsets[d + 1]]
        self.vocabulary_size: int = manifest["vocabularySize"]
        self.token_count: int = manifest["tokens"]
        self.document_count: int = manifest["documents"]
        self.fingerprint: str = manifest["fingerprint"]
        self.tokens: NDArray[Any] = np.memmap(
            self.tokens_path, dtype=self.token_type, mode="r", shape=(self.token_count,)
        )

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> TokenStore:
        """Open the store in folder `path`, checking its manifest, the size of every file and the document index.

        `verify` checks the rest. DataContractError names the file, the offset where there is one, and what was
        expected.
        """
        folder = Path(path)
        manifest = read_manifest(folder)
        for name, record in manifest["files"].items():
            check_size(folder / name, record)
        return cls(folder, manifest, _read_offsets(folder / "documents.bin", manifest))

    @property
    def tokens_path(self) -> Path:
        return self.path / "tokens.bin"

    @property
    def token_type(self) -> np.dtype[Any]:
        return _numpy_type(self.manifest["tokenType"])

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids. DataContractError if its file is not the one that the manifest names."""
        path = self.path / "tokenizer.json"
        verify_file(path, self.manifest["files"]["tokenizer.json"], lambda count: None)
        try:
            tokenizer = load_tokenizer(path.read_bytes().decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DataContractError(f"{path}: not UTF-8 at offset {error.start}") from None
        expected = self.manifest["tokenizer"]["hash"]
        if tokenizer.hash != expected:
            raise DataContractError(f"{path}: the tokenizer's hash is {tokenizer.hash}, expected {expected}")
        if tokenizer.vocabulary_size != self.vocabulary_size:
            raise DataContractError(
                f"{path}: a vocabulary of {tokenizer.vocabulary_size}, but the manifest says {self.vocabulary_size}"
            )
        return tokenizer

    @property
    def rule(self) -> SplitRule:
        """The split that the store was built with."""
        return SplitRule.from_manifest(self.manifest["split"])

    def split(self, name: str, rule: SplitRule | None = None) -> TokenView:
        """The tokens of "train", "validation" or "all" under `rule` (default: the store's own).

        DataContractError if that part is empty, ConfigError for another name.
        """
        return TokenView.of(self, name, self.rule if rule is None else rule)

    def document(self, index: int) -> NDArray[np.uint32]:
        """The ids of one document, uint32 [tokens]. DataContractError if there is no such document, or an id is
        wrong."""
        if not 0 <= index < self.document_count:
            raise DataContractError(f"{self.path}: no document {index}, expected 0..{self.document_count - 1}")
        return self.read(int(self.offsets[index]), int(self.offsets[index + 1]))

    def read(self, begin: int, end: int) -> NDArray[np.uint32]:
        """Tokens begin..end-1, uint32, each checked against the vocabulary (a device would clamp a wrong id
        silently)."""
        ids = self.tokens[begin:end].astype(np.uint32)
        if ids.size and int(ids.max()) >= self.vocabulary_size:
            self._refuse_id(begin + int(np.argmax(ids >= self.vocabulary_size)))
        return ids

    def verify(self, *, progress: Progress | None = None, should_stop: ShouldStop | None = None) -> dict[str, Any]:
        """Hash every file, check every id and the tokenizer; returns what was checked as plain data.

        DataContractError names the file and the offsets that differ. StopRequested when `should_stop()` says so.
        """
        total = sum(record["bytes"] for record in self.manifest["files"].values())
        done = 0

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress("verify", done, total)
            stop_if(should_stop, f"verifying {self.path}")

        for name, record in self.manifest["files"].items():
            verify_file(self.path / name, record, on_bytes)
        step = CHUNK_BYTES // self.token_type.itemsize
        for begin in range(0, self.token_count, step):
            stop_if(should_stop, f"verifying {self.path}")
            self.read(begin, min(begin + step, self.token_count))
        return {
            "path": str(self.path),
            "files": {name: record["sha256"] for name, record in self.manifest["files"].items()},
            "bytes": total,
            "documents": self.document_count,
            "tokens": self.token_count,
            "tokenizer": self.tokenizer.kind,
            "fingerprint": self.fingerprint,
        }

    def _refuse_id(self, index: int) -> None:
        offset = index * self.token_type.itemsize
        raise DataContractError(
            f"{self.tokens_path}: id {int(self.tokens[index])} at offset {offset} (token {index}) is outside the "
            f"vocabulary: expected 0..{self.vocabulary_size - 1}; build the store again"
        )


def build_store(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    out_dir: str | os.PathLike[str],
    *,
    split: SplitRule | None = None,
    source: dict[str, Any] | None = None,
    end_of_text: bool | None = None,
    replace: bool = False,
    progress: Progress | None = None,
    should_stop: ShouldStop | None = None,
) -> BuildReport:
    """Encode documents into a new store at `out_dir`, which appears complete or not at all.

    split: the rule written into the manifest (default: a tenth of the documents). source: a description for the
    manifest, plain JSON. end_of_text: whether each document ends with the tokenizer's end-of-text id (default: if it
    has one). progress: called as progress("tokens", tokens so far, None). should_stop: asked between groups of
    documents.

    Errors: DataContractError for a corpus without tokens, text that the tokenizer refuses (naming the document) or an
    existing `out_dir`; StopRequested. After any of them nothing is left behind.
    """
    rule = SplitRule() if split is None else split
    if end_of_text and tokenizer.end_of_text is None:
        raise DataContractError(
            f"documents should end with an end-of-text id, but the {tokenizer.kind} tokenizer has none; "
            "they are separated by segment ids without it"
        )
    end = tokenizer.end_of_text if end_of_text is not False else None
    token_type = "uint16" if tokenizer.vocabulary_size <= 2**16 else "uint32"
    target = Path(out_dir)
    with new_folder(target, replace=replace) as folder:
        offsets, empty = [0], 0
        writer = DigestWriter(folder / "tokens.bin")
        try:
            for group in _groups(documents):
                stop_if(should_stop, f"building the token store {target}")
                for document, ids in zip(group, _encode(group, tokenizer), strict=True):
                    _check_ids(ids, tokenizer, document)
                    empty += ids.size == 0
                    if end is not None:
                        ids = np.append(ids, np.uint32(end))
                    writer.write(ids.astype(_numpy_type(token_type)).tobytes())
                    offsets.append(offsets[-1] + ids.size)
                if progress is not None:
                    progress("tokens", offsets[-1], None)
            stop_if(should_stop, f"building the token store {target}")
            if len(offsets) - 1 == empty:
                raise DataContractError(_empty_corpus(len(offsets) - 1, source))
            files = {"tokens.bin": writer.finish()}
        finally:
            writer.close()
        files["documents.bin"] = _write(folder / "documents.bin", np.array(offsets, dtype="<u8").tobytes())
        files["tokenizer.json"] = _write(folder / "tokenizer.json", tokenizer.to_json().encode("utf-8"))
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "vocabularySize": tokenizer.vocabulary_size,
            "tokenType": token_type,
            "endOfText": end,
            "tokenizer": {"kind": tokenizer.kind, "hash": tokenizer.hash},
            "documents": len(offsets) - 1,
            "tokens": offsets[-1],
            "chunkBytes": CHUNK_BYTES,
            "files": files,
            "split": rule.to_manifest(),
            "source": source or {},
        }
        manifest["fingerprint"] = content_fingerprint(manifest)
        text = json.dumps(seal(manifest), ensure_ascii=False, indent=1) + "\n"
        _write(folder / "manifest.json", text.encode("utf-8"))
        stop_if(should_stop, f"building the token store {target}")
    store = TokenStore.open(target)
    size = sum(record["bytes"] for record in files.values())
    return BuildReport(store, store.document_count, int(empty), store.token_count, size)


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    group: list[Document] = []
    characters = 0
    for document in documents:
        group.append(document)
        characters += len(document.text)
        if characters >= GROUP_CHARACTERS or len(group) >= GROUP_DOCUMENTS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _encode(group: list[Document], tokenizer: Tokenizer) -> list[NDArray[np.uint32]]:
    try:
        return tokenizer.encode_batch([document.text for document in group])
    except DataContractError:
        for document in group:
            try:
                tokenizer.encode(document.text)
            except DataContractError as error:
                raise DataContractError(f"document {document.name}: {error}") from None
        raise


def _check_ids(ids: NDArray[np.uint32], tokenizer: Tokenizer, document: Document) -> None:
    if ids.size and int(ids.max()) >= tokenizer.vocabulary_size:
        place = int(np.argmax(ids >= tokenizer.vocabulary_size))
        raise DataContractError(
            f"document {document.name}: id {int(ids[place])} at token {place} is outside the vocabulary of the "
            f"{tokenizer.kind} tokenizer: expected 0..{tokenizer.vocabulary_size - 1}"
        )


def _empty_corpus(documents: int, source: dict[str, Any] | None) -> str:
    many = f"{documents} documents, all of them empty"
    found = ("no document", "one document without text", many)[min(documents, 2)]
    paths = (source or {}).get("paths") or []
    where = f" in {', '.join(map(str, paths))}" if paths else ""
    return f"the corpus is empty: {found}{where}; name a source that holds text"


def _write(path: Path, data: bytes) -> dict[str, Any]:
    writer = DigestWriter(path)
    try:
        writer.write(data)
        return writer.finish()
    finally:
        writer.close()


def _numpy_type(token_type: str) -> np.dtype[Any]:
    return np.dtype({"uint16": "<u2", "uint32": "<u4"}[token_type])


def _read_offsets(path: Path, manifest: dict[str, Any]) -> NDArray[np.int64]:
    """The document index, checked: it starts at 0, never falls, and ends at the number of tokens."""
    raw = np.fromfile(path, dtype="<u8")
    tokens = manifest["tokens"]
    wrong: int | None = None
    if int(raw[0]) != 0:
        wrong, expected = 0, "0"
    elif np.any(raw[1:] < raw[:-1]):
        wrong = 1 + int(np.argmax(raw[1:] < raw[:-1]))
        expected = f"at least {int(raw[wrong - 1])}, where the document before it begins"
    elif int(raw[-1]) != tokens:
        wrong, expected = len(raw) - 1, f"{tokens}, the number of tokens"
    if wrong is not None:
        raise DataContractError(
            f"{path}: offset {wrong * 8}: document {wrong} begins at token {int(raw[wrong])}, expected {expected}"
        )
    return raw.astype(np.int64)
