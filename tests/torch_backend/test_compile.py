"""Compiled layers: one code for all of them, the numbers of the eager run, and eager where compiling fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from backends.sessions import step, steps_of
from models.small import LLAMA
from torch_backend.sessions import session

pytestmark = pytest.mark.torch

CFG = replace(LLAMA, dropout=0.1, schedule=(0, 1, 1))


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace and differentiate ahead of time, but leave out the C++ compiler: it takes longest, and is torch's own."""
    compiler = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: compiler(function, backend="aot_eager", **options)
    )
    torch._dynamo.reset()
    counters.clear()


def test_all_layers_share_one_graph_and_compute_what_eager_layers_do(traced_only: None) -> None:
    """Dropout on, a looped schedule, two steps: nothing is compiled again after the first microbatch."""
    eager, compiled = session(CFG), session(CFG, compiled=True)
    assert (eager.mode, compiled.mode) == ("eager", "compiled")
    assert compiled.describe()["kernel_path"] == "torch-cpu-f32-compiled"
    graphs = counters["stats"]["unique_graphs"]
    for s, batches in enumerate(steps_of(CFG, 2), 1):
        a, b = step(eager, s, *batches), step(compiled, s, *batches)
        assert b.loss == pytest.approx(a.loss, rel=1e-6)
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-5)
    assert counters["stats"]["unique_graphs"] == graphs <= 2
    for name, weight in eager.export_state().model.items():
        np.testing.assert_allclose(compiled.export_state().model[name], weight, atol=3e-5)


def test_recomputed_layers_compile_too(traced_only: None) -> None:
    small = replace(CFG, layers=1, schedule=(), dropout=0.0)
    eager, compiled = session(small), session(small, compiled=True, recompute=True)
    batches = steps_of(small, 1)[0]
    assert compiled.mode == "compiled"
    assert step(compiled, 1, *batches).loss == pytest.approx(step(eager, 1, *batches).loss, rel=1e-6)


def test_where_compiling_fails_training_is_eager_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> Any:
        def call(*inputs: Any, **named: Any) -> Any:
            raise RuntimeError("no compiler here\nand more")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    notes: list[str] = []
    it = session(CFG, compiled=True, note=notes.append)
    assert notes == ["torch cannot compile this model here, training goes on without: no compiler here"]
    assert it.describe()["mode"] == "eager"
    batches = steps_of(CFG, 1)[0]
    assert step(it, 1, *batches).loss == step(session(CFG), 1, *batches).loss


def test_the_whole_compiler_agrees_within_the_contract() -> None:
    """Code from Inductor, where the machine has a C++ compiler; else it falls back, which the test above is about."""
    small = replace(CFG, layers=1, schedule=())
    eager, compiled = session(small), session(small, compiled=True)
    batches = steps_of(small, 1)[0]
    for it in (eager, compiled):
        step(it, 1, *batches)
    expected = eager.export_state().optimizer
    for name, moment in compiled.export_state().optimizer.items():
        error = np.linalg.norm(moment - expected[name])
        assert error < 1e-5 * max(float(np.linalg.norm(expected[name])), 1e-6), name
