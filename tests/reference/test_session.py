"""A training session: the numbers of the torch oracle, exact normalisation, skipped steps, exact resume."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backends.sessions import ADAMW, SEED, assert_states_equal, parts, step, steps_of
from backends.sessions import reference as session
from hybrid.backends.protocol import GenerateOptions, StepInfo
from hybrid.backends.reference.session import FLOAT32_MAX
from hybrid.data.batch import IGNORE
from hybrid.errors import CheckpointCorrupt, ConfigError, DataContractError
from hybrid.models.config import ModelConfig
from hybrid.models.initial_numpy import initial_values
from hybrid.optim.settings import OptimizerSettings
from hybrid.optim.table import rows
from models.small import GPT2, LLAMA, LOOPED, MODELS, Array, logits, make_batch, random_batch


@pytest.mark.torch
@pytest.mark.parametrize(("precision", "tolerance"), [("f64", 1e-7), ("f32", 1e-6)])
@pytest.mark.parametrize("cfg", [LLAMA, GPT2, LOOPED], ids=["llama", "gpt2", "looped"])
def test_ten_steps_equal_the_torch_oracle(cfg: ModelConfig, precision: str, tolerance: float) -> None:
    """Dropout, packing, accumulation, z-loss, clipping, warm-up and weight decay, all on."""
    import torch

    from oracles import torch_decoder as oracle

    torch.set_num_threads(1)  # these matrices are too small to share out
    cfg = replace(cfg, dropout=0.1)
    schedule = {"enabled": True, "type": "cosine", "warmupSteps": 3, "totalSteps": 7}
    optimizer = OptimizerSettings.from_dict({**ADAMW.to_dict(), "scheduler": schedule})
    steps = steps_of(cfg, 10)
    it = session(cfg, precision=precision, optimizer=optimizer)
    results = [step(it, s, *batches, z_loss=1e-3) for s, batches in enumerate(steps, 1)]
    trace = oracle.train(
        cfg.to_dict(),
        initial_values(cfg, SEED),
        steps,
        oracle.Settings(
            lr=[row[2] for row in rows(optimizer, 1, 10)],
            beta2=0.95,
            weight_decay=0.1,
            max_norm=1.0,
            z_loss=1e-3,
            seed=SEED,
            dtype=torch.float64,
        ),
    )
    assert any(r.clip_factor < 1.0 for r in results)
    np.testing.assert_allclose([r.loss for r in results], trace.losses, rtol=tolerance)
    np.testing.assert_allclose([r.nll for r in results], trace.nlls, rtol=tolerance)
    np.testing.assert_allclose([r.grad_norm for r in results], trace.grad_norms, rtol=1e-5)
    np.testing.assert_allclose([r.clip_factor for r in results], trace.clip_factors, rtol=1e-5)
    weights, start = it.export_state().model, initial_values(cfg, SEED)
    for name, expected in trace.updates.items():
        update = weights[name].astype(np.float64) - start[name]
        cosine = np.vdot(update, expected) / (np.linalg.norm(update) * np.linalg.norm(expected))
        if not (name.endswith("k_proj.bias") and cfg.positions == "learned"):  # its gradient is exactly zero
            assert 1 - cosine < 1e-6, name


@pytest.mark.parametrize("size", [4, 2, 1])
def test_any_split_of_the_batch_gives_the_same_loss_and_gradient(size: int) -> None:
    """Eight rows as 8x1, 4x2 and 1x8, with unequal numbers of targets, one row without any; dropout on."""
    cfg = replace(LLAMA, dropout=0.1)
    batch = random_batch(cfg, b=8)
    targets = batch.targets.copy()
    for row in range(8):
        targets[row, : 2 * row] = IGNORE
    batch = replace(batch, targets=targets)
    assert (batch.targets[7] == IGNORE).all()
    whole, split = session(cfg, b=8), session(cfg, b=size)
    info = StepInfo(1, batch.target_tokens, 1, 1e-3)
    whole.begin(info)
    whole.accumulate(batch)
    split.begin(replace(info, microbatches=8 // size))
    for part in parts(batch, size):
        split.accumulate(part)
    assert split.inspect().loss == pytest.approx(whole.inspect().loss, rel=1e-6)
    for name, expected in whole._gradients.items():
        error = np.linalg.norm(split._gradients[name] - expected) / np.linalg.norm(expected)
        assert error < 1e-6, name


def test_a_microbatch_without_targets_adds_nothing_and_a_step_without_any_is_refused() -> None:
    it = session()
    batch = random_batch(LLAMA)
    empty = replace(batch, targets=np.full_like(batch.targets, IGNORE))
    alone, padded = step(it, 1, batch), step(session(), 1, batch, empty)
    assert (alone.loss, alone.grad_norm) == (padded.loss, padded.grad_norm)
    with pytest.raises(DataContractError, match="step 2 has no target tokens"):
        it.begin(StepInfo(2, 0, 1))


def test_it_learns() -> None:
    batch = make_batch(np.tile(np.arange(16) % 5, (3, 1)))
    it = session()
    losses = [step(it, s, batch).loss for s in range(1, 61)]
    assert losses[0] == pytest.approx(np.log(LLAMA.vocabulary_size), rel=0.05)
    assert losses[-1] < 0.2
    assert list(it.generate([0, 1, 2], GenerateOptions(tokens=7, temperature=0.0))) == [3, 4, 0, 1, 2, 3, 4]


def test_norm_weights_move() -> None:
    it = session(precision="mixed-f16", loss_scaling={"enabled": True})
    step(it, 1, random_batch(LLAMA))
    assert all((w != 1.0).any() for name, w in it.export_state().model.items() if "norm" in name)


# --- scaling and skipping --------------------------------------------------------------------------------------------


def test_loss_scaling_changes_no_number_in_f32() -> None:
    cfg = replace(LLAMA, dropout=0.1)
    plain, scaled = session(cfg), session(cfg, loss_scaling={"enabled": True, "initialScale": 1024})
    for s, batches in enumerate(steps_of(cfg, 3), 1):
        a, b = step(plain, s, *batches), step(scaled, s, *batches)
        assert (a.loss, a.grad_norm, a.clip_factor) == (b.loss, b.grad_norm, b.clip_factor)
        assert (a.loss_scale, b.loss_scale) == (1.0, 1024.0)
    for name, weight in plain.export_state().model.items():
        np.testing.assert_array_equal(weight, scaled.export_state().model[name])


def test_an_overflowing_scale_skips_the_optimizer_backs_off_and_recovers() -> None:
    it = session(loss_scaling={"enabled": True, "initialScale": 2.0**127, "maxScale": 2.0**127, "growthInterval": 2})
    before = it.export_state()
    batch = random_batch(LLAMA)
    first = step(it, 1, batch)
    assert first.overflow
    assert not first.loss_overflow
    assert (first.grad_norm, first.clip_factor, first.optimizer_step) == (None, 1.0, 0)
    assert first.nan_count == first.inf_count == 0  # every element fits; the norm does not
    assert (first.loss_scale, first.loss_scale_after) == (2.0**127, 2.0**126)
    after = it.export_state()
    assert after.optimizer_step == 0
    for kept, original in ((after.model, before.model), (after.optimizer, before.optimizer)):
        for name, array in original.items():
            np.testing.assert_array_equal(kept[name], array)
    s, result = 1, first
    while result.overflow:
        s += 1
        result = step(it, s, batch)
        assert result.loss == first.loss  # nothing has moved
    assert result.optimizer_step == 1
    assert result.growth_counter == 1
    grown = step(it, s + 1, batch)
    assert (grown.loss_scale_after, grown.growth_counter) == (2 * grown.loss_scale, 0)


def test_elements_that_are_not_finite_are_counted() -> None:
    it = session(loss_scaling={"enabled": True, "initialScale": 2.0**127, "maxScale": 2.0**127})
    state = it.export_state()
    state.model["lm_head.weight"] *= np.float32(1e3)
    it.import_state(state)
    result = step(it, 1, random_batch(LLAMA))
    assert result.overflow
    assert not result.loss_overflow
    infinite = sum(np.count_nonzero(np.isinf(g)) for g in it._gradients.values())
    missing = sum(np.count_nonzero(np.isnan(g)) for g in it._gradients.values())
    assert (result.inf_count, result.nan_count) == (infinite, missing)
    assert infinite + missing > 0


def test_without_the_overflow_check_a_bad_step_is_skipped_but_the_scale_grows() -> None:
    scaling = {"initialScale": 2.0**120, "maxScale": 2.0**127, "growthInterval": 1, "overflowCheck": False}
    it = session(loss_scaling={"enabled": True, **scaling})
    result = step(it, 1, random_batch(LLAMA))
    assert result.overflow
    assert (result.loss_scale_after, result.optimizer_step) == (2.0**121, 0)


@pytest.mark.parametrize("scaling", [None, {"enabled": True}])
def test_a_loss_that_is_not_finite_is_reported_and_touches_no_weight(scaling: dict[str, Any] | None) -> None:
    it = session(loss_scaling=scaling)
    state = it.export_state()
    state.model["lm_head.weight"] *= np.float32(1e37)
    it.import_state(state)
    result = step(it, 1, random_batch(LLAMA))
    assert result.overflow
    assert result.loss_overflow
    assert (result.loss, result.grad_norm, result.optimizer_step) == (FLOAT32_MAX, None, 0)
    for name, array in it.export_state().model.items():
        np.testing.assert_array_equal(array, state.model[name])


def test_an_activation_beyond_f16_skips_the_step_in_mixed_precision_only() -> None:
    results = {}
    for precision in ("f32", "mixed-f16"):
        it = session(precision=precision, loss_scaling={"enabled": True})
        state = it.export_state()
        state.model["model.layers.0.mlp.up_proj.weight"] *= np.float32(3e5)
        state.model["model.layers.0.mlp.gate_proj.weight"] *= np.float32(1e4)
        it.import_state(state)
        results[precision] = step(it, 1, random_batch(LLAMA))
    assert not results["f32"].overflow
    assert results["mixed-f16"].overflow
    assert not results["mixed-f16"].loss_overflow


def test_mixed_precision_follows_f32() -> None:
    cfg = replace(LLAMA, dropout=0.1)
    full, mixed = session(cfg), session(cfg, precision="mixed-f16", loss_scaling={"enabled": True})
    for s, batches in enumerate(steps_of(cfg, 10), 1):
        a, b = step(full, s, *batches), step(mixed, s, *batches)
        assert not b.overflow
        assert b.loss == pytest.approx(a.loss, rel=1e-3 if s == 1 else 5e-3)
        assert b.loss != a.loss


# --- the protocol ----------------------------------------------------------------------------------------------------


def test_inspect_tells_what_apply_will_report_and_moves_nothing() -> None:
    it = session()
    batch = random_batch(LLAMA)
    it.begin(StepInfo(1, batch.target_tokens, 1))
    it.accumulate(batch)
    seen = it.inspect()
    assert it.inspect() == seen
    assert it.poll_metrics() == []
    it.apply()
    (result,) = it.poll_metrics(wait=True)
    timing = {"step_time_ms", "forward_ms", "backward_ms", "optimizer_ms", "timing_source"}
    assert all(getattr(result, f) == getattr(seen, f) for f in seen.__dataclass_fields__ if f not in timing)
    assert it.poll_metrics() == []


def test_times_are_positive_and_add_up() -> None:
    result = step(session(), 1, random_batch(LLAMA))
    assert result.timing_source == "device"
    assert None not in (result.forward_ms, result.backward_ms, result.optimizer_ms, result.step_time_ms)
    assert result.forward_ms > 0
    assert result.backward_ms > 0
    assert result.forward_ms + result.backward_ms + result.optimizer_ms <= result.step_time_ms


def test_calls_out_of_order_are_refused() -> None:
    it = session()
    batch = random_batch(LLAMA)
    with pytest.raises(RuntimeError, match="accumulate"):
        it.accumulate(batch)
    it.begin(StepInfo(1, batch.target_tokens, 1))
    with pytest.raises(RuntimeError, match="not all microbatches"):
        it.apply()
    with pytest.raises(RuntimeError, match="step 1 was not applied"):
        it.begin(StepInfo(2, 1, 1))
    it.accumulate(batch)
    with pytest.raises(RuntimeError, match="more microbatches"):
        it.accumulate(batch)
    with pytest.raises(RuntimeError, match="step 1 is under way"):
        it.export_state()
    with pytest.raises(ConfigError, match="precision 'f8'"):
        session(precision="f8")
    with pytest.raises(DataContractError, match=r"batch.ids is uint32 \[2, 16\]"):
        it.evaluate(random_batch(LLAMA, b=2))


def test_evaluation_is_sum_over_sum_without_dropout_and_does_not_disturb_training() -> None:
    cfg = replace(LLAMA, dropout=0.3)
    quiet, watched = session(cfg), session(cfg)
    held_out = random_batch(cfg, seed=99)
    for s, batches in enumerate(steps_of(cfg, 3), 1):
        a = step(quiet, s, *batches)
        watched.evaluate(held_out)
        b = step(watched, s, *batches)
        assert a.loss == b.loss
    result = watched.evaluate(held_out)
    assert result == quiet.evaluate(held_out)
    assert result.target_tokens == held_out.target_tokens
    weights = {name: w.astype(np.float64) for name, w in watched.export_state().model.items()}
    scores = logits(cfg, weights, held_out)
    shifted = scores - scores.max(-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    b, t = np.nonzero(held_out.targets != IGNORE)
    expected = -log_probabilities[b, t, held_out.targets[b, t]].sum()
    assert result.loss_sum == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("precision", ["f32", "mixed-f16"])
def test_ten_steps_equal_five_and_five_bit_for_bit(precision: str) -> None:
    cfg = replace(LLAMA, dropout=0.1)
    steps = steps_of(cfg, 10)
    settings: dict[str, Any] = {"precision": precision, "loss_scaling": {"enabled": True, "growthInterval": 3}}
    whole = session(cfg, **settings)
    expected = [step(whole, s, *batches).loss for s, batches in enumerate(steps, 1)]
    first = session(cfg, **settings)
    losses = [step(first, s, *batches).loss for s, batches in enumerate(steps[:5], 1)]
    state = first.export_state()
    second = session(cfg, **settings)
    second.import_state(state)
    losses += [step(second, s, *batches).loss for s, batches in enumerate(steps[5:], 6)]
    assert losses == expected
    assert_states_equal(second.export_state(), whole.export_state())


def test_what_was_exported_does_not_change_and_importing_copies() -> None:
    it = session()
    batch = random_batch(LLAMA)
    state = it.export_state()
    kept = {name: array.copy() for name, array in state.model.items()}
    it.import_state(state)
    step(it, 1, batch)
    for name, array in state.model.items():
        np.testing.assert_array_equal(array, kept[name])


def test_a_state_that_does_not_fit_is_refused_and_nothing_changes() -> None:
    it = session()
    step(it, 1, random_batch(LLAMA))
    good = it.export_state()
    other = session(replace(LLAMA, width=40)).export_state()
    with pytest.raises(CheckpointCorrupt, match=r"'model\.embed_tokens\.weight' is float32"):
        it.import_state(other)
    with pytest.raises(CheckpointCorrupt, match="scale is -1"):
        it.import_state(replace(good, scaler={"scale": -1, "growthCounter": 0}))
    assert_states_equal(it.export_state(), good)


def test_it_describes_itself() -> None:
    it = session(precision="mixed-f16")
    description = it.describe()
    assert description["backend"] == "reference"
    assert description["precision"] == "mixed-f16"
    memory = it.memory()
    assert memory["total"] == sum(size for name, size in memory.items() if name != "total")
    assert all(memory[name] > 0 for name in ("params", "grads", "moment1", "moment2", "activations"))
    step(it, 1, random_batch(LLAMA))
    assert it.counters() == {"submits": 1, "readbacks": 0, "buffers_created": 0, "pipelines_created": 0}
    it.close()


# --- generation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cfg", MODELS.values(), ids=MODELS)
def test_greedy_generation_follows_the_logits_of_the_whole_sequence(cfg: ModelConfig) -> None:
    it = session(cfg, precision="f64")
    weights: dict[str, Array] = {name: w.astype(np.float64) for name, w in it.export_state().model.items()}
    text = [5, 3]
    for token in it.generate(text, GenerateOptions(tokens=12, temperature=0.0)):
        assert token == int(np.argmax(logits(cfg, weights, make_batch(np.array([text])))[0, -1]))
        text = [*text, token]
    assert len(text) == 14


def test_generation_goes_on_when_the_context_is_full_and_repeats_for_a_seed() -> None:
    it = session()
    options = GenerateOptions(tokens=3 * LLAMA.context_length, temperature=1.0, seed=5)
    first = list(it.generate([1, 2, 3], options))
    assert len(first) == 3 * LLAMA.context_length
    assert first == list(it.generate([1, 2, 3], options))
    assert first != list(it.generate([1, 2, 3], replace(options, seed=6)))
    long_prompt = [i % 61 for i in range(100)]
    assert list(it.generate(long_prompt, options)) == list(it.generate(long_prompt[-LLAMA.context_length :], options))
