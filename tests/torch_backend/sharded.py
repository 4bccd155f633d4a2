"""Scenarios of sharded sessions, for `forked`: many sessions, one after the other, in one group of processes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import hybrid.backends.torch.sharding as sharding
from backends.sessions import parts
from hybrid.backends.protocol import GenerateOptions, SessionState, StepInfo
from hybrid.backends.torch.leading import LeadingSession, Orders, follow
from hybrid.backends.torch.modules import Root
from hybrid.backends.torch.ranks import Ranks
from hybrid.backends.torch.session import TorchSession
from hybrid.data.batch import IGNORE, Batch
from hybrid.models.initial_numpy import initial_values
from hybrid.training.parity.runtimes import session_arguments
from hybrid.training.parity.workload import MODELS, Workload
from hybrid.training.ranks import train_on_ranks
from hybrid.training.signals import StopFlag
from hybrid.training.start import Request, Services
from models.small import random_batch
from training.micro import micro_config

CPU = torch.device("cpu")


def workload(model: str, count: int, **changes: Any) -> Workload:
    return Workload(model, MODELS[model], count, microbatch_size=1, **changes)


def train(session: Any, work: Workload) -> dict[str, Any]:
    """What the steps of a workload reported, and the state after them."""
    for step in range(1, work.steps + 1):
        session.begin(work.info(step))
        for batch in work.microbatches(step):
            session.accumulate(batch)
        session.apply()
    results = session.poll_metrics(wait=True)
    told = {name: [getattr(r, name) for r in results] for name in ("loss", "overflow", "loss_scale", "optimizer_step")}
    norms = [r.grad_norm if r.grad_norm is not None else -1.0 for r in results]
    return {**told, "grad_norm": norms, **arrays(session.export_state())}


def arrays(state: SessionState) -> dict[str, Any]:
    return {**state.model, **state.optimizer}


def eight_rows() -> Batch:
    """Of the model "llama": each row with another number of targets, and one without any."""
    batch = random_batch(MODELS["llama"], b=8, t=16)
    targets = batch.targets.copy()
    for row in range(8):
        targets[row, : 2 * row] = IGNORE
    targets[3] = IGNORE
    return replace(batch, targets=targets)


def split_step(session: Any, rows: int) -> dict[str, Any]:
    """One step over `eight_rows`, `rows` at a time."""
    batch = eight_rows()
    session.begin(StepInfo(1, batch.target_tokens, 8 // rows, 1e-3))
    for part in parts(batch, rows):
        session.accumulate(part)
    session.apply()
    (result,) = session.poll_metrics(wait=True)
    return {"loss": [result.loss], "grad_norm": [result.grad_norm], **arrays(session.export_state())}


def split_arguments(rows: int) -> dict[str, Any]:
    work = workload("llama", 1)
    return {**session_arguments(work), "batch_size": rows, "sequence_length": 16, "max_grad_norm": None}


def compile_once() -> None:
    """Trace the layers of `do_split`: forked processes inherit the code."""
    _trace_only()
    TorchSession(MODELS["llama"], **split_arguments(1), compiled=True)


def _trace_only() -> None:
    """Inductor takes long, and is torch's own."""
    if not isinstance(torch.compile, partial):
        torch.compile = partial(torch.compile, backend="aot_eager")


# --- what the processes do -------------------------------------------------------------------------------------------


def sharded(
    folder: Path, name: str, cases: dict[str, dict[str, Any]], node: int = 0, spoilt: int | None = None
) -> None:
    """Each case is {"do": one of `DO`, ...}; rank 0 writes what it gives. node: ranks of a node. tight: the device of
    rank 0 has no memory, as far as one can tell. spoilt: a rank that changes a weight before each update."""
    rank = int(os.environ["RANK"])
    if node:
        os.environ.update(LOCAL_WORLD_SIZE=str(node), LOCAL_RANK=str(rank % node))
    if spoilt == rank:
        original = TorchSession.apply

        def apply(self: TorchSession) -> None:
            self.state_tensors()[0][0, 0] += 1.0
            original(self)

        TorchSession.apply = apply  # type: ignore[method-assign]
    _trace_only()
    with Ranks(CPU) as ranks:
        if ranks.rank:
            follow(ranks)
            return
        orders = Orders(ranks)
        memory = sharding._memory
        for case, facts in cases.items():
            do = DO[facts.pop("do")]
            sharding._memory = (lambda *_: 1) if facts.pop("tight", False) else memory
            np.savez(folder / f"{name}.{case}.npz", **do(partial(LeadingSession, ranks, orders), **facts))
        orders.give("end", None)


def sharded_run(folder: Path, name: str, count: int, assignments: list[str]) -> None:
    """A whole run with the micro settings."""
    given = ("backend.name=torch", "backend.device=cpu", "data.microbatchSize=1", f"run.steps={count}", *assignments)
    sys.exit(
        train_on_ranks(
            lambda: Request(micro_config(folder, *given), folder / name), Services(stop=StopFlag())
        ).exit_code
    )


def do_train(make: Any, model: str, count: int, overflow_step: int = 0, precision: str = "f32", **settings: Any) -> Any:
    work = workload(model, count, overflow_step=overflow_step, precision=precision)
    session = make(work.model, **{**session_arguments(work), **settings})
    return {**train(session, work), "described": json.dumps(session.describe())}


def do_split(make: Any, **settings: Any) -> Any:
    session = make(MODELS["llama"], **{**split_arguments(1), **settings})
    graphs = counters["stats"]["unique_graphs"]
    found = split_step(session, 1)
    found["traced"] = counters["stats"]["unique_graphs"] - graphs
    return {**found, "described": json.dumps(session.describe())}


def do_use(make: Any, **settings: Any) -> Any:
    """Evaluation in the middle of a step and before the update, sampling, and a state that comes back as it went in."""
    work = workload("gpt2", 1)
    session = make(work.model, **{**session_arguments(work), **settings})
    batches = work.microbatches(1)
    first = session.export_state().model
    drawn = initial_values(work.model, work.seed)
    found: dict[str, Any] = {"foreign": [n for n, array in drawn.items() if not np.array_equal(array, first[n])]}
    found["before"] = [session.evaluate(batch).loss_sum for batch in batches]
    session.begin(work.info(1))
    for batch in batches:
        session.accumulate(batch)
        session.evaluate(batches[0])
    session.apply()
    found["evaluation"] = [session.evaluate(batch).loss_sum for batch in batches]
    with counted_gathers() as gathers:
        found["tokens"] = list(session.generate([1, 2, 3], GenerateOptions(tokens=40, temperature=1.0)))
    found["gathers"] = len(gathers)
    state = session.export_state()
    session.import_state(replace(state, model=first))  # what the sample has gathered is outdated now
    found["again"] = [session.evaluate(batch).loss_sum for batch in batches]
    session.import_state(state)
    other = make(work.model, **{**session_arguments(work), "seed": 5, **settings})
    other.import_state(state)
    back = other.export_state()
    found["differing"] = [n for n, array in arrays(back).items() if not np.array_equal(array, arrays(state)[n])]
    return {**found, "step": back.optimizer_step, **arrays(state)}


@contextmanager
def counted_gathers() -> Iterator[list[None]]:
    """As many elements as collectives inside that gather weights."""
    gathers: list[None] = []
    original = dist.all_gather_single

    def counted(*arguments: Any, **options: Any) -> Any:
        gathers.append(None)
        return original(*arguments, **options)

    dist.all_gather_single = counted
    yield gathers
    dist.all_gather_single = original


def do_peak(make: Any, layers: int, **settings: Any) -> Any:
    """Units, and the most bytes of weights that were whole at once in a step of two microbatches."""
    cfg = replace(MODELS["llama"], layers=layers, schedule=(), tied_embeddings=False)
    session = make(cfg, **{**split_arguments(1), **settings})
    root = session.inner._root
    units = [module for module in root.modules() if isinstance(module, FSDPModule)]
    with Watch(root) as watch:
        split_step(session, 1)
    matrices = sum(p.numel() for p in root.layers[0].parameters() if p.dim() > 1)
    rest = sum(p.numel() for p in root.parameters()) - layers * matrices
    left = sum(p.numel() for p in root.parameters() if not isinstance(p, DTensor))
    found = {"units": len(units), "layer": 4 * matrices, "rest": 4 * rest, "left": 4 * left}
    found["own"] = sum(session.memory()[arena] for arena in ("params", "grads", "moment1", "moment2"))
    return {**found, "peak": watch.peak}


class Watch(TorchDispatchMode):
    """Looks at every op of forward and backward: `peak` is the most bytes of gathered weights, and of buffers of the
    collectives that gather them."""

    def __init__(self, root: Root) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._buffers: WeakSet[torch.Tensor] = WeakSet()
        for unit in root.units().values():
            unit.register_forward_pre_hook(self._notice)

    def _notice(self, unit: torch.nn.Module, *_: Any) -> None:
        for parameter in unit.parameters():
            if not isinstance(parameter, DTensor):
                self._storages[parameter.untyped_storage()._cdata] = parameter.untyped_storage()

    def __torch_dispatch__(self, op: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = op(*arguments, **(options or {}))
        if op is torch.ops.fsdp.all_gather_copy_in.default:
            self._buffers.add(result[1])
        gathered = sum(storage.nbytes() for storage in self._storages.values())
        self.peak = max(self.peak, gathered + sum(buffer.nbytes for buffer in self._buffers))
        return result


SCENARIOS = {f.__name__: f for f in (sharded, sharded_run)}
DO = {"train": do_train, "split": do_split, "use": do_use, "peak": do_peak}
