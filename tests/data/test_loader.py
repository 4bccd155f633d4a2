"""The loader: the order of samples is a function of the step alone, whatever the layout, and errors reach the
consumer."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from data.corpora import store_of, view_of
from hybrid.data.batch import IGNORE, Batch
from hybrid.data.loader import ORDER_BLOCK, BatchPlan, DataLoader, evaluation_batches
from hybrid.data.samples import Ledger, Sample
from hybrid.data.store import TokenStore
from hybrid.data.windows import WindowDataset
from hybrid.errors import ConfigError, DataContractError
from hybrid.random.shuffle import sample as shuffled

G = 12


@pytest.fixture
def dataset(tmp_path: Path) -> WindowDataset:
    return WindowDataset(view_of(tmp_path, [40, 3, 1, 77, 200, 30]), 8)


def whole_step(dataset: WindowDataset, step: int, microbatch: int, ranks: int, prefetch: int = 0) -> Batch:
    """All rows of one step, gathered over ranks and microbatches and put in the order of their sample ids."""
    batches: list[Batch] = []
    for rank in range(ranks):
        plan = BatchPlan(len(dataset), G, seed=7)
        with DataLoader(dataset, plan, microbatch, rank=rank, world_size=ranks, prefetch=prefetch) as loader:
            assert loader.microbatches == G // ranks // microbatch
            batches += loader.step(step)
    return joined(batches)


def joined(batches: list[Batch]) -> Batch:
    order = np.argsort(np.concatenate([batch.sample_ids for batch in batches]))
    names = ("ids", "targets", "positions", "segment_ids", "sample_ids")
    return Batch(**{name: np.concatenate([getattr(batch, name) for batch in batches])[order] for name in names})


def equal(left: Batch, right: Batch) -> bool:
    return all(
        np.array_equal(getattr(left, name), getattr(right, name))
        for name in ("ids", "targets", "positions", "segment_ids", "sample_ids")
    )


class TestPlan:
    def test_rows_follow_the_stateless_shuffle_across_epochs(self) -> None:
        plan = BatchPlan(size=17, global_batch=5, seed=3)
        for step in range(1, 20):
            assert plan.indices(step).tolist() == [shuffled(3, (step - 1) * 5 + row, 17) for row in range(5)]

    def test_every_sample_is_read_once_an_epoch(self) -> None:
        plan = BatchPlan(size=30, global_batch=4, seed=1)
        stream = np.concatenate([plan.indices(step) for step in range(1, 16)])
        assert sorted(stream[:30]) == sorted(stream[30:]) == list(range(30))
        assert stream[:30].tolist() != stream[30:].tolist()

    def test_steps_at_the_joints_of_the_order_blocks_are_right(self) -> None:
        plan = BatchPlan(size=999, global_batch=1000, seed=1)
        for step in (4, 5, ORDER_BLOCK // 1000 * 3):
            assert plan.indices(step).tolist() == [shuffled(1, (step - 1) * 1000 + row, 999) for row in range(1000)]
        wide = BatchPlan(size=50, global_batch=3 * ORDER_BLOCK + 1, seed=1).indices(2)
        assert wide[[0, -1]].tolist() == [shuffled(1, 3 * ORDER_BLOCK + 1 + row, 50) for row in (0, 3 * ORDER_BLOCK)]

    def test_a_bounded_run_masks_its_tail(self) -> None:
        plan = BatchPlan(size=10, global_batch=4, seed=1, limit=10)
        assert plan.steps == 3
        assert plan.indices(3)[2:].tolist() == [-1, -1]
        assert plan.indices(3)[:2].tolist() == BatchPlan(10, 4, 1).indices(3)[:2].tolist()
        assert plan.cursor(3) == {"samples": 10, "epoch": 1, "position": 0}

    @pytest.mark.parametrize("step", [0, -1, 4])
    def test_a_step_that_does_not_exist_is_named(self, step: int) -> None:
        with pytest.raises(DataContractError, match=rf"no data step {step}, expected 1\.\.3"):
            BatchPlan(10, 4, 1, limit=10).indices(step)

    def test_the_cursor_says_where_the_next_sample_is(self) -> None:
        plan = BatchPlan(size=10, global_batch=4, seed=1)
        assert plan.cursor(0) == {"samples": 0, "epoch": 0, "position": 0}
        assert plan.cursor(2) == {"samples": 8, "epoch": 0, "position": 8}
        assert plan.cursor(3) == {"samples": 12, "epoch": 1, "position": 2}

    @pytest.mark.parametrize("wrong", [{"size": 0}, {"global_batch": 0}, {"limit": 0}])
    def test_plans_that_cannot_be_are_refused(self, wrong: dict[str, int]) -> None:
        with pytest.raises((ConfigError, DataContractError)):
            BatchPlan(**{"size": 3, "global_batch": 2, "seed": 1, **wrong})


class TestLayout:
    @pytest.mark.parametrize(("microbatch", "ranks"), [(6, 1), (4, 1), (1, 1), (3, 2), (6, 2), (1, 4), (3, 4), (1, 12)])
    def test_any_split_into_microbatches_and_ranks_reads_the_same(
        self, dataset: WindowDataset, microbatch: int, ranks: int
    ) -> None:
        for step in (1, 2, 9):
            assert equal(whole_step(dataset, step, microbatch, ranks), whole_step(dataset, step, G, 1))

    def test_sample_ids_are_places_in_the_global_batch(self, dataset: WindowDataset) -> None:
        plan = BatchPlan(len(dataset), G, seed=7)
        for rank in range(2):
            with DataLoader(dataset, plan, 3, rank=rank, world_size=2, prefetch=0) as loader:
                found = [batch.sample_ids.tolist() for batch in loader.step(1)]
            assert found == [[6 * rank + start + row for row in range(3)] for start in (0, 3)]

    def test_row_j_holds_sample_j_of_the_plan(self, dataset: WindowDataset) -> None:
        batch = whole_step(dataset, 4, 3, 2)
        for row, index in enumerate(BatchPlan(len(dataset), G, seed=7).indices(4)):
            sample = dataset.sample(int(index))
            assert batch.ids[row].tolist() == sample.ids.tolist()
            assert batch.targets[row].tolist() == sample.targets.tolist()
            assert batch.positions[row].tolist() == sample.positions.tolist()
            assert batch.segment_ids[row].tolist() == sample.segment_ids.tolist()

    def test_target_tokens_are_those_of_the_whole_step_on_every_rank(self, dataset: WindowDataset) -> None:
        plan = BatchPlan(len(dataset), G, seed=7)
        for step in range(1, 12):
            expected = whole_step(dataset, step, G, 1).target_tokens
            for rank in range(4):
                loader = DataLoader(dataset, plan, 3, rank=rank, world_size=4, prefetch=0)
                assert loader.target_tokens(step) == expected

    @pytest.mark.parametrize(("microbatch", "ranks"), [(5, 1), (12, 2), (0, 1), (8, 3)])
    def test_a_batch_that_does_not_divide_is_refused(self, dataset: WindowDataset, microbatch: int, ranks: int) -> None:
        with pytest.raises(ConfigError, match="a global batch of 12 does not divide"):
            DataLoader(dataset, BatchPlan(len(dataset), G, 7), microbatch, world_size=ranks)

    def test_a_plan_for_another_data_set_or_rank_is_refused(self, dataset: WindowDataset) -> None:
        with pytest.raises(ConfigError, match=rf"plan is for 5 samples, but the data set has {len(dataset)}"):
            DataLoader(dataset, BatchPlan(5, G, 7), 3)
        with pytest.raises(ConfigError, match="rank 2 does not exist among 2 ranks"):
            DataLoader(dataset, BatchPlan(len(dataset), G, 7), 3, rank=2, world_size=2)

    def test_the_masked_tail_of_a_bounded_run_has_no_targets(self, dataset: WindowDataset) -> None:
        plan = BatchPlan(len(dataset), G, seed=7, limit=15)
        with DataLoader(dataset, plan, 3) as loader:
            assert equal(joined(loader.step(1)), whole_step(dataset, 1, G, 1))
            last = loader.step(2)
            assert [batch.target_tokens > 0 for batch in last] == [True, False, False, False]
            assert loader.target_tokens(2) == last[0].target_tokens
            assert last[1].segment_ids.sum() == 0
            assert len(last) == 4
            with pytest.raises(DataContractError, match="no data step 3"):
                loader.step(3)


class TestResume:
    def test_twenty_steps_are_ten_and_ten_and_five_five_ten(self, dataset: WindowDataset) -> None:
        plan = BatchPlan(len(dataset), G, seed=7)

        def run(*stretches: range) -> list[Batch]:
            seen = []
            for stretch in stretches:
                with DataLoader(dataset, plan, 4) as loader:
                    seen += [joined(loader.step(step)) for step in stretch]
            return seen

        whole = run(range(1, 21))
        for parts in ([range(1, 11), range(11, 21)], [range(1, 6), range(6, 11), range(11, 21)]):
            assert all(equal(left, right) for left, right in zip(whole, run(*parts), strict=True))

    @pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
    def test_steps_can_be_read_in_any_order(self, dataset: WindowDataset, prefetch: int) -> None:
        expected = {step: whole_step(dataset, step, G, 1) for step in range(1, 12)}
        with DataLoader(dataset, BatchPlan(len(dataset), G, seed=7), G, prefetch=prefetch) as loader:
            for step in (1, 2, 3, 9, 3, 3, 4, 11, 1, 2, 4, 5, 7):
                assert equal(joined(loader.step(step)), expected[step])

    def test_other_seeds_read_in_another_order(self, dataset: WindowDataset) -> None:
        orders = {tuple(BatchPlan(len(dataset), G, seed).indices(1)) for seed in range(5)}
        assert len(orders) == 5


class Faulty:
    """A set of samples that does what the test says when a sample is read."""

    sequence_length = 4
    vocabulary_size = 256

    def __init__(self, on_sample: Callable[[int], None], size: int = 100) -> None:
        self._on_sample = on_sample
        self._size = size

    def __len__(self) -> int:
        return self._size

    def sample(self, index: int) -> Sample:
        self._on_sample(index)
        ones = np.ones(4, dtype=np.uint32)
        return Sample(ones * np.uint32(index), ones, np.arange(4, dtype=np.uint32), ones)

    def target_counts(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.full(indices.shape, 4, dtype=np.int64)

    @property
    def ledger(self) -> Ledger:
        raise NotImplementedError("the loader needs no ledger")

    @property
    def fingerprint(self) -> str:
        return "faulty"

    def describe(self) -> dict[str, Any]:
        return {}


def data_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hybrid-data"]


class TestPrefetch:
    def test_following_steps_are_made_ahead_and_no_more(self) -> None:
        read: list[int] = []
        with DataLoader(Faulty(read.append), BatchPlan(100, 2, 1), 2, prefetch=3) as loader:
            loader.step(1)
            deadline = time.monotonic() + 10
            while len(read) < 8 and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(0.05)
            assert len(read) == 8

    def test_nothing_is_made_beyond_the_end_of_the_run(self) -> None:
        read: list[int] = []
        with DataLoader(Faulty(read.append), BatchPlan(100, 2, 1, limit=4), 2, prefetch=3) as loader:
            loader.step(1)
            loader.step(2)
            time.sleep(0.05)
            assert len(read) == 4

    @pytest.mark.parametrize("prefetch", [0, 2])
    def test_an_error_reaches_the_consumer_with_the_traceback_of_its_cause(self, prefetch: int) -> None:
        broken = BatchPlan(100, 2, 1).indices(3)[1]

        def fail(index: int) -> None:
            if index == broken:
                raise DataContractError("tokens.bin: broken at offset 12")

        with DataLoader(Faulty(fail), BatchPlan(100, 2, 1), 2, prefetch=prefetch) as loader:
            assert len(loader.step(1)) == len(loader.step(2)) == 1
            for _ in range(2):
                with pytest.raises(DataContractError, match="broken at offset 12") as caught:
                    loader.step(3)
                frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
                assert frames[-1] == "fail"
                assert "make" in frames
            assert len(loader.step(4)) == 1

    def test_closing_ends_the_thread_even_in_the_middle_of_a_step(self) -> None:
        started, release = threading.Event(), threading.Event()

        def wait(index: int) -> None:
            started.set()
            release.wait(10)

        before = len(data_threads())
        loader = DataLoader(Faulty(wait), BatchPlan(100, 2, 1), 2)
        failures: list[BaseException] = []

        def consume() -> None:
            try:
                loader.step(1)
            except ValueError as error:
                failures.append(error)

        consumer = threading.Thread(target=consume)
        consumer.start()
        assert started.wait(10)
        threading.Timer(0.05, release.set).start()
        loader.close()
        consumer.join(10)
        assert not consumer.is_alive()
        assert len(data_threads()) == before
        assert len(failures) == 1
        loader.close()
        with pytest.raises(ValueError, match="closed"):
            loader.step(1)

    def test_leaving_the_block_after_an_error_ends_the_thread(self, dataset: WindowDataset) -> None:
        before = len(data_threads())
        with (
            pytest.raises(RuntimeError, match="of the training"),
            DataLoader(dataset, BatchPlan(len(dataset), G, 1), 3) as loader,
        ):
            loader.step(1)
            raise RuntimeError("of the training")
        assert len(data_threads()) == before

    def test_a_wrong_id_in_the_store_stops_the_run_by_name(self, tmp_path: Path) -> None:
        store = store_of(tmp_path, [100])
        with store.tokens_path.open("r+b") as file:
            file.seek(2 * 50)
            file.write(b"\x00\x01")
        damaged = WindowDataset(TokenStore.open(store.path).split("all"), 8)
        with (
            DataLoader(damaged, BatchPlan(len(damaged), len(damaged), 1), len(damaged)) as loader,
            pytest.raises(DataContractError, match=r"tokens\.bin: id 256 at offset 100"),
        ):
            loader.step(1)

    def test_a_step_without_any_target_is_an_error(self, tmp_path: Path) -> None:
        dataset = WindowDataset(view_of(tmp_path, [1, 1, 1, 1, 3]), 2)
        assert dataset.target_counts(np.arange(3)).tolist() == [0, 0, 2]
        loader = DataLoader(dataset, BatchPlan(3, 1, 1), 1, prefetch=0)
        failures = 0
        for step in range(1, 4):
            try:
                assert loader.step(step)[0].target_tokens == 2
            except DataContractError as error:
                assert "no target at all" in str(error)
                failures += 1
        assert failures == 2


class TestEvaluation:
    @pytest.mark.parametrize("batch_size", [1, 3, 7, 64])
    @pytest.mark.parametrize("ranks", [1, 2, 3])
    def test_the_whole_split_is_covered_once(self, dataset: WindowDataset, batch_size: int, ranks: int) -> None:
        per_rank = [list(evaluation_batches(dataset, batch_size, rank=rank, world_size=ranks)) for rank in range(ranks)]
        assert len({len(batches) for batches in per_rank}) == 1
        seen: list[bytes] = []
        for batches in zip(*per_rank, strict=True):
            for batch in batches:
                assert batch.ids.shape == (batch_size, 8)
                assert batch.sample_ids.tolist() == list(range(batch_size))
                seen += [
                    row.tobytes() for row, segments in zip(batch.ids, batch.segment_ids, strict=True) if segments.any()
                ]
        assert seen == [dataset.sample(index).ids.tobytes() for index in range(len(dataset))]
        assert sum(batch.target_tokens for batches in per_rank for batch in batches) == dataset.ledger.targets

    def test_the_last_batch_is_filled_with_rows_that_do_not_count(self, dataset: WindowDataset) -> None:
        size = len(dataset) - 1
        *_, last = evaluation_batches(dataset, size)
        assert (last.targets[1:] == IGNORE).all()
        assert not last.segment_ids[1:].any()

    def test_a_quick_evaluation_is_spread_over_the_split_and_repeats(self, dataset: WindowDataset) -> None:
        batches = list(evaluation_batches(dataset, 2, batches=3))
        assert len(batches) == 3
        chosen = [row.tobytes() for batch in batches for row in batch.ids]
        expected = [dataset.sample(index * len(dataset) // 6).ids.tobytes() for index in range(6)]
        assert chosen == expected
        whole = list(evaluation_batches(dataset, 2, batches=10_000))
        assert len(whole) == -(-len(dataset) // 2)

    @pytest.mark.parametrize(
        "wrong", [{"batch_size": 0}, {"batch_size": 1, "batches": 0}, {"batch_size": 1, "rank": 1}]
    )
    def test_settings_that_cannot_be_are_refused(self, dataset: WindowDataset, wrong: dict[str, int]) -> None:
        with pytest.raises(ConfigError):
            next(evaluation_batches(dataset, **wrong))
