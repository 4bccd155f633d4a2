"""bridge/schemas/checkpoint.schema.json says what the reader checks: it takes what is saved and refuses what is
malformed.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from checkpoint import examples
from checkpoint.hostile import AUDIT, HOSTILE, put
from hybrid.checkpoint import manifest
from hybrid.checkpoint.store import CheckpointStore

SCHEMA: dict[str, Any] = json.loads(
    (Path(__file__).resolve().parents[2] / "bridge" / "schemas" / "checkpoint.schema.json").read_text(encoding="utf-8")
)
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)

ZEROS = "0" * 64
# The reader's refusals that no schema can express: they compare the document with itself or with the files.
BEYOND_A_SCHEMA: list[tuple[str, object]] = [
    ("files/config.json/size", 10**15),
    ("files/config.json/size", 1),
    ("files/config.json/sha256", ZEROS),
    ("files/config.json/chunks", []),
    ("files/config.json/chunks", [ZEROS]),
    ("stateHash", ZEROS),
]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    store = CheckpointStore(tmp_path_factory.mktemp("schema"), clock=examples.clock)
    path = store.save(examples.snapshot(resume_audits=(AUDIT,), provenance=None))
    found: dict[str, Any] = json.loads((path / "checkpoint.json").read_text(encoding="utf-8"))
    return found


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_every_exception_is_a_case() -> None:
    assert len(MALFORMED) == len(HOSTILE) - len(BEYOND_A_SCHEMA)


def test_what_is_saved_is_valid(document: dict[str, Any]) -> None:
    VALIDATOR.validate(document)


def test_schema_and_reader_know_the_same_members(document: dict[str, Any]) -> None:
    assert set(SCHEMA["properties"]) == set(SCHEMA["required"]) == manifest._KEYS == set(document)
    for member, keys in (("progress", manifest._PROGRESS_KEYS), ("hashes", manifest._HASH_KEYS)):
        assert set(SCHEMA["properties"][member]["properties"]) == set(keys)
    assert set(SCHEMA["$defs"]["audit"]["properties"]) == set(manifest._AUDIT_KEYS)
    assert SCHEMA["properties"]["files"]["required"] == list(manifest.REQUIRED_FILES)
    assert SCHEMA["properties"]["version"]["const"] == manifest.VERSION


MALFORMED = [case for case in HOSTILE if case[:2] not in BEYOND_A_SCHEMA]


@pytest.mark.parametrize(("path", "value", "message"), MALFORMED, ids=[f"{p}={v!r:.20}" for p, v, _ in MALFORMED])
def test_the_schema_refuses_what_the_reader_refuses(
    document: dict[str, Any], path: str, value: object, message: str
) -> None:
    changed = copy.deepcopy(document)
    put(path, value)(changed)
    assert not VALIDATOR.is_valid(changed), message
