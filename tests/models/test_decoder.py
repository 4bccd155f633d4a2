"""The decoder equals transformers' Llama and GPT-2, and a torch decoder written by hand, in logits and in every
gradient."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hybrid.data.batch import Batch
from hybrid.models.config import ModelConfig
from hybrid.plan.programs import training_graph
from models.small import (
    GPT2,
    LLAMA,
    LOOPED,
    MODELS,
    logits,
    losses_and_gradients,
    make_batch,
    random_batch,
    random_weights,
)
from oracles import torch_decoder as oracle

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_transformers_llama(tied: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    cfg = replace(LLAMA, tied_embeddings=tied)
    weights = random_weights(cfg, dtype=np.float32)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=cfg.vocabulary_size,
            hidden_size=cfg.width,
            num_hidden_layers=cfg.layers,
            num_attention_heads=cfg.heads,
            num_key_value_heads=cfg.kv_heads,
            intermediate_size=cfg.feed_forward_width,
            max_position_embeddings=cfg.context_length,
            rms_norm_eps=cfg.norm_eps,
            tie_word_embeddings=tied,
        )
    )
    missing, unexpected = model.load_state_dict({n: torch.tensor(w) for n, w in weights.items()}, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    ids = np.random.default_rng(0).integers(0, cfg.vocabulary_size, (2, 20))
    with torch.no_grad():
        expected = model(torch.tensor(ids)).logits.numpy()
    got = logits(cfg, weights, make_batch(ids), "f32")
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 1e-5
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cfg", MODELS.values(), ids=MODELS)
def test_logits_equal_the_oracle_on_packed_rows(cfg: ModelConfig) -> None:
    weights, batch = random_weights(cfg), random_batch(cfg)
    expected = oracle.Decoder(cfg.to_dict(), {n: torch.tensor(w) for n, w in weights.items()}).logits(batch)
    np.testing.assert_allclose(logits(cfg, weights, batch), expected.numpy(), rtol=1e-5, atol=2e-6)


def oracle_gradients(cfg: ModelConfig, weights: dict, batch: Batch, z: float, dropout: tuple[int, int]) -> tuple:
    leaves = {name: torch.tensor(w, requires_grad=True) for name, w in weights.items()}
    loss, _ = oracle.Decoder(cfg.to_dict(), leaves).losses(batch, z, dropout)
    loss.backward()
    return loss.item(), {name: leaf.grad.numpy() for name, leaf in leaves.items()}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("cfg", MODELS.values(), ids=MODELS)
def test_losses_and_gradients_equal_the_oracle(cfg: ModelConfig, recompute: bool) -> None:
    """With dropout, z-loss, packed segments, padding and ignored targets, all at once."""
    cfg = replace(cfg, dropout=0.2)
    weights, batch = random_weights(cfg), random_batch(cfg)
    expected_loss, expected = oracle_gradients(cfg, weights, batch, 0.01, (7, 3))
    rows, gradients = losses_and_gradients(cfg, weights, batch, recompute=recompute, data_step=3, seed=7, z=0.01)
    assert rows.sum() == pytest.approx(expected_loss, rel=1e-7)
    for name, gradient in gradients.items():
        # Without rotation a key bias has no effect (softmax ignores a shift): its gradient is rounding, hence the
        # floor.
        error = np.linalg.norm(gradient - expected[name]) / max(float(np.linalg.norm(expected[name])), 1e-6)
        assert error < 1e-6, name  # rotary tables are rounded to float32


@pytest.mark.parametrize("cfg", MODELS.values(), ids=MODELS)
def test_a_packed_row_equals_its_documents_one_by_one(cfg: ModelConfig) -> None:
    """Logits and gradients: segments are isolated, positions restart, and the same document packed twice is the
    same."""
    weights = random_weights(cfg)
    draw = np.random.default_rng(5)
    first, second = draw.integers(0, cfg.vocabulary_size, 6), draw.integers(0, cfg.vocabulary_size, 4)
    documents = [first, second, first]
    packed = make_batch(np.concatenate(documents)[None], segments=np.repeat([1, 2, 3], [6, 4, 6])[None])
    got = np.split(logits(cfg, weights, packed)[0], [6, 10])
    for document, part in zip(documents, got, strict=True):
        np.testing.assert_allclose(part, logits(cfg, weights, make_batch(document[None]))[0], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(got[0], got[2], rtol=1e-10, atol=1e-12)
    loss, gradients = losses_and_gradients(cfg, weights, packed)
    apart = [losses_and_gradients(cfg, weights, make_batch(document[None])) for document in documents]
    np.testing.assert_allclose(loss, np.concatenate([one for one, _ in apart]), rtol=1e-10, atol=1e-12)
    for name, gradient in gradients.items():
        total = sum(each[name] for _, each in apart)
        np.testing.assert_allclose(gradient, total, rtol=1e-9, atol=1e-11, err_msg=name)


def test_a_loop_equals_separate_layers_with_equal_weights() -> None:
    """Gradients of the shared layer are the sum over its passes."""
    looped = replace(LLAMA, layers=1, schedule=(0, 0))
    weights = random_weights(looped)
    copies = {**weights, **{n.replace("layers.0", "layers.1"): w for n, w in weights.items() if "layers.0" in n}}
    batch = random_batch(looped)
    loss, gradients = losses_and_gradients(looped, weights, batch)
    loss_apart, apart = losses_and_gradients(LLAMA, copies, batch)
    np.testing.assert_allclose(loss, loss_apart, rtol=1e-12)
    for name, gradient in gradients.items():
        expected = apart[name] + (apart[name.replace("layers.0", "layers.1")] if "layers.0" in name else 0.0)
        np.testing.assert_allclose(gradient, expected, rtol=1e-9, atol=1e-12, err_msg=name)


def test_a_tied_table_gets_the_sum_of_both_gradients() -> None:
    tied = replace(LLAMA, tied_embeddings=True)
    weights = random_weights(tied)
    batch = random_batch(tied)
    _, gradients = losses_and_gradients(tied, weights, batch)
    table = "model.embed_tokens.weight"
    _, apart = losses_and_gradients(LLAMA, {**weights, "lm_head.weight": weights[table]}, batch)
    np.testing.assert_allclose(gradients[table], apart[table] + apart["lm_head.weight"], rtol=1e-10, atol=1e-13)


def test_a_window_hides_what_is_far_away() -> None:
    cfg = replace(LLAMA, layers=1, schedule=(), window=3)
    weights = random_weights(cfg)
    ids = np.random.default_rng(1).integers(0, cfg.vocabulary_size, (1, 12))
    changed = ids.copy()
    changed[0, 4] = (ids[0, 4] + 1) % cfg.vocabulary_size
    difference = np.abs(logits(cfg, weights, make_batch(ids)) - logits(cfg, weights, make_batch(changed))).max(-1)[0]
    assert (difference[:4] == 0).all()
    assert (difference[4:7] > 0).all()
    assert (difference[7:] == 0).all()


def test_dropout_sites_are_named_by_layer_pass_and_branch() -> None:
    sites = training_graph(replace(LOOPED, schedule=(0, 1, 0), dropout=0.1), 1, 4).dropout_sites
    assert sites == [
        "embed",
        *("layers.0.attention", "layers.0.mlp", "layers.1.attention", "layers.1.mlp"),
        *("layers.0.pass1.attention", "layers.0.pass1.mlp"),
    ]


def test_inputs_that_a_model_does_not_need_do_not_appear() -> None:
    inputs = set(training_graph(LLAMA, 2, 4).inputs)
    assert inputs.isdisjoint({"dropout_keys", "data_step", "sample_ids", "pos_row_order", "start", "last"})
    inputs = set(training_graph(replace(GPT2, dropout=0.1), 2, 4).inputs)
    assert {"dropout_keys", "data_step", "sample_ids", "pos_row_order", "pos_row_count"} <= inputs
