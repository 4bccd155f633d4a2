"""`torchrun -m hybrid train`: rank 0 runs the loop as a single process would, the others follow it.

Only rank 0 reads data, writes the run folder and shows anything. All ranks end with the same exit code.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hybrid.backends.protocol import TrainingSession
from hybrid.config.resolve import model_config
from hybrid.config.tree import RunConfig
from hybrid.errors import ConfigError
from hybrid.training.outcome import Outcome
from hybrid.training.runner import train
from hybrid.training.sessions import torch_settings
from hybrid.training.start import Request, Services


def train_on_ranks(request: Request, services: Services) -> Outcome:
    """`runner.train` over all processes that torchrun started. RankFailed on every rank where one fails."""
    from hybrid.backends.torch.leading import LeadingSession, Orders, follow
    from hybrid.backends.torch.numerics import choose_device
    from hybrid.backends.torch.ranks import Ranks

    if request.config.backend.name != "torch":
        raise ConfigError(
            f"backend.name = {request.config.backend.name!r}: torchrun started several processes, and only 'torch' "
            "trains in more than one"
        )
    stop = services.stop
    with Ranks(choose_device(request.config.backend.device), lambda: stop.reason, stop.request) as ranks:
        if ranks.rank > 0:
            facts = follow(ranks)
            return Outcome(facts["status"], facts["step"], facts["steps"], facts["message"], request.run_dir)
        orders = Orders(ranks)

        def make(config: RunConfig, note: Any, progress: Any) -> TrainingSession:
            return LeadingSession(ranks, orders, model_config(config), **torch_settings(config), note=note)

        outcome = train(request, replace(services, make_session=make))
        orders.give("end", outcome.facts())
        return outcome
