"""Shapes that no tile divides, and tables that no binding holds: training follows the reference all the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hybrid.backends.protocol import GenerateOptions, StepInfo, StepResult
from hybrid.backends.reference.session import ReferenceSession
from hybrid.data.batch import IGNORE, Batch
from hybrid.models.config import ModelConfig
from hybrid.optim.settings import OptimizerSettings

pytestmark = pytest.mark.webgpu

STEPS = 10
SETTINGS: dict[str, Any] = {
    "optimizer": OptimizerSettings(lr=1e-3, weight_decay=0.1),
    "max_grad_norm": 1.0,
    "seed": 3,
}
LLAMA = ModelConfig(vocabulary_size=48, context_length=40, layers=1, width=32, heads=4, feed_forward_width=48)
GPT2 = replace(
    LLAMA, norm="layer_norm", positions="learned", activation="gelu", bias=True, tied_embeddings=True, dropout=0.1
)

# (model, batch size, sequence length)
SHAPES: dict[str, tuple[ModelConfig, int, int]] = {
    "a vocabulary that 4 does not divide": (replace(LLAMA, vocabulary_size=67), 2, 16),
    "a vocabulary that 4 divides and 128 does not": (replace(GPT2, vocabulary_size=260), 2, 16),
    "a tied vocabulary that 4 does not divide": (replace(GPT2, vocabulary_size=67), 2, 16),
    "one sequence": (LLAMA, 1, 32),
    "one token": (GPT2, 1, 1),
    "sequences of one token": (LLAMA, 5, 1),
    "33 tokens": (LLAMA, 3, 33),
    "33 tokens, learned positions": (GPT2, 1, 33),
    "36 wide with 3 heads": (
        replace(LLAMA, width=36, heads=3, kv_heads=3, head_width=12, feed_forward_width=50),
        2,
        17,
    ),
    "widths that 4 does not divide": (replace(GPT2, width=30, heads=3, kv_heads=3, head_width=10), 2, 17),
    "a window": (replace(LLAMA, window=5), 2, 33),
    "a window of one token": (replace(GPT2, window=1), 2, 16),
    "fewer key heads": (replace(LLAMA, kv_heads=2, window=9), 2, 33),
    "one key head": (replace(GPT2, kv_heads=1), 2, 32),
    "heads of 128": (replace(LLAMA, width=32, heads=1, kv_heads=1, head_width=128), 2, 33),
    "untied GPT-2": (replace(GPT2, tied_embeddings=False, bias=False), 2, 32),
    "tied Llama": (replace(LLAMA, tied_embeddings=True), 2, 32),
    "relu2": (replace(LLAMA, activation="relu2"), 2, 32),
    "silu with biases": (replace(GPT2, activation="silu", norm="rms_norm"), 2, 32),
    "gelu with rotary positions": (replace(LLAMA, activation="gelu", norm="layer_norm"), 2, 32),
    "swiglu with biases": (replace(GPT2, activation="swiglu", feed_forward_width=33), 2, 32),
}


def batches(model: ModelConfig, batch_size: int, length: int, step: int) -> list[Batch]:
    """Two microbatches. Packed where there is room, and with unequal numbers of targets."""
    rng = np.random.default_rng(step)
    result = []
    for microbatch in range(2):
        shape = (batch_size, length)
        ids, targets = rng.integers(0, model.vocabulary_size, (2, *shape), dtype=np.uint32)
        segments = np.ones(shape, np.uint32)
        positions = np.tile(np.arange(length, dtype=np.uint32), (batch_size, 1))
        if length > 8:
            segments[0, 7:], positions[0, 7:] = 2, np.arange(length - 7)
            if microbatch:
                targets[-1, 3:] = IGNORE
        samples = np.arange(batch_size, dtype=np.uint32) + microbatch * batch_size
        result.append(Batch(ids, targets, positions, segments, samples))
    return result


def train(session: Any, model: ModelConfig, batch_size: int, length: int, steps: int = STEPS) -> list[StepResult]:
    for step in range(1, steps + 1):
        parts = batches(model, batch_size, length, step)
        session.begin(StepInfo(step, sum(part.target_tokens for part in parts), 2, z_loss=1e-4))
        for part in parts:
            session.accumulate(part)
        session.apply()
    results: list[StepResult] = session.poll_metrics(wait=True)
    return results


@pytest.fixture(scope="module")
def open_session(device: Any) -> Callable[..., Any]:
    from hybrid.backends.webgpu.session import WebGPUSession

    def make(
        model: ModelConfig, batch_size: int, length: int, limits: dict[str, int] | None = None, **more: Any
    ) -> Any:
        """`limits`: what the plan may use of what the device grants."""
        opened = replace(device, limits={**device.limits, **(limits or {})})
        return WebGPUSession(
            model, batch_size=batch_size, sequence_length=length, device=opened, variants={}, **{**SETTINGS, **more}
        )

    return make


@pytest.mark.parametrize("name", SHAPES)
def test_ten_steps_follow_the_reference(open_session: Callable[..., Any], name: str) -> None:
    model, batch_size, length = SHAPES[name]
    session = open_session(model, batch_size, length)
    reference = ReferenceSession(model, batch_size=batch_size, sequence_length=length, **SETTINGS)
    ours = train(session, model, batch_size, length)
    theirs = train(reference, model, batch_size, length)
    assert len(ours) == STEPS
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.loss == pytest.approx(other.loss, rel=1e-6)
        assert mine.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
    assert ours[0].loss != ours[-1].loss
    (held_out, _) = batches(model, batch_size, length, 99)
    assert session.evaluate(held_out).loss_sum == pytest.approx(reference.evaluate(held_out).loss_sum, rel=1e-5)
    reference.import_state(session.export_state())
    options = GenerateOptions(tokens=6, temperature=0.0)
    assert list(session.generate([1, 2, 3], options)) == list(reference.generate([1, 2, 3], options))
    session.close()


# Tables beyond one binding

# With these, 331 rows of 192 numbers need two bindings and 256 rows of logits two chunks, as a vocabulary of 50,257
# does under the limits that WebGPU grants. One page still holds the whole table.
SMALL = {"maxStorageBufferBindingSize": 192 * 1024, "maxBufferSize": 256 * 1024}
WIDE = replace(
    GPT2, vocabulary_size=331, context_length=64, width=192, heads=4, kv_heads=4, head_width=48, feed_forward_width=128
)
SLICED = {
    "tied": WIDE,
    "untied": replace(WIDE, tied_embeddings=False, norm="rms_norm", positions="rope", activation="swiglu", bias=False),
}


@pytest.mark.parametrize("precision", ["f32", "mixed-f16"], indirect=True)
@pytest.mark.parametrize("name", SLICED)
def test_a_vocabulary_in_slices_trains_like_a_whole_one(
    open_session: Callable[..., Any], name: str, precision: str
) -> None:
    model, tolerance = SLICED[name], 1e-6 if precision == "f32" else 1e-3
    sliced = open_session(model, 4, 64, SMALL, precision=precision)
    whole = open_session(model, 4, 64, precision=precision)
    for session, cut in ((sliced, True), (whole, False)):
        table = session.plan.tensors["model.embed_tokens.weight"].bytes
        assert (table > session.device.limits["maxStorageBufferBindingSize"]) is cut
        assert (len(session.plan.arenas["params"]) > 1) is cut
        heads = [d for d in session.plan.dispatches("forward_backward") if d.label.endswith("cross_entropy")]
        assert (len(heads) > 1) is cut
        largest = max(b.size for p in session.plan.programs for d in session.plan.dispatches(p) for b in d.bindings)
        assert largest <= session.device.limits["maxStorageBufferBindingSize"]
    ours, theirs = train(sliced, model, 4, 64), train(whole, model, 4, 64)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.loss == pytest.approx(other.loss, rel=tolerance)
        assert mine.grad_norm == pytest.approx(other.grad_norm, rel=10 * tolerance)
    (held_out, _) = batches(model, 4, 64, 99)
    assert sliced.evaluate(held_out).loss_sum == pytest.approx(whole.evaluate(held_out).loss_sum, rel=tolerance)
    # A state crosses between the two layouts, and what is read back is what was written.
    state = sliced.export_state()
    whole.import_state(state)
    again = whole.export_state()
    assert all(np.array_equal(state.model[n], again.model[n]) for n in state.model)
    assert all(np.array_equal(state.optimizer[n], again.optimizer[n]) for n in state.optimizer)
    options = GenerateOptions(tokens=8, temperature=0.0)
    assert list(sliced.generate([1, 2, 330], options)) == list(whole.generate([1, 2, 330], options))
    sliced.close()
    whole.close()


def test_ids_and_targets_in_the_last_slice_are_learnt(open_session: Callable[..., Any]) -> None:
    """A slice that is bound but never written would leave its rows as they were."""
    model = replace(SLICED["untied"], dropout=0.0)
    session = open_session(model, 4, 64, SMALL)
    before = session.export_state().model
    ids = np.random.default_rng(0).integers(300, 331, (4, 64), dtype=np.uint32)
    positions = np.tile(np.arange(64, dtype=np.uint32), (4, 1))
    batch = Batch(ids, ids, positions, np.ones((4, 64), np.uint32), np.arange(4, dtype=np.uint32))
    for step in range(1, 31):
        session.begin(StepInfo(step, batch.target_tokens, 1))
        session.accumulate(batch)
        session.apply()
    results = session.poll_metrics(wait=True)
    assert results[-1].loss < 0.7 * results[0].loss
    after = session.export_state().model
    for table in ("model.embed_tokens.weight", "lm_head.weight"):
        moved = np.abs(after[table] - before[table]).max(axis=1)
        assert moved[300:].min() > 0.01
    assert np.abs(after["lm_head.weight"] - before["lm_head.weight"])[:300].min(axis=1).max() > 0
    session.close()
