"""Runs several ranks as processes forked from one that has torch loaded: `python forked.py FOLDER < JOBS`.

JOBS is a JSON list of {"name", "size", "scenario", "arguments"}; scenarios are the functions below. A few jobs run at a
time (those of one name one after the other), the ranks of each side by side. Prints a JSON list: for each job the exit
codes of its ranks, what they wrote to stderr, the seconds it took, and those after the moment of a fault.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import random
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # before forking: it takes seconds, and every optimizer of torch imports it
from torch.distributed.rendezvous import rendezvous

from hybrid.backends.torch.leading import LeadingSession, Orders, follow
from hybrid.backends.torch.ranks import Ranks
from hybrid.backends.torch.session import TorchSession
from hybrid.cli.main import main
from hybrid.data.batch import Batch
from hybrid.errors import HybridError
from hybrid.training.parity.contract import SHORT_STEPS
from hybrid.training.parity.runtimes import session_arguments
from hybrid.training.parity.workload import MODELS, Workload
from hybrid.training.ranks import train_on_ranks
from hybrid.training.signals import StopFlag
from hybrid.training.start import Request, Services
from parity.legs import load_state, save_state, train_steps
from torch_backend import faults, saves, sharded
from training.micro import micro_config

CPU = torch.device("cpu")
LONGEST = 90.0  # seconds of a job; then its ranks are killed
AT_ONCE = 4  # jobs


def steps(folder: Path, name: str, model: str, count: int, microbatch_size: int, **settings: Any) -> None:
    """Train a parity workload; rank 0 writes its state, losses and first gradients' norm."""
    work = Workload(model, MODELS[model], count, microbatch_size=microbatch_size, max_grad_norm=0.0)
    with Ranks(CPU) as ranks:
        if ranks.rank:
            follow(ranks)
            return
        orders = Orders(ranks)
        session = LeadingSession(ranks, orders, work.model, **{**session_arguments(work), **settings})
        for step in range(1, count + 1):
            session.begin(work.info(step))
            for batch in work.microbatches(step):
                session.accumulate(batch)
            session.apply()
        results = session.poll_metrics(wait=True)
        state = session.export_state()
        np.savez(folder / name, losses=[r.loss for r in results], **state.model, **state.optimizer)
        orders.give("end", {"mode": session.describe()["mode"]})
        session.close()


def train(folder: Path, name: str, count: int, *assignments: str) -> None:
    """A whole run with the micro settings, as `torchrun -m hybrid train` does it."""
    given = ("backend.name=torch", "backend.device=cpu", "data.microbatchSize=1", f"run.steps={count}", *assignments)
    stop = StopFlag()
    faults.flags.append(stop)
    with stop.installed():
        outcome = train_on_ranks(lambda: Request(micro_config(folder, *given), folder / name), Services(stop=stop))
    sys.exit(outcome.exit_code)


def command(folder: Path, name: str, words: list[str]) -> None:
    """A command line, as torchrun starts it; what each rank writes to stdout goes to a file."""
    sys.stdout = (folder / f"{name}.{os.environ['RANK']}.stdout").open("w", encoding="utf-8", buffering=1)
    sys.exit(main(words))


def other(folder: Path, name: str) -> None:
    """A backend that does not train in several processes."""
    train(folder, name, 2, "backend.name=reference")


def faulty(folder: Path, name: str, phase: str, kind: str, rank: int, sharding: str = "none") -> None:
    """A whole run in which something happens to one rank in one phase. Two ranks are a node."""
    own = int(os.environ["RANK"])
    if sharding == "hybrid":
        os.environ.update(LOCAL_RANK=str(own % 2), LOCAL_WORLD_SIZE="2")
    if own == rank:
        faults.install(phase, kind, folder / f"{name}.moment")
    more = [f"backend.sharding={sharding}", f"backend.compile={str(phase == 'compile').lower()}"]
    more.append(f"sampling.every={2 if phase == 'decoding' else 0}")
    torch.compile = partial(torch.compile, backend="eager")  # what takes long is torch's own
    train(folder, name, 1000 if kind != "error" else 6, "checkpoint.every=2", "evaluation.every=2", *more)


def elastic(folder: Path, name: str, count: int) -> None:
    """A whole run; each rank writes down the rows with targets that it was given, in order."""
    original = TorchSession.accumulate
    told = (folder / f"{name}.rows.{os.environ['RANK']}").open("a", encoding="utf-8")

    def accumulate(self: TorchSession, batch: Batch) -> None:
        if hasattr(self, "compared") and batch.target_tokens:  # not while it warms up
            assert self._info is not None
            told.write(json.dumps([self._info.data_step, hashlib.sha256(batch.ids.tobytes()).hexdigest()]) + "\n")
            told.flush()
        original(self, batch)

    TorchSession.accumulate = accumulate  # type: ignore[method-assign]
    train(folder, name, count, "evaluation.every=4", "evaluation.batches=5")


def evaluations(folder: Path, name: str) -> None:
    """What the ranks give for five batches, and what the first of them gives alone."""
    work = Workload("llama", MODELS["llama"], 5, microbatch_size=2)
    with Ranks(CPU) as ranks:
        if ranks.rank:
            follow(ranks)
            return
        orders = Orders(ranks)
        session = LeadingSession(ranks, orders, work.model, **session_arguments(work))
        batches = [batch for step in (1, 2, 3) for batch in work.microbatches(step)][:5]
        together = [vars(found) for found in session.evaluate_all(batches)]
        alone = [vars(session.inner.evaluate(batch)) for batch in batches]
        (folder / f"{name}.json").write_text(json.dumps([together, alone]))
        orders.give("end", None)


def uncompiled(folder: Path, name: str) -> None:
    """The compiler of rank 1 does not work; each rank writes what became of it."""
    if os.environ["RANK"] == "1":

        def broken(*arguments: Any, **options: Any) -> Any:
            def call(*inputs: Any, **named: Any) -> Any:
                raise RuntimeError("no compiler here")

            return call

        torch.compile = broken  # type: ignore[assignment]
    else:
        torch.compile = partial(torch.compile, backend="eager")
    compile_, notes = TorchSession._compile, []  # type: ignore[var-annotated]

    def watched(self: TorchSession, note: Any, warm_up: Any) -> None:
        compile_(self, notes.append, warm_up)
        (folder / f"{name}.{os.environ['RANK']}.json").write_text(json.dumps([self.mode, notes]))

    TorchSession._compile = watched  # type: ignore[method-assign]
    train(folder, name, 2, "backend.compile=true")


def leg(folder: Path, name: str, model: str, first: int, count: int) -> None:
    """Some steps of a parity workload, from the state in `name`.npz to the state and the results in `name`.done.npz."""
    work = Workload(model, MODELS[model], SHORT_STEPS)
    with Ranks(CPU) as ranks:
        if ranks.rank:
            follow(ranks)
            return
        orders = Orders(ranks)
        session = LeadingSession(ranks, orders, work.model, **session_arguments(work))
        session.import_state(load_state(folder / f"{name}.npz"))
        results = train_steps(session, work, first, count)
        save_state(folder / f"{name}.done.npz", session.export_state(), results)
        orders.give("end", None)
        session.close()


def differing(folder: Path, name: str) -> None:
    """Rank 1 begins with other weights, and keeps them: DDP copies rank 0's when it is set up, so after that."""
    original = TorchSession.apply

    def apply(self: TorchSession) -> None:
        if int(os.environ["RANK"]) == 1:
            self.state_tensors()[0][0, 0] += 1.0
        original(self)

    TorchSession.apply = apply  # type: ignore[method-assign]
    steps(folder, name, "llama", 2, 2)


def actions(folder: Path, name: str) -> None:
    """`main`, `each` and `any`, with results and with errors; each rank writes what it got."""
    told: list[Any] = []
    with Ranks(CPU) as ranks:
        told.append(ranks.main("counting", lambda: {"rank": ranks.rank, "n": 3}))
        told.append(ranks.each("squaring", lambda: ranks.rank**2))
        told.append([ranks.any(ranks.rank == 1), ranks.any(False)])
        for call in (
            lambda: ranks.main("reading", lambda: 1 // 0),
            lambda: ranks.each("writing", lambda: 1 // (ranks.rank % 2)),
        ):
            try:
                call()
            except HybridError as error:
                told.append(str(error))
        (folder / f"{name}.{ranks.rank}.json").write_text(json.dumps(told))


def absent(folder: Path, name: str, connects: bool, seconds: str = "1.5") -> None:
    """Rank 1 ends without a word, before all ranks have found each other; connects: it had found the store."""
    os.environ["HYBRID_START_SECONDS"] = seconds
    if os.environ["RANK"] == "1":
        if connects:
            next(rendezvous("env://"))
        os._exit(7)
    with Ranks(CPU):
        pass


SCENARIOS = {
    f.__name__: f
    for f in (absent, steps, train, command, other, faulty, elastic, evaluations, uncompiled, leg, differing, actions)
}
SCENARIOS.update(saves.SCENARIOS | sharded.SCENARIOS)


def _rank(folder: Path, job: dict[str, Any], rank: int, port: int, errors: Path) -> int:
    """In the forked process."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(job["size"]),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    sys.stderr = errors.open("w", buffering=1)
    try:
        SCENARIOS[job["scenario"]](folder, job["name"], **job.get("arguments", {}))
        return 0
    except SystemExit as error:
        return int(error.code or 0)
    except HybridError as error:
        print(f"hybrid: {error}", file=sys.stderr)
        return error.exit_code
    except BaseException as error:
        print(f"other: {type(error).__name__}: {error}", file=sys.stderr)
        return 99


def _free_port() -> int:
    """Below the ports that systems hand out to whoever connects, so that nobody takes it in the meantime."""
    while True:
        port = random.randrange(15_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class _Job:
    """One job under way."""

    def __init__(self, folder: Path, job: dict[str, Any]) -> None:
        self.name = job["name"]
        self._began = time.monotonic()
        self._moment = folder / f"{self.name}.moment"
        self._logs = [folder / f"{self.name}.{rank}.stderr" for rank in range(job["size"])]
        self._codes: list[int | None] = [None] * job["size"]
        self._pids = []
        port = _free_port()
        for rank, log in enumerate(self._logs):
            pid = os.fork()
            if pid == 0:
                os._exit(_rank(folder, job, rank, port, log))
            self._pids.append(pid)

    def ended(self) -> bool:
        late = time.monotonic() - self._began > LONGEST
        for rank, pid in enumerate(self._pids):
            if self._codes[rank] is None:
                if late:
                    os.kill(pid, signal.SIGKILL)
                if (told := os.waitpid(pid, os.WNOHANG))[0]:
                    self._codes[rank] = os.waitstatus_to_exitcode(told[1])
        return None not in self._codes

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = {"codes": self._codes, "errors": [log.read_text() for log in self._logs]}
        if self._moment.exists():
            report["after"] = time.time() - float(self._moment.read_text())
        return {**report, "seconds": time.monotonic() - self._began}


def _run(folder: Path, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reports in the order of the jobs; one that has the name of another waits for it."""
    reports: dict[int, dict[str, Any]] = {}
    waiting, running = dict(enumerate(jobs)), dict[int, _Job]()
    while waiting or running:
        for number, job in list(waiting.items()):
            if len(running) < AT_ONCE and job["name"] not in {other.name for other in running.values()}:
                running[number] = _Job(folder, waiting.pop(number))
        for number, started in list(running.items()):
            if started.ended():
                reports[number] = running.pop(number).report()
        time.sleep(0.02)
    return [reports[number] for number in range(len(jobs))]


if __name__ == "__main__":
    torch.set_num_threads(1)
    wanted = json.load(sys.stdin)
    if any("compiled" in str(one["arguments"]) for one in wanted):
        sharded.compile_once()
    torch.compile(torch.neg, backend="eager")(torch.zeros(1))  # what that imports, the ranks need not
    gc.collect()
    gc.freeze()  # nor look at, and so copy, what is there already
    print(json.dumps(_run(Path(sys.argv[1]), wanted)))
