"""The parameter tree as modules: one unit for each block, tied tables once, and the model's text run as it is."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from backends.sessions import parts
from hybrid.backends.torch.modules import Unit, make_root
from hybrid.backends.torch.ops import TorchOps, dropout_sites
from hybrid.models.config import ModelConfig
from hybrid.models.decoder import Inputs
from hybrid.models.initial_numpy import initial_values
from hybrid.models.parameters import count_parameters, parameter_specs
from hybrid.objectives.cross_entropy import cross_entropy
from hybrid.plan.programs import training_graph
from models.small import GPT2, LLAMA, LOOPED, MODELS, losses_and_gradients, random_batch, random_weights

pytestmark = pytest.mark.torch


def root_of(cfg: ModelConfig, weights: dict[str, Any]) -> Any:
    return make_root(cfg, {name: torch.tensor(array, dtype=torch.float32) for name, array in weights.items()})


def inputs_of(batch: Any, z: float = 0.0) -> Inputs:
    arrays = (batch.ids, batch.positions, batch.segment_ids, batch.targets)
    return Inputs(*(torch.tensor(a.astype(np.int64)) for a in arrays), torch.tensor([z]))


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_of_whole_models_equal_the_reference(name: str, recompute: bool) -> None:
    cfg = MODELS[name]
    weights, batch = random_weights(cfg), random_batch(cfg)
    expected, gradients = losses_and_gradients(cfg, weights, batch, "f64", z=0.01, scale=2.0)
    root = root_of(cfg, weights)
    for unit in root.layers:
        unit.recompute = recompute
    loss, _ = root(TorchOps(), inputs_of(batch, 0.01), cfg, cross_entropy)
    (2.0 * loss.sum()).backward()
    np.testing.assert_allclose(loss.detach().numpy(), expected, rtol=2e-5, atol=1e-6)
    for parameter_name, parameter in root.weights().items():
        error = np.linalg.norm(parameter.grad.numpy() - gradients[parameter_name])
        assert error < 1e-5 * max(1.0, float(np.linalg.norm(gradients[parameter_name]))), parameter_name


@pytest.mark.parametrize("cfg", [LLAMA, GPT2, LOOPED], ids=["llama", "gpt2", "looped"])
def test_there_is_one_unit_for_each_block_and_every_parameter_once(cfg: ModelConfig) -> None:
    root = root_of(cfg, initial_values(cfg, 1))
    assert list(root.weights()) == [spec.name for spec in parameter_specs(cfg)]
    assert sum(weight.numel() for weight in root.parameters()) == count_parameters(cfg)
    assert sum(isinstance(module, Unit) for module in root.modules()) == cfg.layers + 2
    assert list(root.units()) == ["embed", "layers.0", "layers.1", "head"]
    assert (root.embed.tokens.weight is root.head.output.weight) == cfg.tied_embeddings


def test_each_block_calls_its_unit_as_often_as_the_schedule_says() -> None:
    cfg = replace(LOOPED, schedule=(0, 1, 0, 1, 1))
    root = root_of(cfg, initial_values(cfg, 1))
    calls: list[str] = []
    for label, unit in root.units().items():
        unit.register_forward_pre_hook(lambda *_, label=label: calls.append(label))
    root(TorchOps(), inputs_of(random_batch(cfg)), cfg, cross_entropy)
    assert calls == ["embed", "layers.0", "layers.1", "layers.0", "layers.1", "layers.1", "head"]


def test_dropout_sites_know_their_blocks() -> None:
    cfg = replace(LOOPED, dropout=0.1, schedule=(0, 1, 0))
    assert dropout_sites(training_graph(cfg, 2, 8)) == {
        "embed": "embed",
        **{
            f"{label}.{part}": label
            for label in ("layers.0", "layers.1", "layers.0.pass1")
            for part in ("attention", "mlp")
        },
    }


def test_equal_layers_run_equal_code() -> None:
    """A unit is called with the same arguments whichever layer it is, but for tensors: what a compiler needs."""
    cfg = replace(LLAMA, dropout=0.1)
    root = root_of(cfg, initial_values(cfg, 1))
    seen = []
    for unit in root.layers:
        unit.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[2][2:]))
    ops = TorchOps(sites=dropout_sites(training_graph(cfg, 3, 16)))
    root(ops, inputs_of(random_batch(cfg)), cfg, cross_entropy)
    assert seen == [(cfg, ""), (cfg, "")]


def test_packed_documents_equal_the_documents_alone() -> None:
    """In logits of their rows (through the loss) and in gradients."""
    cfg, weights = LLAMA, random_weights(LLAMA)
    packed = random_batch(cfg, b=1)
    rows, gradients = [], []
    for batch in (packed, None):
        root = root_of(cfg, weights)
        pieces = [packed] if batch is not None else list(documents(packed))
        losses = [root(TorchOps(), inputs_of(piece), cfg, cross_entropy)[0] for piece in pieces]
        torch.cat(losses).sum().backward()
        rows.append(torch.cat(losses).detach())
        gradients.append({name: weight.grad for name, weight in root.weights().items()})
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-5, atol=1e-5)
    for name in gradients[0]:
        torch.testing.assert_close(gradients[0][name], gradients[1][name], rtol=1e-4, atol=1e-5)


def documents(batch: Any) -> Any:
    """Each segment of a one-row batch as a batch of its own."""
    row = batch.segment_ids[0]
    edges = [0, *(np.flatnonzero(row[1:] != row[:-1]) + 1), len(row)]
    for start, stop in pairwise(edges):
        cut = {name: getattr(batch, name)[:, start:stop] for name in ("ids", "targets", "positions", "segment_ids")}
        yield replace(parts(batch, 1)[0], **cut)
