"""`torchrun -m hybrid train`: rank 0 runs the loop as a single process would, the others follow it.

Only rank 0 reads settings and data, writes the run folder and shows anything. All ranks end with the same exit code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid.backends.protocol import TrainingSession
from hybrid.config.resolve import model_config
from hybrid.config.tree import RunConfig
from hybrid.contracts.javascript import iso_time
from hybrid.errors import ConfigError, HybridError
from hybrid.training.dry_run import dry_run
from hybrid.training.lock import locked
from hybrid.training.outcome import Outcome, status_of
from hybrid.training.run_files import RunFile, read_run_file
from hybrid.training.runner import train
from hybrid.training.sessions import torch_settings
from hybrid.training.start import Request, Services

if TYPE_CHECKING:
    from hybrid.backends.torch.ranks import RankFailed

Facts = dict[str, Any]
PLACE = "hybrid/place"


def train_on_ranks(make_request: Callable[[], Request], services: Services) -> Outcome:
    """`runner.train` over all processes that torchrun started. RankFailed on every rank where one fails.

    make_request: what the user asked for; called on rank 0, once all processes have found each other.
    """
    facts = _on_ranks(make_request, services, lambda request, own: train(request, own).facts(), writes=True)
    return Outcome(facts["status"], facts["step"], facts["steps"], facts["message"], Path(facts["runDir"]))


def dry_run_on_ranks(make_request: Callable[[], Request], services: Services) -> Facts:
    """`dry_run.dry_run` over all processes: each of them sets its session up. The report, on every rank."""
    return _on_ranks(make_request, services, dry_run, writes=False)


def _on_ranks(
    make_request: Callable[[], Request], services: Services, work: Callable[[Request, Services], Facts], writes: bool
) -> Facts:
    """What `work` gives on rank 0, with sessions over all ranks, on every rank. writes: whether it keeps a run.json."""
    from hybrid.backends.torch.leading import LeadingSession, Orders, follow
    from hybrid.backends.torch.ranks import RankFailed, Ranks

    stop = services.stop
    known: list[Path] = []  # where the run.json is

    def lost(error: RankFailed) -> None:
        """This process hangs in something that another rank does not answer, and is ended there."""
        for run_dir in known:
            if ranks.rank == 0:
                _record(run_dir, error, services)
            else:
                _record_for_the_first(run_dir, error, services)

    ranks = Ranks(stop_requested=lambda: stop.reason, on_stop=stop.request, on_lost=lost)
    if ranks.rank > 0:
        try:
            with ranks:
                known.extend(Path(place) for place in ranks.hear(PLACE))
                told: Facts = follow(ranks)
                return told
        except RankFailed as error:
            for run_dir in known:
                _record_for_the_first(run_dir, error, services)
            raise
    with ranks:
        request = make_request()
        if request.config.backend.name == "auto":
            backend = request.config.backend.model_copy(update={"name": "torch"})
            request = replace(request, config=request.config.model_copy(update={"backend": backend}))
        if request.config.backend.name != "torch":
            raise ConfigError(
                f"backend.name = {request.config.backend.name!r}: torchrun started several processes, and only 'torch' "
                "trains in more than one"
            )
        stop.limit(request.config.run.max_hours)
        known.extend([request.run_dir] if writes else [])
        ranks.tell(PLACE, [str(place.resolve()) for place in known])
        orders = Orders(ranks)

        def make(config: RunConfig, note: Any, progress: Any) -> TrainingSession:
            with ranks.nothing_to_save():
                return LeadingSession(ranks, orders, model_config(config), **torch_settings(config), note=note)

        facts = work(request, replace(services, make_session=make, processes=ranks.size))
        orders.give("end", facts)
        return facts


def _record(run_dir: Path, error: RankFailed, services: Services) -> None:
    facts = read_run_file(run_dir)
    if facts is None or facts.get("status") == "running":
        RunFile(run_dir, facts).update(
            status=status_of(error), message=str(error), updatedAt=iso_time(services.now() * 1000) or ""
        )


def _record_for_the_first(run_dir: Path, error: RankFailed, services: Services) -> None:
    """The same on another rank. Rank 0 has the folder's lock until it has written how the run ended; where the lock is
    free, and the run is said to be running, rank 0 was killed."""
    with contextlib.suppress(HybridError, OSError), locked(run_dir, patience=0.0):
        if read_run_file(run_dir) is not None:
            _record(run_dir, error, services)
