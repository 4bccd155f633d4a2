"""Windows: no target is lost, counted twice or taken across a document's border."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.corpora import view_of
from hybrid.data.batch import IGNORE
from hybrid.data.samples import Sample
from hybrid.data.windows import WindowDataset
from hybrid.errors import ConfigError, DataContractError

L = 8

in_one_folder = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def rows(dataset: WindowDataset) -> list[Sample]:
    return [dataset.sample(index) for index in range(len(dataset))]


def pairs(samples: list[Sample]) -> list[tuple[int, int]]:
    """(id, target) of every place with a target, in order."""
    return [
        (int(token), int(target))
        for sample in samples
        for token, target in zip(sample.ids, sample.targets, strict=True)
        if target != IGNORE
    ]


def check_row(sample: Sample, length: int) -> None:
    """What `Sample` promises of any row."""
    for array in (sample.ids, sample.targets, sample.positions, sample.segment_ids):
        assert array.dtype == np.uint32
        assert array.shape == (length,)
    used = int(np.count_nonzero(sample.segment_ids))
    assert not sample.segment_ids[used:].any()
    assert not sample.ids[used:].any()
    assert not sample.positions[used:].any()
    assert (sample.targets[used:] == IGNORE).all()
    if used:
        steps = np.diff(sample.segment_ids[:used].astype(int))
        assert sample.segment_ids[0] == 1
        assert set(steps.tolist()) <= {0, 1}
        for segment in range(1, int(sample.segment_ids[used - 1]) + 1):
            positions = sample.positions[sample.segment_ids == segment]
            assert positions.tolist() == list(range(len(positions)))


class TestOneDocument:
    @pytest.mark.parametrize(
        ("tokens", "count", "padded"),
        [(2, 1, 7), (L - 1, 1, 2), (L, 1, 1), (L + 1, 1, 0), (L + 2, 2, 7), (2 * L, 2, 1), (2 * L + 1, 2, 0)],
    )
    def test_lengths_around_the_row(self, tmp_path: Path, tokens: int, count: int, padded: int) -> None:
        view = view_of(tmp_path, [tokens])
        dataset = WindowDataset(view, L)
        stream = view.read(0, tokens).tolist()
        assert len(dataset) == count
        assert pairs(rows(dataset)) == list(pairwise(stream))
        ledger = dataset.ledger
        assert (ledger.kept, ledger.target_only, ledger.dropped, ledger.padded) == (tokens - 1, 1, 0, padded)
        for row in rows(dataset):
            check_row(row, L)

    def test_a_stream_without_a_target_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(DataContractError, match="has 1 token: nothing to predict"):
            WindowDataset(view_of(tmp_path, [1]), L)

    def test_neighbouring_windows_share_the_token_at_their_border(self, tmp_path: Path) -> None:
        first, second = rows(WindowDataset(view_of(tmp_path, [2 * L + 1]), L))
        assert first.targets[-1] == second.ids[0]

    @pytest.mark.parametrize("stride", [1, 3, L - 1, L])
    @pytest.mark.parametrize("tokens", [2, L, L + 1, L + 2, 2 * L + 1, 3 * L])
    def test_every_target_is_seen_at_any_stride(self, tmp_path: Path, stride: int, tokens: int) -> None:
        view = view_of(tmp_path, [tokens])
        dataset = WindowDataset(view, L, stride=stride)
        for index, row in enumerate(rows(dataset)):
            check_row(row, L)
            used = int(np.count_nonzero(row.segment_ids))
            start = index * stride
            assert row.ids[:used].tolist() == view.read(start, start + used).tolist()
            assert row.targets[:used].tolist() == view.read(start + 1, start + used + 1).tolist()
        last = len(dataset) - 1
        assert last * stride + np.count_nonzero(dataset.sample(last).segment_ids) == tokens - 1
        dataset.ledger.check()

    def test_stride_one_has_a_row_for_every_offset(self, tmp_path: Path) -> None:
        assert len(WindowDataset(view_of(tmp_path, [100]), L, stride=1)) == 100 - L

    @pytest.mark.parametrize("settings", [{"sequence_length": 0}, {"sequence_length": 4, "stride": 5}])
    def test_settings_that_would_skip_tokens_are_refused(self, tmp_path: Path, settings: dict[str, Any]) -> None:
        with pytest.raises(ConfigError):
            WindowDataset(view_of(tmp_path, [10]), **settings)

    @pytest.mark.parametrize("index", [-1, 2])
    def test_a_sample_that_does_not_exist_is_named(self, tmp_path: Path, index: int) -> None:
        with pytest.raises(DataContractError, match=rf"no sample {index} .* expected 0\.\.1"):
            WindowDataset(view_of(tmp_path, [2 * L]), L).sample(index)


class TestManyDocuments:
    def test_a_worked_example(self, tmp_path: Path) -> None:
        dataset = WindowDataset(view_of(tmp_path, [3, 1, 6]), 4)
        first, second, third = rows(dataset)
        assert bytes(first.ids.tolist()) == b"abcd"
        assert first.targets.tolist() == [ord("b"), ord("c"), IGNORE, IGNORE]
        assert first.segment_ids.tolist() == [1, 1, 1, 2]
        assert first.positions.tolist() == [0, 1, 2, 0]
        assert bytes(second.ids.tolist()) == b"efgh"
        assert bytes(second.targets.tolist()) == b"fghi"
        assert second.segment_ids.tolist() == [1, 1, 1, 1]
        assert bytes(third.ids.tolist()) == b"i\0\0\0"
        assert third.targets.tolist() == [ord("j"), IGNORE, IGNORE, IGNORE]
        assert third.segment_ids.tolist() == [1, 0, 0, 0]
        ledger = dataset.ledger
        assert (ledger.rows, ledger.kept, ledger.padded) == (3, 9, 3)
        assert (ledger.targets, ledger.across_documents) == (7, 2)
        assert "9 tokens" in ledger.text()

    def test_without_isolation_borders_are_invisible(self, tmp_path: Path) -> None:
        view = view_of(tmp_path, [3, 1, 6])
        dataset = WindowDataset(view, 4, isolate_documents=False)
        stream = view.read(0, 10).tolist()
        assert pairs(rows(dataset)) == list(pairwise(stream))
        assert rows(dataset)[0].segment_ids.tolist() == [1, 1, 1, 1]
        assert rows(dataset)[0].positions.tolist() == [0, 1, 2, 3]
        assert dataset.ledger.across_documents == 0

    def test_documents_of_one_token_have_nothing_to_predict(self, tmp_path: Path) -> None:
        with pytest.raises(DataContractError, match="only documents of one token"):
            WindowDataset(view_of(tmp_path, [1, 1, 1]), 4)
        assert len(WindowDataset(view_of(tmp_path, [1, 1, 1]), 4, isolate_documents=False)) == 1

    @in_one_folder
    @given(
        lengths=st.lists(st.integers(0, 12), min_size=1, max_size=12),
        length=st.integers(1, 9),
        isolate=st.booleans(),
        data=st.data(),
    )
    def test_any_documents_at_any_length(
        self, tmp_path: Path, lengths: list[int], length: int, isolate: bool, data: st.DataObject
    ) -> None:
        stride = data.draw(st.integers(1, length))
        if sum(lengths) < 2 or (isolate and max(lengths) < 2):
            return
        view = view_of(tmp_path, lengths)
        dataset = WindowDataset(view, length, stride=stride, isolate_documents=isolate)
        samples = rows(dataset)
        ends = set(np.cumsum(lengths).tolist())
        for index, sample in enumerate(samples):
            check_row(sample, length)
            for place in range(int(np.count_nonzero(sample.segment_ids))):
                at = index * stride + place
                crosses = isolate and at + 1 in ends
                assert sample.targets[place] == (IGNORE if crosses else view.read(at + 1, at + 2)[0])
                if place and isolate:
                    assert (sample.segment_ids[place] != sample.segment_ids[place - 1]) == (at in ends)
        counts = [int(np.count_nonzero(sample.targets != IGNORE)) for sample in samples]
        assert dataset.target_counts(np.arange(len(dataset))).tolist() == counts
        ledger = dataset.ledger
        ledger.check()
        assert ledger.targets == sum(counts)
        assert ledger.padded == sum(int(np.count_nonzero(sample.segment_ids == 0)) for sample in samples)
        if stride == length:
            assert ledger.repeated == 0

    def test_fingerprints_cover_every_setting(self, tmp_path: Path) -> None:
        view = view_of(tmp_path, [20, 20])
        sets = [
            WindowDataset(view, 8),
            WindowDataset(view, 7),
            WindowDataset(view, 8, stride=4),
            WindowDataset(view, 8, isolate_documents=False),
        ]
        assert len({dataset.fingerprint for dataset in sets}) == len(sets)
        assert WindowDataset(view, 8).fingerprint == sets[0].fingerprint
        assert sets[0].describe()["ledger"]["kept"] == 39
