"""A size that nothing can hold is refused at once, by the name of its setting; one that is only large is not."""

from __future__ import annotations

import pytest

from hybrid.backends.reference.session import ReferenceSession
from hybrid.config.loading import load_config
from hybrid.config.resolve import model_config, resolve
from hybrid.config.size import MOST_DEVICE_BYTES, check_size, size_of
from hybrid.config.tree import MOST_LAYERS, RunConfig
from hybrid.errors import LimitExceeded
from hybrid.models.parameters import count_parameters
from hybrid.plan.compiler import PlanSettings, compile_plan
from hybrid.plan.profile import DeviceProfile
from hybrid.training.sessions import session_settings

GIB = 2**30
LARGE = ("model.layers=30", "model.width=2048", "model.heads=16", "model.feedForwardWidth=null", "data.batchSize=8",
         "data.microbatchSize=1", "data.sequenceLength=1024")  # fmt: skip


def config(*assignments: str) -> RunConfig:
    return load_config(assignments=assignments)


@pytest.mark.parametrize(
    ("assignments", "backend", "message"),
    [
        (["model.layers=400", "model.width=4096"], "reference", "model.layers = 400, model.width = 4096, .* make 80,6"),
        (["model.layers=400", "model.width=4096"], "webgpu", "a save of weights and moments takes at least 901.* GiB"),
        (["model.vocabularySize=2000000000"], "webgpu", "model.vocabularySize = 2000000000, "),
        (["model.contextLength=1048576", "model.positions=learned", "model.width=8192"], "webgpu", "contextLength"),
        (["model.heads=1000000", "model.headWidth=1000000"], "webgpu", "model.headWidth = 1000000"),
        (["data.batchSize=100000000"], "webgpu", "data.batchSize = 100000000 samples of data.sequenceLength = 64"),
        (["data.batchSize=100000", "data.prefetch=1000", "run.steps=1000"], "webgpu", "with data.prefetch = 1000"),
        (["data.batchSize=100000", "data.prefetch=0"], "reference", "data.microbatchSize = 100000 samples .* keep"),
        (
            ["data.sequenceLength=500000", "data.batchSize=1"],
            "reference",
            "data.sequenceLength = 500000: the attention",
        ),
    ],
)
def test_what_nothing_can_hold_is_refused_by_name(assignments: list[str], backend: str, message: str) -> None:
    with pytest.raises(LimitExceeded, match=message) as refusal:
        check_size(config(*assignments), backend, 64 * GIB)
    assert "use " in str(refusal.value), "what to do"


def test_where_the_memory_is_not_known_no_device_has_a_tebibyte() -> None:
    with pytest.raises(LimitExceeded, match=r"expected at most 1\.0 TiB"):
        check_size(config("model.layers=1000", "model.width=4096"), "webgpu", None)
    check_size(config("model.layers=24", "model.width=4096"), "webgpu", None)


def test_a_large_model_is_possible() -> None:
    large = config(*LARGE)
    size = size_of(large, 256)
    assert 1.1e9 < size.parameters < 1.4e9
    assert size.device < MOST_DEVICE_BYTES
    check_size(large, "webgpu", 16 * GIB)
    with pytest.raises(LimitExceeded):
        check_size(large, "reference", 16 * GIB)


def test_processes_that_share_a_state_need_room_for_their_part() -> None:
    large = config(*LARGE)
    with pytest.raises(LimitExceeded, match="a save of weights and moments takes"):
        check_size(large, "torch", 4 * GIB)
    check_size(large, "torch", 4 * GIB, processes=4)


@pytest.mark.parametrize("precision", ["f32", "mixed-f16"])
@pytest.mark.parametrize("recompute", ["false", "true"])
@pytest.mark.parametrize("preset", ["stdlib-tiny", "shakespeare-char"])
def test_the_size_is_never_above_what_is_really_needed(preset: str, recompute: str, precision: str) -> None:
    given = load_config(
        preset=preset, assignments=[f"backend.recompute={recompute}", f"precision.type={precision}", "data.batchSize=2"]
    )
    resolved = resolve(given, 256, 1000)
    size, model = size_of(resolved), model_config(resolved)
    assert size == size_of(given, 256), "what is not resolved is worked out"
    assert size.parameters == count_parameters(model)
    session = ReferenceSession(model, **session_settings(resolved), seed=1)
    memory = session.memory()
    assert size.state <= memory["total"] - memory["activations"]
    assert size.activations + size.scores <= memory["activations"]
    profile = DeviceProfile(features=frozenset({"shader-f16"}))
    arenas = compile_plan(PlanSettings(model, **session_settings(resolved)), profile).arenas
    assert size.activations <= sum(arenas["activations"])


def test_the_most_layers_are_a_number_that_compiles() -> None:
    assert len(config(f"model.layers={MOST_LAYERS}").model.schedule or range(MOST_LAYERS)) == MOST_LAYERS


def test_two_sizes_that_are_compared_never_read_the_same() -> None:
    sizes = ("data.batchSize=42949673", "data.microbatchSize=1", "data.sequenceLength=50", "data.prefetch=1")
    with pytest.raises(LimitExceeded, match=r"take 64 bytes more than 64\.0 GiB of memory"):
        check_size(config(*sizes), "webgpu", 64 * GIB)
