"""From configuration to samples, and what `hybrid data` reports."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from data.corpora import letters
from hybrid.config.tree import DataSection
from hybrid.data import commands, store
from hybrid.data.bpe import train_bpe
from hybrid.data.prepare import open_or_build, prepare
from hybrid.data.store import TokenStore
from hybrid.errors import ConfigError, DataContractError, StopRequested


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("To be, or not to be, that is the question.\n" * 20, encoding="utf-8")
    return path


def section(tmp_path: Path, text: Path, **more: Any) -> DataSection:
    values = {"source": str(text), "cacheDir": str(tmp_path / "cache"), "sequenceLength": 16, **more}
    return DataSection.model_validate(values)


class TestPrepare:
    def test_one_file_becomes_training_and_validation_samples(self, tmp_path: Path, text: Path) -> None:
        data = prepare(section(tmp_path, text))
        assert data.validation is not None
        assert data.train.sequence_length == 16
        assert data.train.ledger.tokens + data.validation.ledger.tokens == 43 * 20
        assert data.tokenizer.kind == "bytes"
        assert data.fingerprint == prepare(section(tmp_path, text)).fingerprint

    def test_no_validation_share_means_no_validation(self, tmp_path: Path, text: Path) -> None:
        data = prepare(section(tmp_path, text, split={"validationShare": 0}))
        assert data.validation is None
        assert data.train.ledger.tokens == 43 * 20

    def test_the_default_corpus_needs_nothing_but_python(self, tmp_path: Path) -> None:
        data = prepare(DataSection.model_validate({"cacheDir": str(tmp_path), "maxBytes": 200_000}))
        assert data.validation is not None
        assert data.store.token_count == 200_000
        assert "def " in data.tokenizer.decode(data.store.split("train").read(0, 50_000))

    @pytest.mark.parametrize(
        ("tokenizer", "kind"),
        [
            ({"type": "bytes"}, "bytes"),
            ({"type": "characters"}, "characters"),
            ({"type": "bpe", "vocabularySize": 270}, "bpe"),
        ],
    )
    def test_each_kind_of_tokenizer_is_made(
        self, tmp_path: Path, text: Path, tokenizer: dict[str, Any], kind: str
    ) -> None:
        data = prepare(section(tmp_path, text, tokenizer=tokenizer))
        assert data.tokenizer.kind == kind
        assert data.tokenizer.decode(data.store.document(0)) == text.read_text(encoding="utf-8")

    def test_the_configuration_chooses_how_the_stream_is_cut(self, tmp_path: Path, text: Path) -> None:
        lines = tmp_path / "lines.jsonl"
        lines.write_text("".join(json.dumps({"body": letters(20)}) + "\n" for _ in range(50)), encoding="utf-8")
        base = section(tmp_path, lines, field="body")
        choices = [{}, {"mode": "packed"}, {"stride": 5}, {"isolateDocuments": False}]
        made = [prepare(section(tmp_path, lines, field="body", samples=samples)) for samples in choices]
        assert len({data.fingerprint for data in made}) == len(made)
        assert made[0].fingerprint == prepare(base).fingerprint
        modes = [data.train.describe()["samples"] for data in made]
        assert [mode["mode"] for mode in modes] == ["windows", "packed", "windows", "windows"]
        assert (modes[2]["stride"], modes[3]["isolateDocuments"]) == (5, False)
        evaluated = made[2].validation
        assert evaluated is not None
        assert evaluated.ledger.repeated == 0

    def test_a_tokenizer_can_be_brought_along(self, tmp_path: Path, text: Path) -> None:
        tokenizer = train_bpe(["to be or not to be"], 262)
        path = tmp_path / "tokenizer.json"
        path.write_text(tokenizer.to_json(), encoding="utf-8")
        chosen = {"type": "bpe", "path": str(path)}
        assert prepare(section(tmp_path, text, tokenizer=chosen)).tokenizer == tokenizer
        with pytest.raises(ConfigError, match="remove one of the two"):
            prepare(section(tmp_path, text, tokenizer={"type": "bytes", "path": str(path)}))
        with pytest.raises(DataContractError, match=r"absent\.json: the tokenizer cannot be read"):
            prepare(section(tmp_path, text, tokenizer={"type": "bpe", "path": str(tmp_path / "absent.json")}))


class TestCache:
    def test_the_store_is_built_once_and_again_when_something_changed(
        self, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = open_or_build(section(tmp_path, text))
        with monkeypatch.context() as patch:
            patch.setattr("hybrid.data.prepare.build_store", None)
            again = open_or_build(section(tmp_path, text, batchSize=3, split={"by": "share"}))
            assert again.path == first.path
        other = open_or_build(section(tmp_path, text, tokenizer={"type": "characters"}))
        shorter = open_or_build(section(tmp_path, text, maxBytes=100))
        text.write_text("another text", encoding="utf-8")
        changed = open_or_build(section(tmp_path, text))
        assert len({str(found.path) for found in (first, other, shorter, changed)}) == 4
        assert changed.token_count == 12

    def test_a_damaged_cached_store_is_an_error_and_not_silently_made_again(self, tmp_path: Path, text: Path) -> None:
        found = open_or_build(section(tmp_path, text))
        os.truncate(found.tokens_path, 10)
        with pytest.raises(DataContractError, match=r"tokens\.bin: truncated at offset 10, .* remove the folder"):
            open_or_build(section(tmp_path, text))

    def test_a_changed_byte_is_found_before_training(self, tmp_path: Path, text: Path) -> None:
        found = open_or_build(section(tmp_path, text))
        with found.tokens_path.open("r+b") as file:
            file.write(b"\x01")
        with pytest.raises(DataContractError, match=r"tokens\.bin: the bytes at offsets 0\.\.1719 \(chunk 0\)"):
            prepare(section(tmp_path, text))

    def test_a_store_that_another_process_built_meanwhile_is_used(
        self, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        original = store._groups

        def racing(documents: Any) -> Any:
            monkeypatch.setattr(store, "_groups", original)
            open_or_build(section(tmp_path, text))
            return original(documents)

        monkeypatch.setattr(store, "_groups", racing)
        assert open_or_build(section(tmp_path, text)).token_count == 43 * 20
        assert len(list((tmp_path / "cache").iterdir())) == 1

    @pytest.mark.parametrize("tokenizer", [{"type": "bytes"}, {"type": "characters"}, {"type": "bpe"}])
    def test_a_stop_request_is_honoured_while_reading(
        self, tmp_path: Path, text: Path, tokenizer: dict[str, Any]
    ) -> None:
        with pytest.raises(StopRequested):
            open_or_build(section(tmp_path, text, tokenizer=tokenizer), should_stop=lambda: True)
        assert not list((tmp_path / "cache").glob("*"))


class TestCommands:
    def test_build_verify_inspect(self, tmp_path: Path, text: Path) -> None:
        built = commands.build(section(tmp_path, text), tmp_path / "store")
        assert (built["documents"], built["tokens"], built["vocabularySize"]) == (1, 860, 256)
        assert commands.verify(tmp_path / "store")["fingerprint"] == built["fingerprint"]
        report = commands.inspect(tmp_path / "store", sequence_length=16)
        assert json.loads(json.dumps(report)) == report
        assert report["documentLengths"]["max"] == 860
        assert [split["tokens"] for split in report["splits"]] == [774, 86]
        assert report["splits"][0]["ledgers"]["windows"]["kept"] == 773
        shown = commands.inspect_text(report)
        assert "train: 774 tokens in 1 documents (by share, validation share 0.1)" in shown
        assert "document 0 (860 tokens): 'To be, or not to be" in shown

    def test_inspect_says_what_is_wrong_with_a_split(self, tmp_path: Path) -> None:
        path = tmp_path / "tiny.txt"
        path.write_text("abc", encoding="utf-8")
        commands.build(section(tmp_path, path, split={"validationShare": 0}), tmp_path / "store")
        report = commands.inspect(tmp_path / "store")
        assert "the validation part is empty" in report["splits"][1]["problem"]
        assert "the validation part is empty" in commands.inspect_text(report)

    def test_build_refuses_an_existing_folder_unless_told(self, tmp_path: Path, text: Path) -> None:
        commands.build(section(tmp_path, text), tmp_path / "store")
        with pytest.raises(DataContractError, match="exists already"):
            commands.build(section(tmp_path, text), tmp_path / "store")
        text.write_text(letters(10), encoding="utf-8")
        commands.build(section(tmp_path, text), tmp_path / "store", replace=True)
        assert TokenStore.open(tmp_path / "store").token_count == 10
