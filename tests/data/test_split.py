"""Splits: a document stays on its side, nothing is in both, nothing is lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.corpora import documents, letters, shared, store_of, view_of
from hybrid.data.corpus import TextFiles
from hybrid.data.split import SplitRule
from hybrid.data.store import TokenStore, build_store
from hybrid.data.tokenizers import ByteTokenizer, CharacterTokenizer
from hybrid.errors import ConfigError, DataContractError
from hybrid.random.philox import philox4x32
from hybrid.random.streams import stream_key


def stream(store: TokenStore, name: str, rule: SplitRule) -> list[int]:
    view = store.split(name, rule)
    return [int(token) for token in view.read(0, len(view))]


class TestByDocument:
    def test_the_side_of_a_document_is_one_philox_word(self) -> None:
        rule = SplitRule("document", 0.3, seed=5)
        key = stream_key(5, "split")
        expected = [philox4x32((index, 0, 0, 0), key)[0] < int(0.3 * 2**32) for index in range(200)]
        assert rule.held_out(200).tolist() == expected
        assert 30 < sum(expected) < 90

    def test_a_document_keeps_its_side_when_others_are_added(self) -> None:
        rule = SplitRule("document", 0.2)
        assert rule.held_out(1000)[:300].tolist() == rule.held_out(300).tolist()

    def test_every_document_is_on_exactly_one_side_and_in_order(self, tmp_path: Path) -> None:
        store = store_of(tmp_path, [3, 0, 7, 1, 4, 9, 2, 5] * 5)
        rule = SplitRule("document", 0.4)
        held_out = rule.held_out(store.document_count)
        for name, wanted in (("train", ~held_out), ("validation", held_out)):
            expected = np.concatenate([store.document(int(index)) for index in np.flatnonzero(wanted)])
            assert stream(store, name, rule) == expected.tolist()

    def test_no_validation_means_all_is_training(self, tmp_path: Path) -> None:
        store = store_of(tmp_path, [3, 4])
        rule = SplitRule("document", 0.0)
        assert len(store.split("train", rule)) == 7
        with pytest.raises(DataContractError, match=r"the validation part is empty: 7 tokens in 2 documents"):
            store.split("validation", rule)

    @pytest.mark.parametrize("lengths", [[100], [100, 0]])
    def test_where_a_side_would_be_empty_the_split_is_by_share(self, tmp_path: Path, lengths: list[int]) -> None:
        store = store_of(tmp_path, lengths)
        for name, length in (("train", 90), ("validation", 10), ("all", 100)):
            view = store.split(name, SplitRule("document", 0.1))
            assert (len(view), view.rule) == (length, SplitRule("share", 0.1))


class TestByShare:
    def test_the_last_tokens_are_held_out_in_one_piece(self, tmp_path: Path) -> None:
        store = store_of(tmp_path, [4, 4, 4])
        rule = SplitRule("share", 0.5)
        everything = letters(12).encode()
        assert bytes(stream(store, "train", rule)) == everything[:6]
        assert bytes(stream(store, "validation", rule)) == everything[6:]
        assert store.split("train", rule).bounds.tolist() == [0, 4, 6]
        assert store.split("validation", rule).bounds.tolist() == [0, 2, 6]

    def test_tinyshakespeare_splits_as_it_always_did(self, tmp_path: Path) -> None:
        """The counts of nanoGPT's character-level preparation."""
        path = shared("tinyshakespeare.txt")
        source = TextFiles((str(path),))
        tokenizer = CharacterTokenizer.from_texts(document.text for document in source.documents())
        store = build_store(source.documents(), tokenizer, tmp_path / "store", split=SplitRule("share", 0.1)).store
        train, validation = store.split("train"), store.split("validation")
        assert (len(train), len(validation)) == (1_003_854, 111_540)
        text = path.read_text(encoding="utf-8")
        assert tokenizer.decode(validation.read(0, 50)) == text[1_003_854 : 1_003_854 + 50]
        assert tokenizer.decode(train.read(len(train) - 50, len(train))) == text[1_003_854 - 50 : 1_003_854]


class TestViews:
    def test_reading_any_range_is_slicing_the_stream(self, tmp_path: Path) -> None:
        view = view_of(tmp_path, [3, 0, 1, 5, 2])
        whole = view.read(0, 11).tolist()
        for begin in range(12):
            for end in range(begin, 12):
                part = view.read(begin, end)
                assert part.dtype == "uint32"
                assert part.tolist() == whole[begin:end]

    @pytest.mark.parametrize(("begin", "end"), [(-1, 2), (3, 2), (0, 12)])
    def test_a_range_outside_is_refused(self, tmp_path: Path, begin: int, end: int) -> None:
        with pytest.raises(DataContractError, match="outside the all part"):
            view_of(tmp_path, [11]).read(begin, end)

    def test_an_unknown_part_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="no split 'test', expected one of train, validation, all"):
            store_of(tmp_path, [3]).split("test")

    def test_the_store_remembers_its_rule_and_a_run_may_use_another(self, tmp_path: Path) -> None:
        rule = SplitRule("share", 0.25, seed=3)
        texts = documents(letters(8))
        built = build_store(texts, ByteTokenizer(), tmp_path / "store", split=rule).store
        store = TokenStore.open(built.path)
        assert store.rule == rule
        assert len(store.split("train")) == 6
        assert len(store.split("train", SplitRule("share", 0.5))) == 4

    def test_fingerprints_tell_parts_and_rules_apart(self, tmp_path: Path) -> None:
        store = store_of(tmp_path, [5, 5])
        views = [
            store.split("train", SplitRule("share", 0.5)),
            store.split("validation", SplitRule("share", 0.5)),
            store.split("train", SplitRule("share", 0.4)),
            store.split("all", SplitRule("share", 0.4)),
        ]
        assert len({view.fingerprint for view in views}) == 4
        assert views[0].fingerprint == store_of(tmp_path, [5, 5]).split("train", SplitRule("share", 0.5)).fingerprint
