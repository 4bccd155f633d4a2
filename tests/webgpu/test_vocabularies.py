"""Vocabularies that are no multiple of four: the head's rows are padded, and nobody can tell."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from conftest import swiftshader_icd
from hybrid.backends.protocol import StepInfo
from hybrid.backends.reference.session import ReferenceSession
from hybrid.data.batch import IGNORE, Batch
from hybrid.models.config import ModelConfig
from hybrid.optim.settings import OptimizerSettings

UNTIED = ModelConfig(
    vocabulary_size=65, context_length=32, layers=1, width=32, heads=4, kv_heads=2, feed_forward_width=48
)
MODELS = {
    "untied": UNTIED,
    "tied": replace(UNTIED, norm="layer_norm", positions="learned", activation="gelu", bias=True, tied_embeddings=True),
}
SETTINGS = {
    "batch_size": 2,
    "sequence_length": 32,
    "optimizer": OptimizerSettings(lr=1e-2, weight_decay=0.1),
    "max_grad_norm": 1.0,
    "seed": 7,
}
SCALING = {"enabled": True, "initialScale": 1024}


def batch(vocabulary: int, step: int) -> Batch:
    """Every fifth target is ignored; the last token of the vocabulary occurs."""
    rng = np.random.default_rng(step)
    ids, targets = rng.integers(0, vocabulary, (2, 2, 32), dtype=np.uint32)
    ids[0, 3] = targets[1, 4] = vocabulary - 1
    targets.flat[::5] = IGNORE
    positions = np.tile(np.arange(32, dtype=np.uint32), (2, 1))
    return Batch(ids, targets, positions, np.ones((2, 32), np.uint32), np.arange(2, dtype=np.uint32))


def take(session, vocabulary: int, steps: int) -> list:
    for step in range(1, steps + 1):
        tokens = batch(vocabulary, step)
        session.begin(StepInfo(step, tokens.target_tokens, 1, z_loss=1e-4))
        session.accumulate(tokens)
        session.apply()
    return session.poll_metrics(wait=True)


def sessions(device, name: str, vocabulary: int, precision: str, **options):
    from hybrid.backends.webgpu.session import WebGPUSession

    model = replace(MODELS[name], vocabulary_size=vocabulary)
    settings = {**SETTINGS, "precision": precision, "loss_scaling": SCALING if precision == "mixed-f16" else None}
    return WebGPUSession(model, **settings, device=device, **options), ReferenceSession(model, **settings)


@pytest.mark.webgpu
@pytest.mark.parametrize("vocabulary", [63, 65, 257])
@pytest.mark.parametrize("name", MODELS)
def test_steps_and_evaluations_are_those_of_the_reference(device, precision, name, vocabulary):
    ours, theirs = sessions(device, name, vocabulary, precision)
    tolerance = {"f32": 1e-6, "mixed-f16": 1e-3}[precision]
    for a, b in zip(take(ours, vocabulary, 5), take(theirs, vocabulary, 5), strict=True):
        assert a.loss == pytest.approx(b.loss, rel=tolerance)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=10 * tolerance)
        assert not a.overflow and (a.nan_count, a.inf_count) == (0, 0)
    held_out = batch(vocabulary, 99)
    assert ours.evaluate(held_out).loss_sum == pytest.approx(theirs.evaluate(held_out).loss_sum, rel=tolerance)
    ours.close()


@pytest.mark.webgpu
@pytest.mark.parametrize("name", MODELS)
def test_the_padding_of_every_matrix_stays_zero(device, precision, name):
    """Through steps with weight decay and clipping, and a state that is put back: it may never count as a weight."""
    ours, _ = sessions(device, name, 65, precision)
    take(ours, 65, 2)
    ours.import_state(ours.export_state())
    take(ours, 65, 5)
    looked_at = 0
    for key, tensor in ours.plan.tensors.items():
        if key.rpartition("/")[2] not in ("model.embed_tokens.weight", "lm_head.weight"):
            continue
        assert tensor.shape == (65, 32)
        size = 3 * tensor.bytes // 65
        raw = ours.executor.read_bytes(tensor.arena, tensor.page, tensor.offset + tensor.bytes, size)
        assert not any(raw), key
        looked_at += 1
    assert looked_at == (1 if name == "tied" else 2) * (5 if precision == "mixed-f16" else 4)
    ours.close()


@pytest.mark.webgpu
def test_a_table_in_several_bindings_gives_the_same_losses(device):
    """257 rows of 512 bytes where a binding takes 128 of them: the last one has a row and its padding."""
    from hybrid.backends.webgpu.session import WebGPUSession

    model = replace(MODELS["tied"], vocabulary_size=257, width=128)
    modest = replace(device, limits={**device.limits, "maxStorageBufferBindingSize": 96 * 1024})
    ours, theirs = WebGPUSession(model, device=modest, **SETTINGS), ReferenceSession(model, **SETTINGS)
    assert len([d for d in ours.plan.dispatches("evaluate") if d.label.endswith("cross_entropy_head")]) == 3
    for a, b in zip(take(ours, 257, 3), take(theirs, 257, 3), strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-6)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)
    ours.close()


@pytest.mark.swiftshader
def test_swiftshader_agrees():
    """Another compiler, and subgroups of four. Two Vulkan drivers cannot be in one process."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-m", "webgpu"]
    environment = {**os.environ, "VK_ICD_FILENAMES": str(swiftshader_icd()), "HYBRID_REQUIRE": "webgpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "SwiftShader" in done.stdout  # named where mixed-f16 is not run
    assert "9 passed" in done.stdout
