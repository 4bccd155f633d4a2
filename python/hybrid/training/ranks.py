"""`torchrun -m hybrid train`: rank 0 runs the loop as a single process would, the others follow it.

Only rank 0 reads settings and data, writes the run folder and shows anything. All ranks end with the same exit code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid.backends.protocol import TrainingSession
from hybrid.config.resolve import model_config
from hybrid.config.tree import RunConfig
from hybrid.contracts.javascript import iso_time
from hybrid.errors import ConfigError
from hybrid.training.dry_run import dry_run
from hybrid.training.outcome import Outcome, status_of
from hybrid.training.run_files import RunFile, read_run_file
from hybrid.training.runner import train
from hybrid.training.sessions import torch_settings
from hybrid.training.start import Request, Services

if TYPE_CHECKING:
    from hybrid.backends.torch.ranks import RankFailed

Facts = dict[str, Any]


def train_on_ranks(make_request: Callable[[], Request], services: Services) -> Outcome:
    """`runner.train` over all processes that torchrun started. RankFailed on every rank where one fails.

    make_request: what the user asked for; called on rank 0, once all processes have found each other.
    """
    facts = _on_ranks(make_request, services, lambda request, own: train(request, own).facts())
    return Outcome(facts["status"], facts["step"], facts["steps"], facts["message"], Path(facts["runDir"]))


def dry_run_on_ranks(make_request: Callable[[], Request], services: Services) -> Facts:
    """`dry_run.dry_run` over all processes: each of them sets its session up. The report, on every rank."""
    return _on_ranks(make_request, services, dry_run)


def _on_ranks(
    make_request: Callable[[], Request], services: Services, work: Callable[[Request, Services], Facts]
) -> Facts:
    """What `work` gives on rank 0, with sessions over all ranks, on every rank."""
    from hybrid.backends.torch.leading import LeadingSession, Orders, follow
    from hybrid.backends.torch.ranks import Ranks

    stop = services.stop
    known: list[Request] = []

    def record(error: RankFailed) -> None:
        """Rank 0 hangs in something that another rank does not answer, and is ended there."""
        for request in known:
            facts = read_run_file(request.run_dir)
            if facts is None or facts.get("status") == "running":
                RunFile(request.run_dir, facts).update(
                    status=status_of(error), message=str(error), updatedAt=iso_time(services.now() * 1000) or ""
                )

    with Ranks(stop_requested=lambda: stop.reason, on_stop=stop.request, on_lost=record) as ranks:
        if ranks.rank > 0:
            told: Facts = follow(ranks)
            return told
        request = make_request()
        if request.config.backend.name != "torch":
            raise ConfigError(
                f"backend.name = {request.config.backend.name!r}: torchrun started several processes, and only 'torch' "
                "trains in more than one"
            )
        stop.limit(request.config.run.max_hours)
        known.append(request)
        orders = Orders(ranks)

        def make(config: RunConfig, note: Any, progress: Any) -> TrainingSession:
            with ranks.nothing_to_save():
                return LeadingSession(ranks, orders, model_config(config), **torch_settings(config), note=note)

        facts = work(request, replace(services, make_session=make, processes=ranks.size))
        orders.give("end", facts)
        return facts
