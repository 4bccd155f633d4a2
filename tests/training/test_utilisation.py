"""The arithmetic of a model is counted as it is executed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybrid.models.config import ModelConfig
from hybrid.models.parameters import parameter_specs
from hybrid.training.utilisation import flops_per_token, peak_flops, utilisation, visible_keys

GPT2 = ModelConfig(
    vocabulary_size=50_304,
    context_length=1024,
    layers=12,
    width=768,
    heads=12,
    feed_forward_width=3072,
    norm="layer_norm",
    positions="learned",
    activation="gelu",
    tied_embeddings=True,
)


def test_a_gpt2_counts_six_flop_a_matrix_element_and_twelve_a_key() -> None:
    """The well-known 6 N + 12 L H D T, with N the parameters that are multiplied with."""
    matrices = 12 * 12 * 768**2 + 50_304 * 768
    assert flops_per_token(GPT2, 1024).full == 6 * matrices + 12 * 12 * 768 * 1024
    assert flops_per_token(GPT2, 1024).causal == 6 * matrices + 12 * 12 * 768 * 512.5


@pytest.mark.parametrize("tied", [True, False])
def test_it_follows_from_the_shapes_of_the_parameters(tied: bool) -> None:
    """Grouped queries and a gate; an embedding is looked up, not multiplied with, unless it is the head too."""
    model = replace(GPT2, kv_heads=4, head_width=48, activation="swiglu", positions="rope", tied_embeddings=tied)
    multiplied = sum(
        spec.shape[0] * spec.shape[1]
        for spec in parameter_specs(model)
        if len(spec.shape) == 2 and (tied or "embed_tokens" not in spec.name)
    )
    assert flops_per_token(model, 1).full == 6 * multiplied + 12 * 12 * 12 * 48


def test_a_looped_model_counts_every_pass() -> None:
    once, head = flops_per_token(GPT2, 1024).full, 6 * 50_304 * 768
    looped = replace(GPT2, layers=6, schedule=(0, 1, 2, 3, 4, 5) * 2)
    assert flops_per_token(looped, 1024).full == once
    assert flops_per_token(replace(GPT2, schedule=tuple(range(12)) * 2), 1024).full - head == 2 * (once - head)


@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
def test_visible_keys_are_those_of_the_mask(window: int | None) -> None:
    seen = [min(query + 1, window or 8) for query in range(8)]
    assert visible_keys(8, window) == sum(seen) / 8


def test_peaks_are_dense_and_by_name() -> None:
    assert peak_flops("NVIDIA H200", "mixed-bf16") == 989e12
    assert peak_flops("NVIDIA H100 PCIe", "mixed-bf16") == 756e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "f32", "fast") == 494e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "mixed-f16") == 312e12
    assert peak_flops("NVIDIA L40S", "mixed-bf16") == 362e12
    assert peak_flops("x86_64", "f32") is None


def test_utilisation_is_the_share_of_all_devices_and_says_how_it_was_counted() -> None:
    flops = flops_per_token(GPT2, 1024)
    half = utilisation(GPT2, 1024, 8 * 0.5 * 989e12 / flops.full, 989e12, devices=8)
    assert half.full == pytest.approx(0.5) and half.causal == pytest.approx(0.5 * flops.causal / flops.full)
    assert "MFU 50.0%" in half.text() and "7912 TFLOP/s dense" in half.text() and "headWidth" in half.text()
