"""A session over several ranks: rank 0 has it and leads, the others follow.

What rank 0 asks of its session becomes an order, posted in the store that started the ranks, and each rank carries it
out on a session of its own; DDP adds the gradients up. Microbatches are dealt out in order, so every number of ranks
sees the same samples. Whoever has fewer than another gets one without targets, which adds exactly nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from hybrid.backends.collection import Collection
from hybrid.backends.protocol import Evaluation, GenerateOptions, SessionState, SpreadState, StepInfo, StepResult
from hybrid.backends.torch.numerics import choose_device
from hybrid.backends.torch.ranks import RankFailed, Ranks
from hybrid.backends.torch.session import TorchSession
from hybrid.backends.torch.shards import Shards
from hybrid.checkpoint.pieces import PieceFolder
from hybrid.data.batch import IGNORE, Batch
from hybrid.models.config import ModelConfig
from hybrid.optim.settings import OptimizerSettings

ORDER = "hybrid/order"
FIELDS = ("ids", "targets", "positions", "segment_ids")
SHARING = "sharing the state"


class LeadingSession:
    """Implements `backends.protocol.TrainingSession` on rank 0. Without shards, sampling happens there alone."""

    def __init__(
        self,
        ranks: Ranks,
        orders: Orders,
        model: ModelConfig,
        *,
        optimizer: OptimizerSettings,
        note: Callable[[str], None] = lambda text: None,
        **settings: Any,
    ) -> None:
        self.ranks = ranks
        self.orders = orders
        self._info: StepInfo | None = None
        self._batches: list[Batch] = []
        orders.give("open", model.to_dict(), optimizer.to_dict(), settings)
        _connect(ranks, settings)
        self.inner = TorchSession(model, **settings, optimizer=optimizer, ranks=ranks, note=note)
        self.shards = Shards(ranks)

    # --- a step ------------------------------------------------------------------------------------------------------

    def begin(self, info: StepInfo) -> None:
        if self._info is not None:
            raise RuntimeError(f"begin: step {self._info.data_step} was not applied")
        self._info, self._batches = info, []

    def accumulate(self, batch: Batch) -> None:
        info = self._info
        if info is None or len(self._batches) == info.microbatches:
            raise RuntimeError("accumulate: more microbatches than `begin` announced, or no `begin`")
        self.inner.check(batch)
        self._batches.append(batch)
        if len(self._batches) == info.microbatches:
            share = -(-info.microbatches // self.ranks.size)
            info = replace(info, microbatches=share)
            self.orders.give("step", asdict(info))
            self.inner.begin(info)
            _step(self.ranks, self.inner, info, self._batches)

    def inspect(self) -> StepResult:
        return self.inner.inspect()

    def apply(self) -> None:
        self.orders.give("apply")
        self.inner.apply()
        self._info = None
        _compare_once(self.ranks, self.inner)

    def poll_metrics(self, wait: bool = False) -> list[StepResult]:
        return self.inner.poll_metrics(wait)

    # --- the rest ----------------------------------------------------------------------------------------------------

    @property
    def width(self) -> int:
        """How many batches are evaluated at a time."""
        return self.ranks.size

    def evaluate(self, batch: Batch) -> Evaluation:
        return self.evaluate_all([batch])[0]

    def evaluate_all(self, batches: list[Batch]) -> list[Evaluation]:
        """Of each batch, in order; they are dealt out to the ranks."""
        for batch in batches:
            self.inner.check(batch)
        share = -(-len(batches) // self.ranks.size)
        self.orders.give("evaluate", share)
        return _evaluate(self.ranks, self.inner, share, batches)[: len(batches)]

    def generate(self, prompt: list[int], options: GenerateOptions) -> Iterator[int]:
        if not self.inner.layout.sharded:
            return self.inner.generate(prompt, options)
        return self.inner.generate_with(self._decode, prompt, options)

    def _decode(self, ids: list[int], start: int) -> NDArray[np.float32]:
        self.orders.give("decode", ids, start)
        with self.ranks.together("sampling"):
            return self.inner.decode(ids, start)

    def export_state(self) -> SessionState:
        self._applied("export_state")
        if not self.inner.layout.sharded:
            return self.inner.export_state()
        self.orders.give("export")
        with self.ranks.together("export"):
            return self.inner.export_state()

    def export_pieces(self, folder: Path, what: str) -> SpreadState:
        """See `backends.protocol.SpreadSession`. Every rank copies its part now, and writes it later."""
        self._applied("export_pieces")
        self.orders.give("save", str(folder), what)
        state = self.inner.sharded_state()
        written = self.shards.start(state, folder, what)
        pieces = PieceFolder(folder, written.result)
        optimizer_step, scaler = self.inner.scalars()
        return SpreadState(
            pieces.tensors({name: tuple(tensor.shape) for name, tensor in state.model.items()}),
            pieces.tensors({name: tuple(tensor.shape) for name, tensor in state.optimizer.items()}),
            optimizer_step,
            scaler,
            pieces.close,
        )

    def import_state(self, state: SessionState) -> None:
        """Read once, here; the other ranks get the tensors from this one."""
        self.inner.check_state(state)
        groups = {"model": state.model, "optimizer": state.optimizer}
        names = [(group, name) for group, tensors in groups.items() for name in tensors]
        with self.filling(names, state.optimizer_step, state.scaler) as fill:
            for group, name in names:
                fill(group, name, groups[group][name])

    @contextmanager
    def filling(
        self, names: list[tuple[str, str]], optimizer_step: int, scaler: dict[str, Any]
    ) -> Iterator[Callable[[str, str, NDArray[np.float32]], None]]:
        """See `backends.protocol.SpreadSession`."""
        self._info = None
        self.orders.give("import", names, optimizer_step, scaler)

        def fill(group: str, name: str, values: NDArray[np.float32]) -> None:
            with self.ranks.together(SHARING):
                self.inner.load_full(group, name, values)

        yield fill
        self.inner.reset(optimizer_step, scaler)

    def _applied(self, action: str) -> None:
        if self._info is not None:
            raise RuntimeError(f"{action}: step {self._info.data_step} is under way; apply it first")

    def describe(self) -> dict[str, Any]:
        return self.inner.describe()

    def memory(self) -> dict[str, int]:
        """Of this rank; the others need as much."""
        return self.inner.memory()

    def counters(self) -> dict[str, int]:
        return self.inner.counters()

    def close(self) -> None:
        self.inner.close()


class Orders:
    """What rank 0 tells the others to do, one after the other, as JSON. "end" is the last one; its content is what
    `follow` gives."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._count = 0

    def give(self, name: str, *content: Any) -> None:
        self._ranks.check()
        self._ranks.tell(f"{ORDER}/{self._count}", [name, *content])
        self._count += 1

    def take(self) -> tuple[str, list[Any]]:
        key, store = f"{ORDER}/{self._count}", self._ranks.store
        name, *content = self._ranks.hear(key)
        if store.add(f"{key}/heard", 1) == self._ranks.size - 1:  # some ranks may be far behind others
            store.delete_key(key)
            store.delete_key(f"{key}/heard")
        self._count += 1
        return name, content


def follow(ranks: Ranks, note: Callable[[str], None] = lambda text: None) -> Any:
    """On every rank but 0: carry out orders until the last one, and give what it says. RankFailed when a rank fails."""
    with ExitStack() as saves:
        return _follow(ranks, note, saves)


def _follow(ranks: Ranks, note: Callable[[str], None], saves: ExitStack) -> Any:
    collection: Collection | None = None
    orders = Orders(ranks)
    session: TorchSession | None = None
    shards: Shards | None = None
    while True:
        name, content = orders.take()
        if name == "end":
            if session is not None:
                session.close()
            return content[0]
        if name == "open":
            model, optimizer, settings = content
            _connect(ranks, settings)
            session = TorchSession(
                ModelConfig.from_dict(model),
                **settings,
                optimizer=OptimizerSettings.from_dict(optimizer),
                ranks=ranks,
                note=note,
            )
            shards = saves.enter_context(Shards(ranks))
            continue
        assert session is not None and shards is not None, name
        if name == "step":
            info = StepInfo(**content[0])
            if collection is None:  # with everything that does not change any more
                collection = saves.enter_context(Collection())
            collection.step(info.data_step)
            session.begin(info)
            _step(ranks, session, info, None)
        elif name == "apply":
            session.apply()
            session.poll_metrics()
            _compare_once(ranks, session)
        elif name == "evaluate":
            _evaluate(ranks, session, content[0], None)
        elif name == "decode":
            with ranks.together("sampling"):
                session.decode(*content)
        elif name == "export":
            with ranks.together("export"):
                session.help_export()
        elif name == "save":
            shards.start(session.sharded_state(), Path(content[0]), content[1])
        elif name == "import":
            _fill(ranks, session, *content)


def _connect(ranks: Ranks, settings: dict[str, Any]) -> None:
    """Each rank with its own device, before the first session."""
    if ranks.device is None:
        chosen: list[torch.device] = []
        ranks.each("choosing a device", lambda: chosen.append(choose_device(settings.get("device", "auto"))))
        ranks.connect(chosen[0])


def _step(ranks: Ranks, session: TorchSession, info: StepInfo, batches: list[Batch] | None) -> None:
    """Forward and backward of this rank's microbatches; `batches` are all of the step, on rank 0."""
    with ranks.together(f"step {info.data_step}"):
        for batch in deal(ranks, session.shape, info.microbatches, batches):
            session.accumulate(batch)


def _evaluate(ranks: Ranks, session: TorchSession, share: int, batches: list[Batch] | None) -> list[Evaluation]:
    """This rank's part of the batches; the results of all, in order, those of the filling ones at the end."""
    with ranks.together("evaluation"):
        found = [session.evaluate(batch) for batch in deal(ranks, session.shape, share, batches)]
        mine = torch.tensor([[e.loss_sum, e.target_tokens, e.overflow] for e in found], dtype=torch.float64)
        parts = [torch.empty_like(mine) for _ in range(ranks.size)]
        dist.all_gather(parts, mine)
    return [Evaluation(loss, int(targets), overflow=bool(flag)) for loss, targets, flag in torch.cat(parts).tolist()]


def deal(ranks: Ranks, shape: tuple[int, int], share: int, batches: list[Batch] | None) -> list[Batch]:
    """Rank 0 hands out `share` microbatches to each rank, in order, filled up with ones that have no targets."""
    rows, time = shape
    mine = torch.empty((share, rows, len(FIELDS) * time + 1), dtype=torch.int64)
    if batches is None:
        dist.scatter(mine, None, src=0)
    else:
        empty = _without_targets(batches[0])
        full = [*batches, *[empty] * (share * ranks.size - len(batches))]
        packed = torch.from_numpy(np.stack([_packed(batch) for batch in full]))
        dist.scatter(mine, list(torch.split(packed, share)), src=0)
    return [_unpacked(part, time) for part in mine.numpy().astype(np.uint32)]


def _without_targets(batch: Batch) -> Batch:
    return replace(batch, targets=np.full_like(batch.targets, IGNORE))


def _packed(batch: Batch) -> Any:
    return np.concatenate([*(getattr(batch, name) for name in FIELDS), batch.sample_ids[:, None]], 1).astype(np.int64)


def _unpacked(rows: Any, time: int) -> Batch:
    parts = {name: np.ascontiguousarray(rows[:, i * time : (i + 1) * time]) for i, name in enumerate(FIELDS)}
    return Batch(**parts, sample_ids=np.ascontiguousarray(rows[:, -1]))


def _fill(ranks: Ranks, session: TorchSession, names: list[list[str]], step: int, scaler: dict[str, Any]) -> None:
    with ranks.together(SHARING):
        for group, name in names:
            session.load_full(group, name, None)
        session.reset(step, scaler)


def _compare_once(ranks: Ranks, session: TorchSession) -> None:
    """After the first step of a session: the same bits on every rank, or they are not training one model."""
    if session.compared:
        return
    session.compared = True
    sums = ranks.each("adding up the weights", session.checksum)
    if len(set(sums)) > 1:
        told = ", ".join(f"rank {rank}: {value:016x}" for rank, value in enumerate(sums))
        raise RankFailed(f"the ranks have different weights after their first step (checksums {told})")
