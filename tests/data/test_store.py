"""The token store: what is read is what was written, a changed byte is named, and an interrupted build leaves
nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from numpy.typing import NDArray

from data.corpora import documents, letters, store_of
from hybrid.data import files
from hybrid.data.batch import IGNORE
from hybrid.data.bpe import train_bpe
from hybrid.data.corpus import Document
from hybrid.data.files import CHUNK_BYTES
from hybrid.data.manifest import seal
from hybrid.data.split import SplitRule
from hybrid.data.store import TokenStore, build_store
from hybrid.data.tokenizers import ByteTokenizer, CharacterTokenizer, Tokenizer
from hybrid.data.windows import WindowDataset
from hybrid.errors import ConfigError, DataContractError, StopRequested
from hybrid.resources import resource


class WideTokenizer(ByteTokenizer):
    """Every byte b becomes the id b * 300: needs 32-bit tokens, and lies about its vocabulary if asked to."""

    def __init__(self, vocabulary_size: int = 255 * 300 + 1) -> None:
        self.vocabulary_size = vocabulary_size

    def encode(self, text: str) -> NDArray[np.uint32]:
        return super().encode(text) * np.uint32(300)


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    return build_store(documents("first", "", "zweites Dökument"), ByteTokenizer(), tmp_path / "store").store


def rewrite_manifest(store: TokenStore, change: dict[str, Any], *, sealed: bool = True) -> None:
    manifest = {**store.manifest, **change}
    (store.path / "manifest.json").write_text(json.dumps(seal(manifest) if sealed else manifest), encoding="utf-8")


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


class TestReading:
    def test_documents_come_back(self, store: TokenStore) -> None:
        opened = TokenStore.open(store.path)
        assert opened.document_count == 3
        assert [opened.tokenizer.decode(opened.document(index)) for index in range(3)] == [
            "first",
            "",
            "zweites Dökument",
        ]
        assert opened.token_count == 5 + len("zweites Dökument".encode())

    def test_the_files_are_little_endian_and_as_documented(self, store: TokenStore) -> None:
        raw = (store.path / "tokens.bin").read_bytes()
        assert raw[:10] == b"f\0i\0r\0s\0t\0"
        assert np.frombuffer((store.path / "documents.bin").read_bytes(), "<u8").tolist() == [
            0,
            5,
            5,
            store.token_count,
        ]
        assert sorted(path.name for path in store.path.iterdir()) == [
            "documents.bin",
            "manifest.json",
            "tokenizer.json",
            "tokens.bin",
        ]

    def test_a_large_vocabulary_takes_four_bytes_a_token(self, tmp_path: Path) -> None:
        store = build_store(documents("\u00ff"), WideTokenizer(), tmp_path / "store").store
        assert store.manifest["tokenType"] == "uint32"
        assert store.document(0).tolist() == [0xC3 * 300, 0xBF * 300]
        small = build_store(documents("a"), WideTokenizer(2**16), tmp_path / "small").store
        assert small.manifest["tokenType"] == "uint16"

    def test_documents_end_with_the_end_of_text_id_if_there_is_one(self, tmp_path: Path) -> None:
        tokenizer = train_bpe(["some text to train on"], 270)
        ended = build_store(documents("text", ""), tokenizer, tmp_path / "ended").store
        assert [int(ended.document(index)[-1]) for index in range(2)] == [tokenizer.end_of_text] * 2
        assert ended.manifest["endOfText"] == tokenizer.end_of_text
        plain = build_store(documents("text"), tokenizer, tmp_path / "plain", end_of_text=False).store
        assert plain.document(0).tolist() == tokenizer.encode("text").tolist()
        with pytest.raises(DataContractError, match="bytes tokenizer has none"):
            build_store(documents("text"), ByteTokenizer(), tmp_path / "bytes", end_of_text=True)

    def test_there_is_no_document_beyond_the_last(self, store: TokenStore) -> None:
        with pytest.raises(DataContractError, match=r"no document 3, expected 0\.\.2"):
            store.document(3)

    def test_the_manifest_follows_its_schema(self, store: TokenStore, tmp_path: Path) -> None:
        schema = json.loads(resource("bridge/schemas/token_store.schema.json").read_text(encoding="utf-8"))
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(store.manifest, schema)
        bpe = build_store(documents("text"), train_bpe(["text"], 257), tmp_path / "bpe", source={"type": "test"}).store
        jsonschema.validate(bpe.manifest, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**store.manifest, "more": 1}, schema)

    def test_the_fingerprint_is_of_the_data_only(self, tmp_path: Path) -> None:
        def fingerprint(name: str, texts: tuple[str, ...], tokenizer: Tokenizer, **more: Any) -> str:
            return build_store(documents(*texts), tokenizer, tmp_path / name, **more).store.fingerprint

        base = fingerprint("base", ("ab", "c"), ByteTokenizer())
        split = SplitRule("share", 0.5)
        assert fingerprint("same", ("ab", "c"), ByteTokenizer(), source={"from": "elsewhere"}, split=split) == base
        others = {
            fingerprint("border", ("a", "bc"), ByteTokenizer()),
            fingerprint("token", ("ab", "d"), ByteTokenizer()),
            fingerprint("empty document", ("ab", "c", ""), ByteTokenizer()),
            fingerprint("tokenizer", ("ab", "c"), CharacterTokenizer([chr(code) for code in range(256)])),
        }
        assert base not in others
        assert len(others) == 4

    def test_the_golden_store(self, tmp_path: Path) -> None:
        """Format and hashes are promises to stores on disk and to other languages: a change needs a new version."""
        store = build_store(documents("hello", "world!"), ByteTokenizer(), tmp_path / "store").store
        assert store.manifest["files"]["tokens.bin"]["sha256"] == GOLDEN["tokens.bin"]
        assert store.manifest["tokenizer"]["hash"] == GOLDEN["tokenizer"]
        assert store.fingerprint == GOLDEN["fingerprint"]


# Computed with hashlib and json alone from docs/formats/token_store.md.
GOLDEN = {
    "tokens.bin": "f6ee481d429cc0ea6c11044233f8e4e2b04f421814a863bff25ef14ba6fa0b0c",
    "tokenizer": "763a28805631461de9e34e4e562e5946e63adc587560e084455bfb42c55e99f6",
    "fingerprint": "067b18110a6593a56e61e6c26be2d2588c4a16b2cb4e3d6ddcdcfe54a6ed8cf0",
}


STRIDES = {"tokenizer.json": 41, "manifest.json": 5}  # not every byte of the longer files, to be quick


class TestVerify:
    def test_an_untouched_store_passes_and_reports(self, store: TokenStore) -> None:
        seen: list[tuple[str, int, int | None]] = []
        report = store.verify(progress=lambda *event: seen.append(event))
        assert report["tokens"] == store.token_count
        assert report["fingerprint"] == store.fingerprint
        assert seen[-1] == ("verify", report["bytes"], report["bytes"])

    @pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "tokenizer.json", "manifest.json"])
    def test_any_flipped_byte_is_refused_and_the_file_named(self, store: TokenStore, name: str, tmp_path: Path) -> None:
        for offset in range(0, (store.path / name).stat().st_size, STRIDES.get(name, 1)):
            copy = tmp_path / "copy"
            shutil.copytree(store.path, copy)
            flip(copy / name, offset)
            with pytest.raises(DataContractError, match=name.replace(".", r"\.")):
                TokenStore.open(copy).verify()
            shutil.rmtree(copy)

    def test_the_chunk_with_the_flipped_byte_is_named(self, tmp_path: Path) -> None:
        store = build_store([Document("large", "x" * (CHUNK_BYTES + 5000))], ByteTokenizer(), tmp_path / "store").store
        size = 2 * (CHUNK_BYTES + 5000)
        assert len(store.manifest["files"]["tokens.bin"]["chunks"]) == 3
        store.verify()
        flip(store.tokens_path, CHUNK_BYTES + 17)
        with pytest.raises(
            DataContractError, match=rf"tokens\.bin: .*offsets {CHUNK_BYTES}\.\.{2 * CHUNK_BYTES - 1} \(chunk 1\)"
        ):
            store.verify()
        flip(store.tokens_path, CHUNK_BYTES + 17)
        flip(store.tokens_path, size - 1)
        with pytest.raises(DataContractError, match=rf"offsets {2 * CHUNK_BYTES}\.\.{size - 1} \(chunk 2\)"):
            store.verify()

    def test_verifying_stops_on_request(self, store: TokenStore) -> None:
        with pytest.raises(StopRequested):
            store.verify(should_stop=lambda: True)


class TestRefusedWhenOpened:
    def test_nothing_there_and_no_store_there_are_told_apart(self, tmp_path: Path) -> None:
        with pytest.raises(DataContractError, match="no token store here"):
            TokenStore.open(tmp_path / "absent")
        with pytest.raises(DataContractError, match=r"no manifest\.json"):
            TokenStore.open(tmp_path)

    @pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "tokenizer.json"])
    def test_a_truncated_file_is_named_with_the_offset(self, store: TokenStore, name: str) -> None:
        path = store.path / name
        size = path.stat().st_size
        os.truncate(path, size - 3)
        with pytest.raises(DataContractError, match=rf"{name}: truncated at offset {size - 3}, expected {size} bytes"):
            TokenStore.open(store.path)

    def test_a_longer_file_is_refused(self, store: TokenStore) -> None:
        with store.tokens_path.open("ab") as file:
            file.write(b"xy")
        with pytest.raises(DataContractError, match=r"tokens\.bin: .* 2 more than expected"):
            TokenStore.open(store.path)

    def test_a_missing_file_is_named(self, store: TokenStore) -> None:
        (store.path / "documents.bin").unlink()
        with pytest.raises(DataContractError, match=r"documents\.bin: No such file"):
            TokenStore.open(store.path)

    @pytest.mark.parametrize(
        ("offsets", "message"),
        [
            ([1, 5, 5, 22], "offset 0: document 0 begins at token 1, expected 0"),
            ([0, 6, 5, 22], "offset 16: document 2 begins at token 5, expected at least 6"),
            ([0, 5, 5, 21], "offset 24: document 3 begins at token 21, expected 22"),
            ([0, 2**63 + 5, 5, 22], "offset 16: document 2 .* expected at least 9223372036854775813"),
        ],
    )
    def test_a_document_index_that_cannot_be_is_refused(
        self, store: TokenStore, offsets: list[int], message: str
    ) -> None:
        (store.path / "documents.bin").write_bytes(np.array(offsets, dtype="<u8").tobytes())
        with pytest.raises(DataContractError, match=rf"documents\.bin: {message}"):
            TokenStore.open(store.path)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (b"", "not JSON at offset 0"),
            (b'{"a": \xff}', "not UTF-8 at offset 6"),
            (b"[]", r'format is \[\], expected "hybrid.tokens"'),
            (b'{"format": "other"}', 'format is "other"'),
            (b'{"format": "hybrid.tokens", "version": 2}', "version is 2, expected 1"),
            (b'{"format": "hybrid.tokens", "version": true}', "version is true, expected 1"),
            (b'{"format": "hybrid.tokens", "version": 1}', "vocabularySize is missing"),
            (b"[" * 100_000, "not JSON"),
            (
                b'{"format": "hybrid.tokens", "version": 1, "version": 2}',
                "not JSON that can be read: the key 'version' app",
            ),
        ],
    )
    def test_a_bad_manifest_is_refused(self, store: TokenStore, text: bytes, message: str) -> None:
        (store.path / "manifest.json").write_bytes(text)
        with pytest.raises(DataContractError, match=rf"manifest\.json: {message}"):
            TokenStore.open(store.path)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"vocabularySize": 0}, "vocabularySize is 0, expected a whole number from 1"),
            ({"vocabularySize": 256.0}, "vocabularySize is 256.0"),
            ({"vocabularySize": True}, "vocabularySize is true"),
            ({"tokenType": "uint8"}, 'tokenType is "uint8", expected "uint16" or "uint32"'),
            ({"tokenType": "uint32"}, 'tokenType is "uint32", expected "uint16" for a vocabulary of 256'),
            ({"tokens": 2**53}, "tokens is 9007199254740992"),
            ({"tokens": 21}, "files.tokens.bin.bytes is 44, expected 42, as the counts say"),
            ({"documents": -1}, "documents is -1"),
            ({"documents": 2}, "files.documents.bin.bytes is 32, expected 24"),
            ({"endOfText": 256}, "endOfText is 256, expected an id below 256"),
            ({"tokenizer": {"kind": "words", "hash": "0" * 64}}, 'tokenizer.kind is "words"'),
            ({"tokenizer": {"kind": "bytes"}}, "tokenizer.hash is missing"),
            ({"tokenizer": []}, r"tokenizer is \[\], expected an object"),
            ({"split": {"by": "document", "validationShare": 1, "seed": 0}}, "split.validationShare is 1"),
            ({"chunkBytes": 4}, "chunkBytes is 4, expected 8388608"),
            ({"files": {}}, "files.tokens.bin is missing"),
            ({"fingerprint": "0" * 64}, "fingerprint is .*, the hash of what it covers"),
            ({"fingerprint": "zz"}, "fingerprint is .*64 lower-case hexadecimal digits"),
            ({"extra": 1}, "extra is not a field of version 1"),
        ],
    )
    def test_a_manifest_field_that_is_wrong_is_named(
        self, store: TokenStore, change: dict[str, Any], message: str
    ) -> None:
        rewrite_manifest(store, change)
        with pytest.raises(DataContractError, match=message):
            TokenStore.open(store.path)

    def test_a_manifest_edited_by_hand_is_refused(self, store: TokenStore) -> None:
        rewrite_manifest(store, {"source": {"type": "another"}}, sealed=False)
        with pytest.raises(DataContractError, match=r"manifestHash is .*: the manifest was changed"):
            TokenStore.open(store.path)

    def test_an_id_beyond_the_vocabulary_is_refused_when_read(self, tmp_path: Path) -> None:
        """The sizes are right, so that opening cannot know; a device would clamp the id and say nothing."""
        store = store_of(tmp_path, [20])
        with store.tokens_path.open("r+b") as file:
            file.seek(2 * 7)
            file.write(np.array([256], dtype="<u2").tobytes())
        opened = TokenStore.open(store.path)
        assert len(opened.read(0, 7)) == 7
        with pytest.raises(
            DataContractError, match=r"tokens\.bin: id 256 at offset 14 \(token 7\) .* expected 0\.\.255"
        ):
            opened.split("all").read(3, 12)

    def test_another_tokenizer_in_the_folder_is_refused(self, store: TokenStore) -> None:
        path = store.path / "tokenizer.json"
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace("false", "true ", 1), encoding="utf-8")
        with pytest.raises(DataContractError, match=r"tokenizer\.json"):
            _ = TokenStore.open(store.path).tokenizer


class TestBuilding:
    def test_an_empty_corpus_is_refused(self, tmp_path: Path) -> None:
        for texts in ((), ("", "")):
            with pytest.raises(DataContractError, match="the corpus is empty"):
                build_store(documents(*texts), ByteTokenizer(), tmp_path / "store", source={"type": "test"})
        assert list(tmp_path.iterdir()) == []

    def test_documents_that_are_empty_count_as_an_empty_corpus_whatever_is_appended(self, tmp_path: Path) -> None:
        with pytest.raises(DataContractError, match="2 documents, all of them empty; name"):
            build_store(documents("", ""), train_bpe(["text"], 257), tmp_path / "store")

    def test_an_empty_corpus_is_named_as_its_paths(self, tmp_path: Path) -> None:
        source = {"type": "files", "paths": ["a.txt", "b/"]}
        with pytest.raises(DataContractError, match=r"one document without text in a\.txt, b/; name"):
            build_store(documents(""), ByteTokenizer(), tmp_path / "store", source=source)

    def test_text_that_the_tokenizer_refuses_is_named_with_its_document(self, tmp_path: Path) -> None:
        tokenizer = CharacterTokenizer.from_texts(["abc"])
        with pytest.raises(DataContractError, match=r"document document 1: character 'x' .* at offset 1"):
            build_store(documents("abc", "axb"), tokenizer, tmp_path / "store")
        assert list(tmp_path.iterdir()) == []

    def test_ids_beyond_the_vocabulary_are_never_written(self, tmp_path: Path) -> None:
        with pytest.raises(DataContractError, match=r"document document 0: id 29700 at token 1 is outside"):
            build_store(documents("ac"), WideTokenizer(29_200), tmp_path / "store")

    def test_an_existing_folder_is_refused_before_any_work(self, store: TokenStore) -> None:
        def nothing() -> Iterator[Document]:
            raise AssertionError("the corpus was read")
            yield

        with pytest.raises(DataContractError, match="exists already"):
            build_store(nothing(), ByteTokenizer(), store.path)

    def test_replacing_puts_the_new_store_in_its_place_and_leaves_no_rest(self, store: TokenStore) -> None:
        build_store(documents("new"), ByteTokenizer(), store.path, replace=True)
        assert TokenStore.open(store.path).token_count == 3
        assert [path.name for path in store.path.parent.iterdir()] == ["store"]

    def test_a_failed_replacement_leaves_the_old_store(self, store: TokenStore) -> None:
        with pytest.raises(DataContractError):
            build_store(documents(), ByteTokenizer(), store.path, replace=True)
        assert TokenStore.open(store.path).fingerprint == store.fingerprint

    def test_progress_counts_tokens(self, tmp_path: Path) -> None:
        seen: list[tuple[str, int, int | None]] = []
        build_store(documents("ab", "c"), ByteTokenizer(), tmp_path / "s", progress=lambda *event: seen.append(event))
        assert seen == [("tokens", 3, None)]

    def test_the_result_does_not_depend_on_how_documents_are_grouped(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        texts = [letters(length) for length in (5, 0, 9, 1, 30)]
        whole = build_store(documents(*texts), ByteTokenizer(), tmp_path / "whole").store
        monkeypatch.setattr("hybrid.data.store.GROUP_CHARACTERS", 6)
        assert build_store(documents(*texts), ByteTokenizer(), tmp_path / "grouped").store.manifest == whole.manifest

    @pytest.mark.parametrize("rule", [{"by": "lines"}, {"validation_share": 1.0}, {"validation_share": -0.1}])
    def test_a_split_that_cannot_be_is_a_configuration_error(self, rule: dict[str, Any]) -> None:
        with pytest.raises(ConfigError):
            SplitRule(**rule)


class TestInterrupted:
    @pytest.mark.parametrize("asked", range(1, 5))
    def test_a_stop_request_leaves_nothing_half_made(
        self, tmp_path: Path, asked: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("hybrid.data.store.GROUP_DOCUMENTS", 1)
        calls = iter(range(1, 100))
        with pytest.raises(StopRequested, match="nothing half made"):
            build_store(
                documents("a", "b"), ByteTokenizer(), tmp_path / "store", should_stop=lambda: next(calls) == asked
            )
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt(), MemoryError()])
    def test_an_error_of_any_kind_leaves_nothing_half_made(self, tmp_path: Path, error: BaseException) -> None:
        def source() -> Iterator[Document]:
            yield from documents("a")
            raise error

        with pytest.raises(type(error)):
            build_store(source(), ByteTokenizer(), tmp_path / "store")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    def test_a_killed_build_leaves_no_store_and_the_next_one_succeeds(self, tmp_path: Path, number: int) -> None:
        script = textwrap.dedent("""
            import signal, sys, time
            from hybrid.data import store
            from hybrid.data.corpus import Document
            from hybrid.data.tokenizers import ByteTokenizer
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it
            store.GROUP_DOCUMENTS = 1

            def documents():
                yield Document("first", "x" * 100_000)
                print("building", flush=True)
                time.sleep(60)
            store.build_store(documents(), ByteTokenizer(), sys.argv[1])
        """)
        target = tmp_path / "store"
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(target)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "building\n"
        process.send_signal(number)
        assert process.wait(timeout=30) != 0
        process.stdout.close()
        assert not target.exists()
        with pytest.raises(DataContractError, match="no token store here"):
            TokenStore.open(target)
        store = build_store(documents("x"), ByteTokenizer(), target).store
        assert store.verify()["tokens"] == 1

    def test_what_a_killed_build_left_is_removed_once_it_is_surely_dead(self, tmp_path: Path) -> None:
        dead, alive = (tmp_path / f".store.building-{name}" for name in ("dead", "alive"))
        for folder in (dead, alive):
            folder.mkdir()
            (folder / "tokens.bin").write_bytes(b"x")
        old = time.time() - files.ABANDONED_SECONDS - 10
        for path in (dead, dead / "tokens.bin"):
            os.utime(path, (old, old))
        build_store(documents("x"), ByteTokenizer(), tmp_path / "store")
        assert sorted(path.name for path in tmp_path.iterdir()) == [".store.building-alive", "store"]

    def test_of_two_builders_one_wins_and_the_other_is_told(self, tmp_path: Path) -> None:
        def slow() -> Iterator[Document]:
            yield from documents("slow")
            build_store(documents("fast"), ByteTokenizer(), tmp_path / "store")

        with pytest.raises(OSError):
            build_store(slow(), ByteTokenizer(), tmp_path / "store")
        assert (
            TokenStore.open(tmp_path / "store").tokenizer.decode(TokenStore.open(tmp_path / "store").document(0))
            == "fast"
        )
        assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_the_worked_example_of_the_documentation_is_true(tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "formats" / "token_store.md"
    text = page.read_text(encoding="utf-8")
    source = {"type": "files", "paths": ["greetings.jsonl"], "field": "text", "maxBytes": None}
    store = build_store(documents("hello", "world!"), ByteTokenizer(), tmp_path / "store", source=source).store
    assert json.loads(text.split("```json\n")[1].split("```")[0]) == store.manifest
    for name in ("tokens.bin", "documents.bin"):
        shown = (store.path / name).read_bytes().hex()
        assert shown in text.replace(" ", "")
    dataset = WindowDataset(store.split("all"), 4)
    rows = [line.split() for line in text.splitlines() if line.startswith("row ")]
    assert len(rows) == len(dataset) == 3
    for number, words in enumerate(rows):
        sample = dataset.sample(number)
        columns = (sample.ids, sample.targets, sample.positions, sample.segment_ids)
        for begin, column in zip((3, 8, 13, 18), columns, strict=True):
            shown_words = words[begin : begin + 4]
            if column is sample.ids:
                assert shown_words == [chr(token) if token else "." for token in column]
            elif column is sample.targets:
                assert shown_words == ["-" if token == IGNORE else chr(token) for token in column]
            else:
                assert shown_words == [str(value) for value in column]
