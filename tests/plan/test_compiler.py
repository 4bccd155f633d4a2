"""What the compiler promises: every plan fits WebGPU's rules and default limits, and says clearly what cannot."""

from dataclasses import replace

import pytest

from hybrid.errors import ConfigError, LimitExceeded
from hybrid.models.config import ModelConfig
from hybrid.models.parameters import count_parameters, parameter_specs
from hybrid.plan.compiler import PlanSettings, compile_plan, launches_used
from hybrid.plan.document import Dispatch
from hybrid.plan.profile import DEFAULT_LIMITS, MIB, DeviceProfile

LLAMA = ModelConfig(
    vocabulary_size=256, context_length=64, layers=2, width=64, heads=4, kv_heads=2, feed_forward_width=176, dropout=0.1
)
GPT2 = ModelConfig(
    vocabulary_size=256,
    context_length=64,
    layers=2,
    width=64,
    heads=4,
    feed_forward_width=256,
    norm="layer_norm",
    positions="learned",
    activation="gelu",
    bias=True,
    tied_embeddings=True,
    dropout=0.1,
)
LOOPED = replace(LLAMA, schedule=(0, 1, 1, 0))
GPT2_SMALL = ModelConfig(
    vocabulary_size=50257,
    context_length=1024,
    layers=12,
    width=768,
    heads=12,
    feed_forward_width=3072,
    norm="layer_norm",
    positions="learned",
    activation="gelu",
    bias=True,
    tied_embeddings=True,
)
F16 = DeviceProfile(features=frozenset({"shader-f16"}))
MODELS = {"llama": LLAMA, "gpt2": GPT2, "looped": LOOPED}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["f32", "mixed-f16"])
def test_a_model_needs_at_most_thirty_pipelines_to_train(name, precision):
    plan = compile_plan(PlanSettings(MODELS[name], 4, 64, precision), F16)
    training = {
        d.choices[0].kernel
        for program in ("begin", "forward_backward", "optimizer_stats", "optimizer_apply", "evaluate")
        for d in plan.dispatches(program)
    }
    assert len(training) <= 30
    assert launches_used(plan) >= len(training)


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_a_gradient_both_moments_and_one_group(name):
    plan = compile_plan(PlanSettings(MODELS[name], 2, 32), DeviceProfile())
    specs = parameter_specs(MODELS[name])
    grouped = [n for group in plan.settings["groups"] for n in group["names"]]
    assert sorted(grouped) == sorted(s.name for s in specs)
    for spec in specs:
        master = plan.tensors[spec.name]
        for prefix in ("grad/", "moment1/", "moment2/"):
            mirror = plan.tensors[prefix + spec.name]
            assert (mirror.page, mirror.offset, mirror.shape) == (master.page, master.offset, spec.shape)
    assert sum(plan.tensors[s.name].elements for s in specs) == count_parameters(MODELS[name])


def test_mixed_precision_needs_at_most_sixty_percent_of_the_activations():
    for model in MODELS.values():
        full = compile_plan(PlanSettings(model, 4, 64), F16).arena_bytes("activations")
        half = compile_plan(PlanSettings(model, 4, 64, "mixed-f16"), F16).arena_bytes("activations")
        assert half <= 0.6 * full


def test_recomputation_trades_memory_for_dispatches():
    deep = replace(LLAMA, layers=8, schedule=())
    plain = compile_plan(PlanSettings(deep, 4, 64), F16)
    recomputed = compile_plan(PlanSettings(deep, 4, 64, recompute=True), F16)
    assert recomputed.arena_bytes("activations") < 0.5 * plain.arena_bytes("activations")
    assert len(recomputed.programs["forward_backward"]) > len(plain.programs["forward_backward"])


def test_gpt2_small_compiles_on_default_limits():
    plan = compile_plan(PlanSettings(GPT2_SMALL, 1, 128), DeviceProfile())
    assert count_parameters(GPT2_SMALL) == 124_439_808
    table = plan.tensors["model.embed_tokens.weight"]
    assert table.bytes > DEFAULT_LIMITS["maxStorageBufferBindingSize"]
    reads = [
        b
        for d in plan.dispatches("forward_backward")
        for b in d.bindings
        if (b.arena, b.page) == ("params", table.page)
    ]
    assert max(b.size for b in reads) <= 128 * MIB
    assert all(max(pages, default=0) <= 256 * MIB for pages in plan.arenas.values())


def test_logits_never_exist_whole_for_a_large_vocabulary():
    plan = compile_plan(PlanSettings(GPT2_SMALL, 1, 1024), DeviceProfile())
    whole = 1024 * 50257 * 4
    heads = [d for d in plan.dispatches("forward_backward") if d.label.endswith("cross_entropy")]
    assert len(heads) > 1
    assert max(b.size for d in heads for b in d.bindings) < whole / 4


def test_what_cannot_fit_names_the_tensor_and_the_limit():
    wide = replace(LLAMA, width=4096, heads=32, kv_heads=32, head_width=128, feed_forward_width=40_000)
    with pytest.raises(LimitExceeded, match=r"mlp\.\w+_proj.*one buffer of this device holds"):
        compile_plan(PlanSettings(wide, 1, 16), DeviceProfile())


def test_a_batch_that_does_not_suit_the_model_is_refused():
    with pytest.raises(ConfigError, match="context length 64"):
        compile_plan(PlanSettings(LLAMA, 1, 65), DeviceProfile())
    with pytest.raises(ConfigError, match="precision"):
        compile_plan(PlanSettings(LLAMA, 1, 64, "f8"), DeviceProfile())


def test_small_pages_spread_every_arena_over_several_buffers():
    profile = DeviceProfile(page_cap=256 * 1024)
    plan = compile_plan(PlanSettings(LLAMA, 2, 64), profile)
    assert len(plan.arenas["params"]) > 1
    assert len(plan.arenas["activations"]) > 2
    assert all(page <= 256 * 1024 for pages in plan.arenas.values() for page in pages)


def test_dispatches_are_labelled_by_block_and_phase():
    plan = compile_plan(PlanSettings(LLAMA, 2, 64), DeviceProfile())
    commands = [c for c in plan.programs["forward_backward"] if isinstance(c, Dispatch)]
    labels = {c.label for c in commands}
    assert any(label.startswith("layers.0.") for label in labels)
    phases = [c.phase for c in commands if c.phase]
    first_backward = phases.index("backward")
    assert "forward" not in phases[first_backward:]


@pytest.mark.parametrize("vocabulary", [63, 65, 257, 50257])
@pytest.mark.parametrize("tied", [True, False])
def test_the_products_of_a_head_move_four_numbers_at_a_time_whatever_the_vocabulary(vocabulary, tied):
    model = replace(LLAMA, vocabulary_size=vocabulary, tied_embeddings=tied)
    plan = compile_plan(PlanSettings(model, 2, 64, "mixed-f16"), F16)
    heads = [
        d
        for p in ("forward_backward", "evaluate")
        for d in plan.dispatches(p)
        if d.label.endswith("cross_entropy_head")
    ]
    heads += [d for d in plan.dispatches("forward_backward") if d.label.endswith("cross_entropy_head_grad")]
    assert len(heads) >= 4
    assert not [d for d in heads if "any" in d.choices[0].kernel]


@pytest.mark.parametrize("profile", [F16, replace(F16, page_cap=128 * 1024)], ids=["one page", "pages"])
def test_a_matrix_keeps_its_shape_and_has_room_for_rows_up_to_a_multiple_of_four(profile):
    model = replace(GPT2, vocabulary_size=253)
    plan = compile_plan(PlanSettings(model, 2, 32, "mixed-f16"), profile)
    assert plan.tensors["model.embed_tokens.weight"].shape == (253, 64)
    for prefix in ("", "grad/", "moment1/", "moment2/", "half/"):
        tensors = [plan.tensors[prefix + spec.name] for spec in parameter_specs(model)]
        for page, size in enumerate(plan.arenas[tensors[0].arena]):
            here = sorted((t for t in tensors if t.page == page), key=lambda t: t.offset)
            ends = [t.offset for t in here[1:]] + [size]
            for tensor, end in zip(here, ends, strict=True):
                row = tensor.bytes // tensor.shape[0]
                rows = -(-tensor.shape[0] // 4) * 4 if len(tensor.shape) > 1 else tensor.shape[0]
                assert tensor.offset + rows * row <= end


def test_parameters_of_a_group_are_one_flat_range_whatever_the_vocabulary():
    for vocabulary in (256, 257):
        plan = compile_plan(PlanSettings(replace(GPT2, vocabulary_size=vocabulary), 2, 32), DeviceProfile())
        assert len(list(plan.dispatches("optimizer_apply"))) == 2
