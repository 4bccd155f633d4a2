"""A step never waits for the device: nothing is read back from it but what a poll asks for."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from backends.sessions import steps_of
from hybrid.backends.protocol import StepInfo
from models.small import LLAMA
from torch_backend.sessions import session

pytestmark = pytest.mark.torch

# What makes the host wait for a number or a shape.
WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::unique"}
# On a CPU, where nothing waits, a step looks whether its norm is finite, and does not count further if it is.
ON_CPU = "aten::_local_scalar_dense"


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def test_five_steps_read_nothing_back_until_they_are_polled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout, clipping and the loss scaler on; the optimizer, too, learns on the device that it is to skip."""
    ours = session(LLAMA, precision="mixed-f16", max_grad_norm=0.5, loss_scaling={"enabled": True})
    lists: list[str] = []
    for name in ("tolist", "numpy", "cpu"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda *a, _name=name, _do=original, **k: lists.append(_name) or _do(*a, **k)
        )
    with Seen() as seen:
        for s, batches in enumerate(steps_of(LLAMA, 5), 1):
            ours.begin(StepInfo(s, sum(batch.target_tokens for batch in batches), len(batches)))
            for batch in batches:
                ours.accumulate(batch)
            ours.apply()
    assert sum(seen.calls.values()) > 500, "the mode saw the steps"
    assert {name: seen.calls[name] for name in WAITING & set(seen.calls)} == {ON_CPU: 5} and not lists
    assert ours.counters()["readbacks"] == 0
    assert len(ours.poll_metrics(wait=True)) == 5 and ours.counters()["readbacks"] == 5
