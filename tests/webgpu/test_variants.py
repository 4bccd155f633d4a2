"""Kernel variants: what is timed, what wins, and what is remembered of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid.backends.webgpu.variants import VariantCache, winner
from hybrid.models.config import ModelConfig
from hybrid.optim.settings import OptimizerSettings
from hybrid.plan.compiler import PlanSettings, compile_plan
from hybrid.plan.profile import DeviceProfile
from hybrid.resources import cache_folder

TINY = ModelConfig(vocabulary_size=64, context_length=32, layers=1, width=32, heads=4, feed_forward_width=64)
WIDE = ModelConfig(vocabulary_size=128, context_length=64, layers=1, width=128, heads=4, feed_forward_width=128)
TIMED = {f"matmul.{form}.act.act.act.medium" for form in ("nt", "nn", "tn")}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HYBRID_CACHE", str(tmp_path))
    return tmp_path / "variants"


def start(device, model: ModelConfig, **changes) -> tuple[dict[str, str], list[str]]:
    """The choices of a new session, and what it said while it was set up."""
    from hybrid.backends.webgpu.session import WebGPUSession

    said: list[str] = []
    settings = {"batch_size": 1, "sequence_length": model.context_length, "optimizer": OptimizerSettings(), **changes}
    session = WebGPUSession(model, device=device, progress=lambda text, *_: said.append(text), **settings)
    choices = dict(session.executor.choices)
    session.close()
    return choices, said


def test_the_tests_have_a_cache_of_their_own(monkeypatch):
    ours = cache_folder("variants")
    monkeypatch.delenv("HYBRID_CACHE")
    assert ours != cache_folder("variants")


@pytest.mark.webgpu
def test_a_tiny_model_times_nothing_and_remembers_nothing(device, cache):
    choices, said = start(device, TINY)
    assert choices == {}
    assert "timing kernel variants" not in said
    assert not cache.exists()


@pytest.mark.webgpu
def test_each_class_is_timed_once_and_its_winner_remembered(device, cache):
    first, said = start(device, WIDE)
    assert set(first) == TIMED
    assert "timing kernel variants" in said
    again, said = start(device, WIDE)
    assert again == first
    assert "timing kernel variants" not in said


@pytest.mark.webgpu
@pytest.mark.parametrize("kept", ['{"format": 2, "variants": %s}', "[]", "no json"], ids=["older", "foreign", "broken"])
def test_a_cache_that_means_nothing_is_timed_again(device, cache, kept):
    path = VariantCache(device, "f32").path
    path.parent.mkdir(parents=True)
    path.write_text(kept.replace("%s", json.dumps(dict.fromkeys(TIMED, "r4x4"))))
    choices, said = start(device, WIDE)
    assert set(choices) == TIMED
    assert "timing kernel variants" in said
    assert VariantCache(device, "f32").read() == choices


@pytest.mark.webgpu
def test_a_name_that_no_kernel_has_is_timed_again(device, cache):
    VariantCache(device, "f32").add(dict.fromkeys(TIMED, "r99x99"))
    choices, said = start(device, WIDE)
    assert set(choices) == TIMED and "r99x99" not in choices.values()
    assert "timing kernel variants" in said


def test_tuning_offers_every_variant_even_to_a_tiny_model():
    plans = [compile_plan(PlanSettings(TINY, 1, 32, tune=tune), DeviceProfile()) for tune in (False, True)]
    offered = [
        {len(d.choices) for name in plan.programs for d in plan.dispatches(name) if "tiny" in (d.product_class or "")}
        for plan in plans
    ]
    assert max(offered[0]) == 1
    assert max(offered[1]) >= 6


@pytest.mark.parametrize(
    ("rounds", "index"),
    [
        pytest.param([[1.0, 0.8], [1.0, 0.8], [1.0, 0.8]], 1, id="the faster one"),
        pytest.param([[1.0, 0.97], [1.0, 0.97], [1.0, 0.97]], 0, id="the best guess when it is too close to call"),
        pytest.param([[1.0, 0.8, 0.7], [5.0, 4.0, 3.5], [9.0, 7.2, 6.3]], 2, id="rounds that slow down as a whole"),
        pytest.param([[1.0, 0.8], [1.0, 9.0], [1.0, 0.8], [1.0, 0.8], [9.0, 0.8]], 1, id="single slow measurements"),
        pytest.param([[9.0, 2.0], [1.0, 2.0], [1.0, 2.0], [9.0, 2.0], [1.0, 2.0]], 0, id="a guess that was disturbed"),
    ],
)
def test_the_winner_is_judged_round_by_round(rounds, index):
    assert winner(rounds) == index
