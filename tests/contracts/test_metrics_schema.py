"""`bridge/schemas/metrics.schema.json` says what the validators say, and every entry made here passes it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from contracts.entries import RUN, progress, step, telemetry
from contracts.vectors import FOLDER, load
from hybrid.contracts.metrics import GENERATIONS, OPTIONAL_FIELDS, build_entry, entry_error

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((FOLDER.parent / "schemas" / "metrics.schema.json").read_text(encoding="utf-8"))
VALIDATOR = Draft202012Validator(SCHEMA)

# JSON Schema cannot compare two fields of one entry.
BEYOND_THE_SCHEMA = {"shard index > count", "step in shard > steps", "global step > steps"}


def test_the_schema_is_a_schema():
    Draft202012Validator.check_schema(SCHEMA)


def test_the_schema_accepts_exactly_what_both_generations_accept():
    cases = load("metrics_entries")["cases"]
    differing = {
        case["name"]
        for case in cases
        if VALIDATOR.is_valid(case["entry"]) != all(entry_error(case["entry"], name) is None for name in GENERATIONS)
    }
    assert differing == BEYOND_THE_SCHEMA
    assert sum(VALIDATOR.is_valid(case["entry"]) for case in cases) == 25


@pytest.mark.parametrize(
    "facts",
    [
        step(),
        step(forward_ms=None, backward_ms=None, optimizer_ms=None, timing_source="none"),
        step(overflow=True, grad_norm=None, clip_factor=1.0, nan_count=1, loss_scale=1024.0),
        step(overflow=True, grad_norm=None, clip_factor=1.0, total_loss=None),
        step(mfu=0.4, mfu_causal=0.35, data_wait_share=0.0, peak_host_bytes=10, peak_device_bytes=20),
        step(nll=2.25, tokens_per_second=1e6, memory_stats={"host_rss_bytes": 1}, objective_metrics={"extra": [1]}),
    ],
)
def test_entries_made_here_pass_also_after_a_trip_through_the_file(facts):
    entry = build_entry(RUN, facts, progress(), telemetry())
    line = json.dumps(entry, allow_nan=False)
    VALIDATOR.validate(json.loads(line))


def test_every_field_of_an_entry_is_in_the_schema_and_on_the_page():
    """...and neither the schema nor the page has a field that no entry has."""
    entry = build_entry(RUN, step(), progress(), telemetry())
    assert set(SCHEMA["properties"]) == {*entry, *OPTIONAL_FIELDS} and not set(entry) & set(OPTIONAL_FIELDS)
    page = (ROOT / "docs" / "formats" / "metrics.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| `([^|]*)` \|", page, flags=re.MULTILINE)
    described = {name for cell in tables for name in cell.split("`, `")}
    assert {*entry, *OPTIONAL_FIELDS} <= described


def test_the_worked_example_of_the_page_is_a_valid_entry():
    page = (ROOT / "docs" / "formats" / "metrics.md").read_text(encoding="utf-8")
    examples = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", page, flags=re.DOTALL)]
    entries = [example for example in examples if "total_loss" in example]
    assert len(entries) == 2
    for entry in entries:
        VALIDATOR.validate(entry)
        assert set(entry) == set(SCHEMA["properties"]) - set(OPTIONAL_FIELDS)
        assert all(entry_error(entry, name) is None for name in GENERATIONS)
