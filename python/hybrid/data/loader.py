"""Batches in shuffled order, by step: any step of a run can be made at any time, on any rank."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from hybrid.data.batch import Batch
from hybrid.data.samples import Sample, SampleSet, stack
from hybrid.errors import ConfigError, DataContractError
from hybrid.random.shuffle_numpy import samples as shuffled

# The shuffle is computed for this many samples at a time: its cost per call is that of many small array operations.
ORDER_BLOCK = 4096


@lru_cache(maxsize=8)
def _order(seed: int, size: int, block: int) -> NDArray[np.int64]:
    """Global samples block * ORDER_BLOCK onwards of a run."""
    return shuffled(seed, block * ORDER_BLOCK, ORDER_BLOCK, size)


@dataclass(frozen=True)
class BatchPlan:
    """Which samples each step reads: row j of step s (from 1) is global sample (s - 1) * global_batch + j of the run.

    Global sample i belongs to epoch i // size and is sample permute(i mod size) of that epoch's permutation
    (`random.shuffle`). Batches go on across epochs and are never partial. limit: the run ends after this many
    samples; rows beyond it are masked (-1 in `indices`). None: no end.
    """

    size: int
    global_batch: int
    seed: int
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise DataContractError(f"a data set of {self.size} samples cannot be trained on, expected at least 1")
        if self.global_batch < 1:
            raise ConfigError(f"the global batch has {self.global_batch} samples, expected at least 1")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"the run is limited to {self.limit} samples, expected at least 1")

    @property
    def steps(self) -> int | None:
        """Steps of the run, the last one perhaps with masked rows; None without a limit."""
        return None if self.limit is None else -(-self.limit // self.global_batch)

    def indices(self, data_step: int) -> NDArray[np.int64]:
        """The sample of each row of step `data_step`, int64 [global_batch]; -1 for a row beyond the limit."""
        if data_step < 1 or (self.steps is not None and data_step > self.steps):
            last = "" if self.steps is None else f"..{self.steps}"
            raise DataContractError(f"there is no data step {data_step}, expected 1{last}")
        first = (data_step - 1) * self.global_batch
        count = self.global_batch if self.limit is None else min(self.global_batch, self.limit - first)
        rows = np.full(self.global_batch, -1, dtype=np.int64)
        for block in range(first // ORDER_BLOCK, (first + count - 1) // ORDER_BLOCK + 1):
            start = block * ORDER_BLOCK
            begin, end = max(first, start), min(first + count, start + ORDER_BLOCK)
            rows[begin - first : end - first] = _order(self.seed, self.size, block)[begin - start : end - start]
        return rows

    def cursor(self, data_step: int) -> dict[str, int]:
        """Where the data stands after step `data_step` (0: at the start): samples read, epoch and position of the
        next."""
        samples = data_step * self.global_batch
        if self.limit is not None:
            samples = min(samples, self.limit)
        return {"samples": samples, "epoch": samples // self.size, "position": samples % self.size}


class DataLoader:
    """The microbatches of one rank, by step, made ahead in a background thread.

    The global batch is laid out rank by rank and, within a rank, microbatch by microbatch: rank r owns rows r * G /
    world_size onwards. Which samples a step has never depends on that layout. Use it as a context manager, or call
    `close`. One consumer at a time.
    """

    def __init__(
        self,
        dataset: SampleSet,
        plan: BatchPlan,
        microbatch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        prefetch: int = 2,
    ) -> None:
        """prefetch: how many steps are made ahead; 0 makes each when it is asked for. ConfigError if the global batch
        is not a multiple of microbatch_size * world_size, or the plan is for a data set of another size."""
        if len(dataset) != plan.size:
            raise ConfigError(f"the plan is for {plan.size} samples, but the data set has {len(dataset)}")
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} does not exist among {world_size} ranks")
        if microbatch_size < 1 or plan.global_batch % (microbatch_size * world_size):
            raise ConfigError(
                f"a global batch of {plan.global_batch} does not divide into microbatches of {microbatch_size} on "
                f"{world_size} ranks: make it a multiple of {max(1, microbatch_size) * world_size}"
            )
        self.dataset = dataset
        self.plan = plan
        self.microbatch_size = microbatch_size
        rows = plan.global_batch // world_size
        self._rows = range(rank * rows, (rank + 1) * rows)
        self._ahead = _Prefetcher(self, prefetch) if prefetch > 0 else None

    @property
    def microbatches(self) -> int:
        """Microbatches of this rank in a step."""
        return len(self._rows) // self.microbatch_size

    def step(self, data_step: int) -> list[Batch]:
        """This rank's microbatches of step `data_step` (from 1), in order. Steps may be asked for in any order; one
        after the other is fast. Errors of the data are raised here; DataContractError also for a step without any
        target."""
        if self._ahead is None:
            return self.make(data_step)
        return self._ahead.get(data_step)

    def target_tokens(self, data_step: int) -> int:
        """Targets of the whole step, over all microbatches and ranks: the denominator of its loss. Reads no tokens.

        DataContractError if there are none.
        """
        indices = self.plan.indices(data_step)
        total = int(self.dataset.target_counts(indices[indices >= 0]).sum())
        if total == 0:
            raise DataContractError(
                f"data step {data_step} has no target at all: its loss is undefined; use larger batches"
            )
        return total

    def cursor(self, data_step: int) -> dict[str, int]:
        """`BatchPlan.cursor`, for checkpoints."""
        return self.plan.cursor(data_step)

    def make(self, data_step: int) -> list[Batch]:
        """`step` without the background thread."""
        self.target_tokens(data_step)
        indices = self.plan.indices(data_step)
        batches = []
        for start in range(self._rows.start, self._rows.stop, self.microbatch_size):
            rows = range(start, start + self.microbatch_size)
            samples = [self._sample(int(indices[row])) for row in rows]
            batches.append(stack(samples, rows))
        return batches

    def close(self) -> None:
        """Stop the background thread and wait for it; may be called twice."""
        if self._ahead is not None:
            self._ahead.close()

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _sample(self, index: int) -> Sample:
        return Sample.padding(self.dataset.sequence_length) if index < 0 else self.dataset.sample(index)


class _Prefetcher:
    """Makes the steps after the last one that was asked for."""

    def __init__(self, loader: DataLoader, depth: int) -> None:
        self._loader = loader
        self._depth = depth
        self._changed = threading.Condition()
        self._ready: dict[int, list[Batch] | BaseException] = {}
        self._next = 1  # the step to make next
        self._until = 0  # make steps up to here
        self._closed = False
        self._thread: threading.Thread | None = None

    def get(self, data_step: int) -> list[Batch]:
        with self._changed:
            if self._closed:
                raise ValueError("the data loader is closed")
            if data_step not in self._ready and data_step != self._next:
                self._ready.clear()
                self._next = data_step
            last = self._loader.plan.steps
            ahead = data_step + self._depth
            self._until = ahead if last is None else max(data_step, min(ahead, last))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="hybrid-data", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            while data_step not in self._ready:
                self._changed.wait()
                if self._closed:
                    raise ValueError("the data loader was closed while a step was being made")
            result = self._ready.pop(data_step)
            for stale in [step for step in self._ready if step < data_step]:
                del self._ready[stale]
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._closed and self._next > self._until:
                    self._changed.wait()
                if self._closed:
                    return
                step = self._next
            result: list[Batch] | BaseException
            try:
                result = self._loader.make(step)
            except BaseException as error:
                result = error  # raised in the consumer, with this thread's traceback
            with self._changed:
                if self._next == step:  # nobody jumped elsewhere in the meantime
                    self._ready[step] = result
                    self._next = step + 1
                    self._changed.notify_all()


def evaluation_batches(
    dataset: SampleSet, batch_size: int, *, rank: int = 0, world_size: int = 1, batches: int | None = None
) -> Iterator[Batch]:
    """Every sample once, in order, in batches of batch_size rows; the last is filled with rows that have no targets.

    Ranks take turns and all of them get the same number of batches. batches: at most this many per rank (a quick
    evaluation): then the samples are spread evenly over the data set, and are the same each time.
    """
    if batch_size < 1 or (batches is not None and batches < 1):
        raise ConfigError(f"evaluation needs at least one batch of at least one row, got {batches} of {batch_size}")
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} does not exist among {world_size} ranks")
    count, share = len(dataset), batch_size * world_size
    wanted = count if batches is None else min(count, batches * share)
    chosen = [index * count // wanted for index in range(wanted)]
    padding = Sample.padding(dataset.sequence_length)
    for start in range(0, wanted, share):
        first = start + rank * batch_size
        samples = [dataset.sample(index) for index in chosen[first : first + batch_size]]
        samples += [padding] * (batch_size - len(samples))
        yield stack(samples, range(batch_size))
