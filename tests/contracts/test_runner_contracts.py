"""Seed, provenance, environment, memory, telemetry settings, progress and identity hashes follow the golden vectors."""

from __future__ import annotations

from collections import Counter

import pytest

from contracts.vectors import load
from hybrid.contracts import environment, identity, memory, progress, provenance, seed, telemetry
from hybrid.errors import ConfigError

CASES = load("provenance_environment")["cases"]

# Accidents of JavaScript's Number() that are refused here: what was left empty is not the number 0.
COERCED = {"null counts as 0 (JS coercion)": 5, "empty text counts as 0 (JS coercion)": 1337}


def of(kind):
    return [pytest.param(case, id=case["name"]) for case in CASES if case["kind"] == kind]


def test_the_vectors_are_all_there():
    assert Counter(case["kind"] for case in CASES) == {
        "build_provenance": 16,
        "gpu_adapter": 14,
        "seed": 11,
        "telemetry": 8,
        "window": 3,
        "progress": 10,
        "environment": 4,
        "memory_stats": 2,
        "checkpoint_metadata": 3,
    }
    assert len(CASES) == 71


@pytest.mark.parametrize("case", of("build_provenance"))
def test_provenance(case):
    assert provenance.build_provenance(case["options"], case["env"]) == case["expected"]


def test_our_own_build_variables_come_first():
    variables = {"DOPPLER_BUILD_COMMIT": "d", "GIT_COMMIT": "g", "HYBRID_BUILD_COMMIT": "h", "HYBRID_BUILD_ID": "7"}
    variables |= {"BUILD_ID": "9", "BUILD_TIMESTAMP": "5", "HYBRID_BUILD_TIMESTAMP": "2026-01-02"}
    assert provenance.build_provenance({}, variables) == {
        "commitHash": "h",
        "buildId": "7",
        "buildTimestamp": "2026-01-02T00:00:00.000Z",
    }


@pytest.mark.parametrize("case", of("gpu_adapter"))
def test_adapter_fields(case):
    assert environment.gpu_adapter(case["adapter_info"]) == case["expected"]


@pytest.mark.parametrize("case", of("seed"))
def test_seed(case):
    expected = COERCED.get(case["name"], case["expected"])
    assert seed.resolve_seed(case["options"], case["training"]) == expected


def test_a_seed_beyond_float64_keeps_its_digits():
    assert seed.resolve_seed({"seed": 2**63 + 1}, {}) == 2**63 + 1


@pytest.mark.parametrize("case", of("telemetry"))
def test_telemetry_settings_and_alerts(case):
    settings = telemetry.TelemetrySettings.resolve(case["telemetry"])
    assert settings.to_dict() == case["settings"]
    for point in case["entries"]:
        assert telemetry.alerts(settings, point["entry"]) == point["alerts"]


@pytest.mark.parametrize("case", of("window"))
def test_rolling_means(case):
    window = telemetry.RollingWindow(case["windowSize"])
    assert [window.push(value) for value in case["values"]] == pytest.approx(case["expected"], rel=1e-12)


@pytest.mark.parametrize("case", of("progress"))
def test_progress(case):
    """The vectors' ETA divides by the global step: an `executed` equal to it must give the very same numbers."""
    if case["error"]:
        with pytest.raises(ConfigError) as caught:
            progress.ProgressContext.resolve(case["options"], case["distill"])
        assert str(caught.value) == case["error"]
        return
    context = progress.ProgressContext.resolve(case["options"], case["distill"])
    expected = case["context"]
    assert (context.shard_index, context.shard_count) == (expected["shardIndex"], expected["shardCount"])
    assert context.steps_per_shard == expected["stepsPerShard"]
    for point in case["points"]:
        executed = point["snapshot"]["globalStep"] or 1
        elapsed = point["elapsedMs"]
        state = progress.snapshot(
            context, point["step"], elapsed_ms=elapsed, executed=executed, process_ms=elapsed, now_ms=0
        )
        own = {
            "shardIndex": state.shard_index,
            "shardCount": state.shard_count,
            "stepInShard": state.step_in_shard,
            "stepsPerShard": state.steps_per_shard,
            "globalStep": state.global_step,
            "globalSteps": state.global_steps,
            "percentComplete": state.percent_complete,
            "elapsedMs": state.elapsed_ms,
            "etaMs": state.eta_ms,
        }
        assert set(own) == set(point["snapshot"])
        for name, value in point["snapshot"].items():
            assert own[name] == (value if value is None else pytest.approx(value, rel=1e-12))


@pytest.mark.parametrize("case", of("environment"))
def test_environment(case):
    facts = environment.javascript_environment(case["options"], case["process"], case["navigator"])
    assert facts == case["expected"]


def test_the_environment_of_this_process_is_named_in_the_same_words():
    facts = environment.python_environment({"command": " train ", "gpuAdapterInfo": {"vendor": "acme", "serial": 1}})
    assert list(facts) == ["runtime", "command", "pythonVersion", "platform", "arch", "gpuAdapter"]
    assert (facts["runtime"], facts["command"], facts["gpuAdapter"]) == ("python", "train", {"vendor": "acme"})


@pytest.mark.parametrize("case", of("memory_stats"))
def test_heap(case):
    assert memory.heap_stats(case["memory"]) == case["expected"]


def test_host_memory_is_told_with_the_arenas_of_the_device():
    stats = memory.host_stats({"params": 4, "total": 4})
    assert stats["device_bytes"] == {"params": 4, "total": 4}
    assert stats["host_rss_bytes"] is None or stats["host_rss_bytes"] > 1_000_000


@pytest.mark.parametrize("case", of("checkpoint_metadata"))
def test_identity_hashes(case):
    found = identity.checkpoint_identity(case["options"], case["training"])
    assert found == case["expected"]
    assert identity.compared_fields(found) == case["compared_fields"]
    assert identity.force_resume_source(case["options"]) == case["forceResumeSource"]
