"""Runs several ranks as processes forked from one that has torch loaded: `python forked.py FOLDER < JOBS`.

JOBS is a JSON list of {"name", "size", "scenario", "arguments"}; scenarios are the functions below. Jobs run one after
the other, their ranks side by side. Prints a JSON list: for each job the exit codes of its ranks, what they wrote to
stderr, and the seconds it took.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybrid.backends.torch.leading import LeadingSession, Orders, follow
from hybrid.backends.torch.ranks import Ranks
from hybrid.backends.torch.session import TorchSession
from hybrid.errors import HybridError
from hybrid.training.parity.runtimes import session_arguments
from hybrid.training.parity.workload import MODELS, Workload
from hybrid.training.signals import StopFlag
from hybrid.training.start import Request, Services
from training.micro import micro_config

CPU = torch.device("cpu")
LONGEST = 90.0  # seconds of a job; then its ranks are killed


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


def failing(folder: Path, name: str, method: str, call: int, rank: int) -> None:
    """`method` of the session raises on one rank, at that call."""
    if int(os.environ["RANK"]) == rank:
        original, calls = getattr(TorchSession, method), [0]

        def broken(self: TorchSession, *arguments: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == call:
                raise RuntimeError("boom")
            return original(self, *arguments, **options)

        setattr(TorchSession, method, broken)
    train(folder, name, 6)


def train(folder: Path, name: str, count: int, *assignments: str) -> None:
    """A whole run with the micro settings, as `torchrun -m hybrid train` does it."""
    from hybrid.training.ranks import train_on_ranks

    given = ("backend.name=torch", "backend.device=cpu", "data.microbatchSize=1", f"run.steps={count}", *assignments)
    stop = StopFlag()
    with stop.installed():
        outcome = train_on_ranks(Request(micro_config(folder, *given), folder / name), Services(stop=stop))
    sys.exit(outcome.exit_code)


def stopped(folder: Path, name: str, rank: int) -> None:
    """A signal reaches one rank while it applies its third step."""
    if int(os.environ["RANK"]) == rank:
        original, calls = TorchSession.apply, [0]

        def apply(self: TorchSession) -> None:
            calls[0] += 1
            if calls[0] == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
            original(self)

        TorchSession.apply = apply  # type: ignore[method-assign]
    train(folder, name, 1000, "checkpoint.every=0")


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


SCENARIOS = {f.__name__: f for f in (steps, failing, train, stopped, differing, actions)}


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


def _run(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    port = _free_port()
    began = time.monotonic()
    pids = []
    logs = [folder / f"{job['name']}.{rank}.stderr" for rank in range(job["size"])]
    for rank in range(job["size"]):
        pid = os.fork()
        if pid == 0:
            os._exit(_rank(folder, job, rank, port, logs[rank]))
        pids.append(pid)
    codes: list[int | None] = [None] * len(pids)
    while None in codes:
        for rank, pid in enumerate(pids):
            if codes[rank] is None and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(ended[1])
        if time.monotonic() - began > LONGEST:
            for pid, code in zip(pids, codes, strict=True):
                if code is None:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return {"codes": codes, "errors": [log.read_text() for log in logs], "seconds": time.monotonic() - began}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps([_run(Path(sys.argv[1]), job) for job in json.load(sys.stdin)]))
