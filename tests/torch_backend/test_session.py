"""The torch session against the reference session, and against itself."""

from __future__ import annotations

import platform
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from backends.sessions import ADAMW, SEED, assert_states_equal, parts, reference, step, steps_of
from hybrid.backends.protocol import GenerateOptions, StepInfo
from hybrid.backends.torch import update
from hybrid.data.batch import IGNORE
from hybrid.errors import CheckpointCorrupt, ConfigError, DataContractError
from hybrid.models import decoder
from hybrid.models.config import ModelConfig
from hybrid.models.initial_numpy import initial_values
from hybrid.optim.groups import parameter_groups
from hybrid.optim.settings import OptimizerSettings
from hybrid.plan.kernels.base import PRECISIONS as PLAN_PRECISIONS
from models.small import GPT2, LLAMA, LOOPED, MODELS, Array, logits, make_batch, random_batch
from torch_backend.sessions import session

pytestmark = pytest.mark.torch

FLOAT32_MAX = float(np.finfo(np.float32).max)


@pytest.mark.parametrize("cfg", [LLAMA, GPT2, LOOPED], ids=["llama", "gpt2", "looped"])
def test_ten_steps_equal_the_reference(cfg: ModelConfig) -> None:
    """Dropout, packing, accumulation, z-loss, clipping, warm-up and weight decay, all on."""
    cfg = replace(cfg, dropout=0.1)
    schedule = {"enabled": True, "type": "cosine", "warmupSteps": 3, "totalSteps": 7}
    optimizer = OptimizerSettings.from_dict({**ADAMW.to_dict(), "scheduler": schedule})
    ours, theirs = session(cfg, optimizer=optimizer), reference(cfg, optimizer=optimizer)
    for s, batches in enumerate(steps_of(cfg, 10), 1):
        a, b = (step(it, s, *batches, z_loss=1e-3) for it in (ours, theirs))
        assert (a.loss, a.nll) == pytest.approx((b.loss, b.nll), rel=1e-6)
        assert (a.grad_norm, a.clip_factor) == pytest.approx((b.grad_norm, b.clip_factor), rel=1e-5)
        assert a.optimizer_step == b.optimizer_step == s
    for name, weight in ours.export_state().model.items():
        start = initial_values(cfg, SEED)[name].astype(np.float64)
        u, v = (w.astype(np.float64) - start for w in (weight, theirs.export_state().model[name]))
        if not (name.endswith("k_proj.bias") and cfg.positions == "learned"):  # its gradient is exactly zero
            assert 1 - np.vdot(u, v) / (np.linalg.norm(u) * np.linalg.norm(v)) < 1e-6, name


def test_initial_weights_are_those_of_the_seed_bit_for_bit() -> None:
    state = session().export_state()
    for name, expected in initial_values(LLAMA, SEED).items():
        np.testing.assert_array_equal(state.model[name], expected)
    assert not any(moment.any() for moment in state.optimizer.values())


@pytest.mark.parametrize("size", [4, 2, 1])
def test_any_split_of_the_batch_gives_the_same_loss_and_gradient(size: int) -> None:
    """Eight rows as 8x1, 4x2 and 1x8, with unequal numbers of targets, one row without any; dropout on."""
    cfg = replace(LLAMA, dropout=0.1)
    batch = random_batch(cfg, b=8)
    targets = batch.targets.copy()
    for row in range(8):
        targets[row, : 2 * row] = IGNORE
    batch = replace(batch, targets=targets)
    whole, split = session(cfg, b=8), session(cfg, b=size)
    info = StepInfo(1, batch.target_tokens, 1, 1e-3)
    whole.begin(info)
    whole.accumulate(batch)
    split.begin(replace(info, microbatches=8 // size))
    for part in parts(batch, size):
        split.accumulate(part)
    assert split.inspect().loss == pytest.approx(whole.inspect().loss, rel=1e-6)
    for name, expected in gradients(whole).items():
        error = np.linalg.norm(gradients(split)[name] - expected) / np.linalg.norm(expected)
        assert error < 1e-6, name


def gradients(it: Any) -> dict[str, Array]:
    return {name: weight.grad.numpy() for name, weight in it._root.weights().items()}


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


@pytest.mark.parametrize("precision", ["mixed-f16", "mixed-bf16"])
def test_masters_are_f32_and_norm_weights_move(precision: str) -> None:
    it = session(precision=precision, loss_scaling={"enabled": precision == "mixed-f16"})
    step(it, 1, random_batch(LLAMA))
    state = it.export_state()
    assert all((w != 1.0).any() for name, w in state.model.items() if "norm" in name)
    assert all(a.dtype == np.float32 for arrays in (state.model, state.optimizer) for a in arrays.values())


def test_groups_are_those_of_the_project_by_name() -> None:
    it = session(GPT2)
    names = {id(weight): name for name, weight in it._root.weights().items()}
    found = [([names[id(p)] for p in g["params"]], g["weight_decay"]) for g in it._updater.optimizer.param_groups]
    from hybrid.models.parameters import parameter_specs

    decay, no_decay = parameter_groups(parameter_specs(GPT2))
    assert found == [(list(decay.names), 0.1), (list(no_decay.names), 0.0)]


def test_the_table_of_learning_rates_is_refilled_where_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a schedule that differs at every step, and steps that are skipped on the way."""
    schedule = {"enabled": True, "type": "wsd", "warmupSteps": 5, "totalSteps": 20, "decayShare": 0.5}
    optimizer = OptimizerSettings.from_dict({**ADAMW.to_dict(), "scheduler": schedule})
    batch = random_batch(LLAMA)
    states = []
    for rows in (256, 3):
        monkeypatch.setattr(update, "TABLE_ROWS", rows)
        it = session(optimizer=optimizer)
        for s in range(1, 12):
            step(it, s, batch, z_loss=1e38 if s in (4, 5) else 0.0)
        assert it.export_state().optimizer_step == 9
        states.append(it.export_state())
    assert_states_equal(*states)


# --- scaling and skipping -----------------------------------------------------------------------------------------


def test_loss_scaling_changes_no_number_in_f32() -> None:
    cfg = replace(LLAMA, dropout=0.1)
    plain, scaled = session(cfg), session(cfg, loss_scaling={"enabled": True, "initialScale": 1024})
    for s, batches in enumerate(steps_of(cfg, 3), 1):
        a, b = step(plain, s, *batches), step(scaled, s, *batches)
        assert (a.loss, a.grad_norm, a.clip_factor) == (b.loss, b.grad_norm, b.clip_factor)
        assert (a.loss_scale, b.loss_scale) == (1.0, 1024.0)
    for name, weight in plain.export_state().model.items():
        np.testing.assert_array_equal(weight, scaled.export_state().model[name])


def test_the_scaler_on_the_device_follows_that_of_the_contract() -> None:
    """Overflow, backing off to where it fits, growth: field by field what the reference reports."""
    scaling = {"enabled": True, "initialScale": 2.0**68, "maxScale": 2.0**127, "growthInterval": 2}
    ours, theirs = session(loss_scaling=scaling), reference(loss_scaling=scaling)
    batch = random_batch(LLAMA)
    fields = ("overflow", "loss_overflow", "loss_scale", "loss_scale_after", "growth_counter", "optimizer_step")
    skipped = 0
    for s in range(1, 12):
        before = ours.export_state()
        a, b = step(ours, s, batch), step(theirs, s, batch)
        assert [getattr(a, f) for f in fields] == [getattr(b, f) for f in fields]
        if a.overflow:
            skipped += 1
            assert (a.grad_norm, a.clip_factor) == (None, 1.0)
            after = ours.export_state()
            assert_states_equal(replace(after, scaler={}), replace(before, scaler={}))
    assert 0 < skipped < 11
    assert ours.export_state().scaler == theirs.export_state().scaler


def test_elements_that_are_not_finite_are_counted() -> None:
    it = session(loss_scaling={"enabled": True, "initialScale": 2.0**127, "maxScale": 2.0**127})
    state = it.export_state()
    state.model["lm_head.weight"] *= np.float32(1e3)
    it.import_state(state)
    batch = random_batch(LLAMA)
    it.begin(StepInfo(1, batch.target_tokens, 1))
    it.accumulate(batch)
    result = it.inspect()
    assert result.overflow and not result.loss_overflow
    infinite = sum(np.count_nonzero(np.isinf(g)) for g in gradients(it).values())
    missing = sum(np.count_nonzero(np.isnan(g)) for g in gradients(it).values())
    assert (result.inf_count, result.nan_count) == (infinite, missing)
    assert infinite + missing > 0


def test_without_the_overflow_check_a_bad_step_is_skipped_but_the_scale_grows() -> None:
    scaling = {"initialScale": 2.0**120, "maxScale": 2.0**127, "growthInterval": 1, "overflowCheck": False}
    it = session(loss_scaling={"enabled": True, **scaling})
    result = step(it, 1, random_batch(LLAMA))
    assert result.overflow
    assert (result.loss_scale_after, result.optimizer_step) == (2.0**121, 0)


@pytest.mark.parametrize("scaling", [None, {"enabled": True}], ids=["unscaled", "scaled"])
def test_a_loss_that_is_not_finite_is_reported_and_touches_no_weight(scaling: dict[str, Any] | None) -> None:
    it = session(loss_scaling=scaling)
    state = it.export_state()
    state.model["lm_head.weight"] *= np.float32(1e37)
    it.import_state(state)
    result = step(it, 1, random_batch(LLAMA))
    assert result.overflow and result.loss_overflow
    assert (result.loss, result.grad_norm, result.optimizer_step) == (FLOAT32_MAX, None, 0)
    for name, array in it.export_state().model.items():
        np.testing.assert_array_equal(array, state.model[name])


def test_an_activation_beyond_f16_skips_the_step_in_f16_only() -> None:
    results = {}
    for precision in ("f32", "mixed-f16", "mixed-bf16"):
        it = session(precision=precision, loss_scaling={"enabled": True})
        state = it.export_state()
        state.model["model.layers.0.mlp.up_proj.weight"] *= np.float32(3e5)
        state.model["model.layers.0.mlp.gate_proj.weight"] *= np.float32(1e4)
        it.import_state(state)
        results[precision] = step(it, 1, random_batch(LLAMA)).overflow
    assert results == {"f32": False, "mixed-f16": True, "mixed-bf16": False}


@pytest.mark.parametrize("precision", ["mixed-f16", "mixed-bf16"])
def test_mixed_precision_follows_f32(precision: str) -> None:
    cfg = replace(LLAMA, dropout=0.1)
    full, mixed = session(cfg), session(cfg, precision=precision, loss_scaling={"enabled": precision == "mixed-f16"})
    for s, batches in enumerate(steps_of(cfg, 10), 1):
        a, b = step(full, s, *batches), step(mixed, s, *batches)
        assert not b.overflow
        assert b.loss == pytest.approx(a.loss, rel=1e-3 if s == 1 else 5e-3)
        assert b.loss != a.loss


@pytest.mark.parametrize("recompute", [True, "selective"])
def test_recomputing_changes_no_bit_and_keeps_less(recompute: bool | str) -> None:
    cfg = replace(LOOPED, dropout=0.1)
    kept, again = session(cfg), session(cfg, recompute=recompute)
    for s, batches in enumerate(steps_of(cfg, 2), 1):
        assert step(kept, s, *batches).loss == step(again, s, *batches).loss
    assert_states_equal(kept.export_state(), again.export_state())


def test_selective_recomputing_repeats_no_product() -> None:
    products: dict[bool | str, int] = {}
    for recompute in (False, True, "selective"):
        it, batch = session(recompute=recompute), random_batch(LLAMA)
        with Counting() as counting:
            step(it, 1, batch)
        products[recompute] = counting.products
    assert products["selective"] == products[False] < products[True]


class Counting(TorchDispatchMode):
    """Counts the products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, op: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.products += op in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
        return op(*arguments, **(options or {}))


# --- the protocol -------------------------------------------------------------------------------------------------


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
    assert min(result.forward_ms, result.backward_ms, result.optimizer_ms) > 0  # type: ignore[type-var]
    assert result.forward_ms + result.backward_ms + result.optimizer_ms <= result.step_time_ms  # type: ignore[operator]


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
    with pytest.raises(DataContractError, match=r"batch.ids is uint32 \[2, 16\]"):
        it.evaluate(random_batch(LLAMA, b=2))


def test_settings_that_are_not_known_are_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="mixed-bf16"):
        session(precision="mixed-bf1")
    with pytest.raises(ConfigError, match=r"numeric policy.*exact"):
        session(numerics="exakt")
    from hybrid.backends.torch.numerics import choose_device

    with pytest.raises(ConfigError, match=r"torch device.*cuda"):
        choose_device("cud")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="finds no CUDA device"):
            choose_device("cuda")
        assert choose_device("auto") == torch.device("cpu")


def test_evaluation_is_sum_over_sum_without_dropout_and_does_not_disturb_training() -> None:
    cfg = replace(LLAMA, dropout=0.3)
    quiet, watched = session(cfg), session(cfg)
    held_out = random_batch(cfg, seed=99)
    for s, batches in enumerate(steps_of(cfg, 3), 1):
        a = step(quiet, s, *batches)
        watched.begin(StepInfo(s, sum(b.target_tokens for b in batches), len(batches)))
        watched.accumulate(batches[0])
        watched.evaluate(held_out)  # even in the middle of a step
        watched.accumulate(batches[1])
        watched.apply()
        assert a.loss == watched.poll_metrics(wait=True)[-1].loss
    assert_states_equal(quiet.export_state(), watched.export_state())
    result, untrained = watched.evaluate(held_out), reference(cfg)
    untrained.import_state(watched.export_state())
    expected = untrained.evaluate(held_out)
    assert result.loss_sum == pytest.approx(expected.loss_sum, rel=1e-6)
    assert result.target_tokens == expected.target_tokens == held_out.target_tokens


@pytest.mark.parametrize("precision", ["f32", "mixed-f16", "mixed-bf16"])
def test_ten_steps_equal_five_and_five_bit_for_bit(precision: str) -> None:
    cfg = replace(LLAMA, dropout=0.1)
    steps = steps_of(cfg, 10)
    settings: dict[str, Any] = {"precision": precision, "loss_scaling": {"enabled": True, "growthInterval": 3}}
    whole = session(cfg, **settings)
    expected = [step(whole, s, *batches).loss for s, batches in enumerate(steps, 1)]
    first = session(cfg, **settings)
    losses = [step(first, s, *batches).loss for s, batches in enumerate(steps[:5], 1)]
    second = session(cfg, **settings)
    second.import_state(first.export_state())
    losses += [step(second, s, *batches).loss for s, batches in enumerate(steps[5:], 6)]
    assert losses == expected
    assert_states_equal(second.export_state(), whole.export_state())


def test_what_was_exported_does_not_change_and_importing_copies() -> None:
    it = session()
    state = it.export_state()
    kept = {name: array.copy() for name, array in state.model.items()}
    it.import_state(state)
    step(it, 1, random_batch(LLAMA))
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
    it = session(precision="mixed-bf16")
    description = it.describe()
    assert (description["backend"], description["device"], description["precision"]) == ("torch", "cpu", "mixed-bf16")
    assert description["numerics"] == {
        "name": "exact", "tf32": False, "reducedPrecisionSums": False, "deterministic": True,
    }  # fmt: skip
    memory = it.memory()
    assert memory["total"] == sum(size for name, size in memory.items() if name != "total")
    assert all(memory[name] > 0 for name in ("params", "grads", "moment1", "moment2", "activations"))
    step(it, 1, random_batch(LLAMA))
    assert it.counters() == {"submits": 1, "readbacks": 1, "buffers_created": 0, "pipelines_created": 0}
    it.close()
    assert "mixed-bf16" not in PLAN_PRECISIONS


def test_memory_that_cannot_be_had_is_a_limit_with_a_remedy() -> None:
    from hybrid.backends.torch.session import _limits
    from hybrid.errors import LimitExceeded

    remedy = r"no memory left for activations: .*; use a smaller data\.microbatchSize"
    with pytest.raises(LimitExceeded, match=remedy), _limits("activations"):
        torch.empty(2**50)
    with pytest.raises(RuntimeError, match="something else"), _limits("activations"):
        raise RuntimeError("something else")


# --- generation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cfg", MODELS.values(), ids=MODELS)
def test_greedy_generation_follows_the_logits_of_the_whole_sequence(cfg: ModelConfig) -> None:
    it = session(cfg, training=False)
    weights: dict[str, Array] = {name: w.astype(np.float64) for name, w in it.export_state().model.items()}
    text = [5, 3]
    for token in it.generate(text, GenerateOptions(tokens=12, temperature=0.0)):
        assert token == int(np.argmax(logits(cfg, weights, make_batch(np.array([text])))[0, -1]))
        text = [*text, token]
    assert len(text) == 14


def test_n_grams_are_written_with_as_they_are_read_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token after the other, each of them is what it is after all before it at once."""

    def embed(ops: Any, p: Any, inputs: Any, cfg: ModelConfig) -> Any:
        grams = ops.hashed_ngram_embedding(inputs.ids, inputs.segment_ids, p.tokens, order=3, seed=5)
        return ops.add(ops.embedding(inputs.ids, p.tokens), grams)

    monkeypatch.setattr(decoder, "embed", embed)
    it, ids = session(training=False), [3, 1, 2]
    written = list(it.generate(ids, GenerateOptions(tokens=6, temperature=0.0)))
    assert written == list(reference().generate(ids, GenerateOptions(tokens=6, temperature=0.0)))
    for token in written:
        assert list(it.generate(ids, GenerateOptions(tokens=1, temperature=0.0))) == [token]
        ids = [*ids, token]


def test_generation_goes_on_when_the_context_is_full_and_repeats_for_a_seed() -> None:
    it = session(training=False)
    options = GenerateOptions(tokens=3 * LLAMA.context_length, temperature=1.0, seed=5)
    first = list(it.generate([1, 2, 3], options))
    assert len(first) == 3 * LLAMA.context_length
    assert first == list(it.generate([1, 2, 3], options))
    assert first == list(reference().generate([1, 2, 3], options))
    assert first != list(it.generate([1, 2, 3], replace(options, seed=6)))


def test_memory_that_a_step_lets_go_of_stays_with_the_process_where_glibc_is_asked() -> None:
    from hybrid.backends.torch.host_memory import keep_freed_memory

    assert keep_freed_memory() is (platform.libc_ver()[0] == "glibc")
