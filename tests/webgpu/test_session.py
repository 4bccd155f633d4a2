"""The WebGPU session against the reference session, and against itself."""

from dataclasses import replace

import numpy as np
import pytest

from hybrid.backends.protocol import GenerateOptions, StepInfo
from hybrid.backends.reference.session import ReferenceSession
from hybrid.data.batch import IGNORE, Batch
from hybrid.errors import CheckpointCorrupt, DataContractError
from hybrid.models.config import ModelConfig
from hybrid.optim.settings import OptimizerSettings

pytestmark = pytest.mark.webgpu

LLAMA = ModelConfig(
    vocabulary_size=64, context_length=32, layers=2, width=32, heads=4, kv_heads=2, feed_forward_width=48, dropout=0.1
)
GPT2 = ModelConfig(
    vocabulary_size=65,
    context_length=32,
    layers=2,
    width=32,
    heads=4,
    feed_forward_width=128,
    norm="layer_norm",
    positions="learned",
    activation="gelu",
    bias=True,
    tied_embeddings=True,
    dropout=0.1,
)
LOOPED = replace(LLAMA, schedule=(0, 1, 1, 0), window=7)
MODELS = {"llama": LLAMA, "gpt2": GPT2, "looped": LOOPED}
SETTINGS = {
    "batch_size": 2,
    "sequence_length": 32,
    "optimizer": OptimizerSettings(lr=1e-3, weight_decay=0.1),
    "max_grad_norm": 1.0,
    "seed": 7,
}
SCALING = {"enabled": True, "initialScale": 1024}


def batches(model: ModelConfig, step: int, microbatches: int = 2) -> list[Batch]:
    """Packed segments, and fewer targets in the second microbatch."""
    rng = np.random.default_rng(step)
    result = []
    for m in range(microbatches):
        ids = rng.integers(0, model.vocabulary_size, (2, 32), dtype=np.uint32)
        targets = rng.integers(0, model.vocabulary_size, (2, 32), dtype=np.uint32)
        segments = np.ones((2, 32), np.uint32)
        positions = np.tile(np.arange(32, dtype=np.uint32), (2, 1))
        segments[0, 20:], positions[0, 20:] = 2, np.arange(12)
        if m:
            targets[1, 5:] = IGNORE
        result.append(Batch(ids, targets, positions, segments, np.arange(2 * m, 2 * m + 2, dtype=np.uint32)))
    return result


def take(session, model: ModelConfig, first: int, last: int) -> list:
    for step in range(first, last + 1):
        step_batches = batches(model, step)
        session.begin(StepInfo(step, sum(b.target_tokens for b in step_batches), len(step_batches), z_loss=1e-4))
        for batch in step_batches:
            session.accumulate(batch)
        session.apply()
    return session.poll_metrics(wait=True)


@pytest.fixture(scope="module")
def webgpu_session(device):
    from hybrid.backends.webgpu.session import WebGPUSession

    def make(model: ModelConfig, **changes):
        return WebGPUSession(model, **{**SETTINGS, "device": device, **changes})

    return make


def same_state(a, b) -> bool:
    return (
        a.optimizer_step == b.optimizer_step
        and a.scaler == b.scaler
        and all(np.array_equal(a.model[n], b.model[n]) for n in a.model)
        and all(np.array_equal(a.optimizer[n], b.optimizer[n]) for n in a.optimizer)
    )


@pytest.mark.parametrize("name", MODELS)
def test_ten_steps_give_the_losses_norms_and_weights_of_the_reference(webgpu_session, name):
    model = MODELS[name]
    ours, theirs = webgpu_session(model), ReferenceSession(model, **SETTINGS)
    before = ours.export_state()
    assert all(np.array_equal(before.model[n], a) for n, a in theirs.export_state().model.items())
    mine, reference = take(ours, model, 1, 10), take(theirs, model, 1, 10)
    for a, b in zip(mine, reference, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-6)
        assert a.nll == pytest.approx(b.nll, rel=1e-6)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)
        assert (a.data_step, a.target_tokens, a.optimizer_step, a.overflow) == (
            b.data_step,
            b.target_tokens,
            b.optimizer_step,
            b.overflow,
        )
    after, expected = ours.export_state(), theirs.export_state()
    for n in before.model:
        if n.endswith("k_proj.bias"):
            continue  # softmax does not see a constant added to every key: the gradient is zero but for rounding
        update, other = (after.model[n] - before.model[n]).ravel(), (expected.model[n] - before.model[n]).ravel()
        cosine = update @ other / (np.linalg.norm(update) * np.linalg.norm(other))
        assert 1 - cosine <= 1e-6, n
    ours.close()


@pytest.mark.parametrize("precision", ["f32", "mixed-f16"])
def test_twenty_steps_are_ten_and_ten_are_five_five_and_ten_bit_for_bit(webgpu_session, device, precision):
    if precision == "mixed-f16" and not device.has_f16:
        pytest.skip("this adapter has no shader-f16")
    options = {"precision": precision, "loss_scaling": SCALING if precision == "mixed-f16" else None}

    def run(*lengths: int):
        state, step = None, 0
        for length in lengths:
            session = webgpu_session(LLAMA, **options)
            if state is not None:
                session.import_state(state)
            take(session, LLAMA, step + 1, step + length)
            state, step = session.export_state(), step + length
            session.close()
        return state

    straight = run(20)
    assert same_state(straight, run(20))
    assert same_state(straight, run(10, 10))
    assert same_state(straight, run(5, 5, 10))


def test_mixed_precision_follows_float32(webgpu_session, device):
    if not device.has_f16:
        pytest.skip("this adapter has no shader-f16")
    full, mixed = webgpu_session(LLAMA), webgpu_session(LLAMA, precision="mixed-f16", loss_scaling=SCALING)
    reference = ReferenceSession(LLAMA, **SETTINGS, precision="mixed-f16", loss_scaling=SCALING)
    a, b, c = (take(s, LLAMA, 1, 10) for s in (full, mixed, reference))
    assert b[0].loss == pytest.approx(a[0].loss, rel=1e-3)
    assert b[9].loss == pytest.approx(a[9].loss, rel=5e-3)
    for x, y in zip(b, c, strict=True):
        assert x.loss == pytest.approx(y.loss, rel=1e-3)
    full.close()
    mixed.close()


def test_a_split_into_microbatches_leaves_the_update_unchanged(webgpu_session):
    whole = webgpu_session(LLAMA, batch_size=4)
    split = webgpu_session(LLAMA)
    parts = batches(LLAMA, 1)
    joined = Batch(
        *(
            np.concatenate([getattr(p, f) for p in parts])
            for f in ("ids", "targets", "positions", "segment_ids", "sample_ids")
        )
    )
    info = StepInfo(1, joined.target_tokens, 1)
    whole.begin(info)
    whole.accumulate(joined)
    whole.apply()
    split.begin(replace(info, microbatches=2))
    for part in parts:
        split.accumulate(part)
    split.apply()
    a, b = whole.poll_metrics(wait=True)[0], split.poll_metrics(wait=True)[0]
    assert a.loss == pytest.approx(b.loss, rel=1e-6)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-6)
    whole.close()
    split.close()


def test_an_overflow_skips_the_update_halves_the_scale_and_counts_the_step(webgpu_session, device):
    if not device.has_f16:
        pytest.skip("this adapter has no shader-f16")
    session = webgpu_session(
        LLAMA, precision="mixed-f16", loss_scaling={"enabled": True, "initialScale": 2.0**40, "maxScale": 2.0**40}
    )
    before = session.export_state()
    (result,) = take(session, LLAMA, 1, 1)
    assert result.overflow and result.optimizer_step == 0
    assert (result.loss_scale, result.loss_scale_after) == (2.0**40, 2.0**39)
    after = session.export_state()
    assert all(np.array_equal(before.model[n], after.model[n]) for n in before.model)
    assert after.scaler["scale"] == 2.0**39
    session.close()


def test_a_warm_step_creates_nothing_and_reads_back_once_per_interval(webgpu_session):
    session = webgpu_session(LLAMA, metrics_interval=10)
    take(session, LLAMA, 1, 10)
    before = session.counters()
    results = []
    for step in range(11, 111):
        parts = batches(LLAMA, step)
        session.begin(StepInfo(step, sum(b.target_tokens for b in parts), 2))
        for part in parts:
            session.accumulate(part)
        session.apply()
        results += session.poll_metrics()
    after = session.counters()
    assert after["buffers_created"] == before["buffers_created"]
    assert after["pipelines_created"] == before["pipelines_created"]
    assert after["readbacks"] - before["readbacks"] <= 10
    results += session.poll_metrics(wait=True)
    assert [r.data_step for r in results] == list(range(11, 111))
    session.close()


def test_evaluation_leaves_training_bitwise_unchanged_and_agrees_with_the_reference(webgpu_session):
    plain, evaluated = webgpu_session(GPT2), webgpu_session(GPT2)
    reference = ReferenceSession(GPT2, **SETTINGS)
    held_out = batches(GPT2, 99)[1]
    a = take(plain, GPT2, 1, 6)
    b = []
    for step in range(1, 7):
        b += take(evaluated, GPT2, step, step)
        evaluated.evaluate(held_out)
    assert [r.loss for r in a] == [r.loss for r in b]
    assert same_state(plain.export_state(), evaluated.export_state())
    reference.import_state(plain.export_state())
    ours, theirs = plain.evaluate(held_out), reference.evaluate(held_out)
    assert ours.loss_sum == pytest.approx(theirs.loss_sum, rel=1e-5)
    assert ours.target_tokens == theirs.target_tokens == held_out.target_tokens
    plain.close()
    evaluated.close()


@pytest.mark.parametrize("name", MODELS)
def test_sampling_agrees_with_the_reference_beyond_the_context(webgpu_session, name):
    model = MODELS[name]
    session, reference = webgpu_session(model), ReferenceSession(model, **SETTINGS)
    take(session, model, 1, 3)
    reference.import_state(session.export_state())
    options = GenerateOptions(tokens=50, temperature=1.0, top_k=20, seed=5)
    prompt = [1, 2, 3, 4, 5]
    assert list(session.generate(prompt, options)) == list(reference.generate(prompt, options))
    session.close()


def test_an_evaluation_says_when_a_value_did_not_fit_f16(webgpu_session, device):
    if not device.has_f16:
        pytest.skip("this adapter has no shader-f16")
    held_out = batches(LLAMA, 99)[0]
    for session in (
        webgpu_session(LLAMA, precision="mixed-f16"),
        ReferenceSession(LLAMA, **SETTINGS, precision="mixed-f16"),
    ):
        good = session.export_state()
        assert not session.evaluate(held_out).overflow
        up = good.model["model.layers.0.mlp.up_proj.weight"]
        session.import_state(replace(good, model={**good.model, "model.layers.0.mlp.up_proj.weight": up * 0 + 3e4}))
        assert session.evaluate(held_out).overflow, "an activation"
        session.import_state(good)
        assert not session.evaluate(held_out).overflow, "the flag is that of each evaluation"
        session.import_state(replace(good, model={**good.model, "model.norm.weight": np.full(32, 1e5, np.float32)}))
        assert session.evaluate(held_out).overflow, "a weight"
        session.close()


def test_inspecting_before_applying_changes_nothing(webgpu_session):
    plain, inspected = webgpu_session(LLAMA), webgpu_session(LLAMA)
    take(plain, LLAMA, 1, 4)
    for step in range(1, 5):
        parts = batches(LLAMA, step)
        inspected.begin(StepInfo(step, sum(b.target_tokens for b in parts), 2, z_loss=1e-4))
        for part in parts:
            inspected.accumulate(part)
        seen = inspected.inspect()
        inspected.apply()
        (result,) = inspected.poll_metrics(wait=True)
        assert (seen.loss, seen.grad_norm) == (result.loss, result.grad_norm)
    assert same_state(plain.export_state(), inspected.export_state())
    plain.close()
    inspected.close()


def test_times_are_positive_and_add_up(webgpu_session, device):
    session = webgpu_session(LLAMA)
    results = take(session, LLAMA, 1, 5)
    for result in results:
        if device.has_timestamps:
            assert result.timing_source == "device"
            assert result.forward_ms > 0 and result.backward_ms > 0
            assert result.forward_ms + result.backward_ms <= result.step_time_ms
    session.close()


def test_ids_outside_the_vocabulary_and_wrong_states_are_refused_by_name(webgpu_session):
    session = webgpu_session(LLAMA)
    (good, _) = batches(LLAMA, 1)
    bad = replace(good, ids=good.ids + np.uint32(64))
    session.begin(StepInfo(1, good.target_tokens, 1))
    with pytest.raises(DataContractError, match="vocabulary"):
        session.accumulate(bad)
    session.accumulate(good)
    session.apply()
    state = session.export_state()
    del state.model["model.norm.weight"]
    with pytest.raises(CheckpointCorrupt, match=r"model\.norm\.weight"):
        session.import_state(state)
    session.close()


def test_without_timestamps_a_synchronised_step_now_and_then_gives_the_times():
    from hybrid.backends.webgpu.device import open_device
    from hybrid.backends.webgpu.session import WebGPUSession

    plain = open_device(features=())
    session = WebGPUSession(LLAMA, **SETTINGS, device=plain)
    timed = take(session, LLAMA, 1, 6)
    assert {r.timing_source for r in timed[1:]} == {"calibration"}
    for result in timed[1:]:
        assert result.forward_ms > 0 and result.backward_ms > 0 and result.optimizer_ms > 0
        assert result.forward_ms + result.backward_ms <= result.step_time_ms
    session.close()
    plain.close()


def test_a_calibration_step_gives_the_bits_of_any_other(webgpu_session):
    from hybrid.backends.webgpu.device import open_device
    from hybrid.backends.webgpu.session import WebGPUSession

    plain = open_device(features=())
    calibrated, timed = WebGPUSession(LLAMA, **SETTINGS, device=plain, variants={}), webgpu_session(LLAMA, variants={})
    take(calibrated, LLAMA, 1, 4)
    take(timed, LLAMA, 1, 4)
    assert same_state(calibrated.export_state(), timed.export_state())
    calibrated.close()
    timed.close()
    plain.close()


def test_a_session_without_training_programs_evaluates_and_samples_alike_in_less_memory(webgpu_session):
    whole, light = webgpu_session(LLAMA), webgpu_session(LLAMA, training=False)
    take(whole, LLAMA, 1, 3)
    light.import_state(whole.export_state())
    held_out, options = batches(LLAMA, 99)[0], GenerateOptions(tokens=12, seed=3)
    assert light.evaluate(held_out) == whole.evaluate(held_out)
    assert list(light.generate([1, 2], options)) == list(whole.generate([1, 2], options))
    assert light.memory()["total"] < 0.6 * whole.memory()["total"]
    with pytest.raises(RuntimeError, match="training programs"):
        light.begin(StepInfo(1, held_out.target_tokens, 1))
    whole.close()
    light.close()
