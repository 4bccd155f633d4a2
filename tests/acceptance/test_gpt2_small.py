"""GPT-2 small, with its table of 154 MB, on the limits that every WebGPU implementation grants."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hybrid.backends.protocol import StepInfo, StepResult
from hybrid.backends.reference.session import ReferenceSession
from hybrid.config.loading import load_config
from hybrid.config.resolve import model_config, optimizer_settings, resolve
from hybrid.data.batch import Batch
from hybrid.models.parameters import count_parameters
from hybrid.plan.profile import DEFAULT_LIMITS

pytestmark = [pytest.mark.acceptance, pytest.mark.webgpu]

LENGTH = 128


def random_batch(vocabulary: int, seed: int) -> Batch:
    tokens = np.random.default_rng(seed).integers(0, vocabulary, (2, 1, LENGTH), dtype=np.uint32)
    positions = np.arange(LENGTH, dtype=np.uint32).reshape(1, LENGTH)
    return Batch(tokens[0], tokens[1], positions, np.ones((1, LENGTH), np.uint32), np.zeros(1, np.uint32))


def take_step(session: Any, step: int, vocabulary: int) -> StepResult:
    batch = random_batch(vocabulary, step)
    session.begin(StepInfo(step, batch.target_tokens, 1))
    session.accumulate(batch)
    session.apply()
    (result,) = session.poll_metrics(wait=True)
    assert isinstance(result, StepResult)
    return result


def test_gpt2_small_takes_a_step_on_default_limits(record_property: Callable[[str, object], None]) -> None:
    from hybrid.backends.webgpu.device import open_device
    from hybrid.backends.webgpu.session import WebGPUSession

    config = resolve(load_config(preset="gpt2-small"), 50257, 10**6)
    model = model_config(config)
    assert count_parameters(model) == 124_439_808 and model.vocabulary_size == 50257
    settings: dict[str, Any] = {
        "batch_size": 1,
        "sequence_length": LENGTH,
        "optimizer": optimizer_settings(config),
        "max_grad_norm": config.optimizer.max_norm,
        "seed": 1337,
    }

    def open_session() -> WebGPUSession:
        device = open_device(features=(), default_limits=True)
        assert not device.features
        assert all(device.limits[name] == limit for name, limit in DEFAULT_LIMITS.items())
        return WebGPUSession(model, device=device, variants={}, **settings)

    session = open_session()
    before = session.export_state()
    first = take_step(session, 1, model.vocabulary_size)
    assert math.isfinite(first.loss) and first.grad_norm is not None and first.nan_count == first.inf_count == 0
    # Random tokens and initial logits of a small variance: a little more than the entropy of a uniform guess.
    assert math.log(50257) - 0.05 < first.loss < math.log(50257) + 0.3
    state = session.export_state()
    assert all(np.isfinite(array).all() for array in (*state.model.values(), *state.optimizer.values()))
    assert all(np.any(state.model[name] != before.model[name]) for name in state.model)
    del before
    second = take_step(session, 2, model.vocabulary_size)
    record_property("loss", first.loss)
    record_property("loss_after_one_step", second.loss)
    record_property("device_bytes", session.memory()["total"])
    session.close()
    session.device.close()

    reloaded = open_session()
    reloaded.import_state(state)
    again = reloaded.export_state()
    assert again.optimizer_step == 1
    assert all(np.array_equal(state.model[name], again.model[name]) for name in state.model)
    assert all(np.array_equal(state.optimizer[name], again.optimizer[name]) for name in state.optimizer)
    del again
    assert take_step(reloaded, 2, model.vocabulary_size).loss == second.loss
    reloaded.close()
    reloaded.device.close()

    reference = ReferenceSession(model, **settings)
    theirs = take_step(reference, 1, model.vocabulary_size)
    record_property("loss_of_the_reference", theirs.loss)
    assert first.loss == pytest.approx(theirs.loss, rel=1e-6)
    assert first.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
    expected = reference.export_state()
    for name, array in expected.optimizer.items():
        # Moments are gradients times a constant: their direction is that of the gradient.
        if name.startswith("moment1/") and not name.endswith("k_proj.bias"):
            ours = state.optimizer[name]
            difference = np.linalg.norm((ours - array).ravel()) / np.linalg.norm(array.ravel())
            assert difference <= 1e-4, name
