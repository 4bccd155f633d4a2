"""Entries are judged exactly as the mirrored runner judges them, and those made here always pass."""

from __future__ import annotations

from collections import Counter

import pytest

from contracts.entries import RUN, progress, step, telemetry
from contracts.vectors import load
from hybrid.contracts.metrics import (
    GENERATIONS,
    LARGEST_FLOAT32,
    OBJECTIVE_FIELDS,
    build_entry,
    entry_error,
    validate_entry,
)
from hybrid.errors import AlertRaised, ContractMismatch

CASES = load("metrics_entries")["cases"]


def test_the_vectors_are_all_there():
    assert len(CASES) == 157
    verdicts = Counter(bool(case["errors"][generation]) for case in CASES for generation in GENERATIONS)
    assert verdicts == {True: 263, False: 51}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_both_generations_give_their_verdict_word_for_word(case):
    assert {name: entry_error(case["entry"], name) for name in GENERATIONS} == case["errors"]
    faults = [case["errors"][name] for name in GENERATIONS if case["errors"][name]]
    if faults:
        with pytest.raises(ContractMismatch) as caught:
            validate_entry(case["entry"])
        assert str(caught.value) == faults[0]
    else:
        validate_entry(case["entry"])


def test_an_entry_made_here_satisfies_both_generations_and_reports_what_happened():
    entry = build_entry(RUN, step(), progress(), telemetry())
    validate_entry(entry)
    assert entry["runtime_preset"] == entry["runtime_profile"] == "stdlib-tiny"
    assert entry["gradient_norm_clipped"] == pytest.approx(entry["gradient_norm_unclipped"] * 0.5)
    assert (entry["clipped_event_count"], entry["supervised_token_count"]) == (1, 250)
    assert (entry["overflow"], entry["skipped_optimizer_step"], entry["loss_overflow"]) == (False, False, False)
    assert entry["effective_lr"] == entry["lr"] == 1e-3
    assert all(entry[name] is None for name in OBJECTIVE_FIELDS)


def test_every_field_that_a_valid_vector_carries_is_filled():
    full = next(case["entry"] for case in CASES if case["name"] == "valid full cross_entropy")
    assert set(full) <= set(build_entry(RUN, step(), progress(), telemetry()))


def test_an_overflow_step_is_a_valid_entry_that_says_what_was_skipped():
    facts = step(overflow=True, grad_norm=None, clip_factor=1.0, loss_scale=1024.0, nan_count=3, inf_count=40)
    entry = build_entry(RUN, facts, progress(), telemetry())
    assert (entry["overflow"], entry["skipped_optimizer_step"], entry["loss_scale"]) == (True, True, 1024.0)
    assert (entry["gradient_norm_unclipped"], entry["gradient_norm_clipped"]) == (None, None)
    assert (entry["effective_lr"], entry["lr"]) == (None, 1e-3)
    assert (entry["nan_count"], entry["inf_count"], entry["total_loss"]) == (3, 40, 2.5)


def test_a_loss_that_overflowed_stays_finite_and_out_of_the_windows():
    watch = telemetry(windowSize=4)
    build_entry(RUN, step(total_loss=2.0), progress(), watch)
    entry = build_entry(RUN, step(step=2, total_loss=None, overflow=True, grad_norm=None), progress(2), watch)
    assert entry["total_loss"] == LARGEST_FLOAT32
    assert (entry["loss_overflow"], entry["window_loss_avg"]) == (True, 2.0)


def test_counters_are_left_out_when_telemetry_says_so():
    entry = build_entry(RUN, step(), progress(), telemetry(emitNaNInfCounters=False))
    assert (entry["nan_count"], entry["inf_count"]) == (None, None)


def test_objective_metrics_join_the_entry_but_never_replace_a_field_of_the_step():
    entry = build_entry(RUN, step(objective_metrics={"z_loss": 0.25}), progress(), telemetry())
    assert entry["z_loss"] == 0.25
    for name in ("total_loss", "lr", "telemetry_alerts", "progress_global_step"):
        with pytest.raises(ContractMismatch, match=f"'{name}' would overwrite"):
            build_entry(RUN, step(objective_metrics={name: 0}), progress(), telemetry())


def test_an_entry_that_would_break_the_schema_is_never_made():
    with pytest.raises(ContractMismatch, match="total_loss must be a finite number"):
        build_entry(RUN, step(total_loss=float("nan")), progress(), telemetry())


def test_an_alert_is_in_the_entry_and_ends_the_run_only_when_asked():
    limits = {"maxGradientNorm": 0.5}
    quiet = telemetry(alerts={"enabled": True, "thresholds": limits})
    entry = build_entry(RUN, step(), progress(), quiet)
    assert entry["telemetry_alerts"] == ["max_gradient_norm_exceeded"]
    quiet.check(entry)
    strict = telemetry(alerts={"enabled": True, "failOnAlert": True, "thresholds": limits})
    with pytest.raises(AlertRaised, match=r"^training telemetry alert\(s\): max_gradient_norm_exceeded at step 1\.$"):
        strict.check(entry)
