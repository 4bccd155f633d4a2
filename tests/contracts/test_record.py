"""Checkpoint records: hashes are recomputed, tensors cut to their shape, disagreements named."""

from __future__ import annotations

import copy

import pytest

from contracts.vectors import load
from hybrid.contracts.record import checkpoint_hash, require_expected, tensors, verify
from hybrid.errors import CheckpointCorrupt, ContractMismatch

CASES = load("checkpoint_record")["cases"]


def of(kind):
    return [pytest.param(case, id=case["name"]) for case in CASES if case["kind"] == kind]


def test_the_vectors_are_all_there():
    assert {kind: len(of(kind)) for kind in ("valid", "tampered", "load")} == {"valid": 6, "tampered": 5, "load": 5}


@pytest.mark.parametrize("case", of("valid") + of("tampered"))
def test_the_hash_of_the_content(case):
    assert checkpoint_hash(case["record"]) == case["computed_hash"]
    if case["hash_matches"]:
        verify(case["record"])
    else:
        with pytest.raises(CheckpointCorrupt, match=case["computed_hash"]):
            verify(case["record"])


@pytest.mark.parametrize("case", of("valid"))
def test_tensors_end_with_their_shape_not_with_their_buffer(case):
    found = list(tensors(case["record"]))
    assert len(found) == len(case["tensors"])
    for tensor, expected in zip(found, case["tensors"], strict=True):
        assert (tensor.key, tensor.role, tensor.dtype) == (expected["name"], expected["role"], expected["dtype"])
        assert list(tensor.shape) == expected["shape"]
        assert len(tensor.data) < expected["bytes_stored"]
        assert tensor.values() == expected["values"]


@pytest.mark.parametrize("case", of("load"))
def test_expected_metadata_that_disagrees_is_named(case):
    if case["error"] is None:
        require_expected(case["record"], case["expectedMetadata"])
        return
    with pytest.raises(ContractMismatch) as caught:
        require_expected(case["record"], case["expectedMetadata"])
    assert str(caught.value) == case["error"]
    assert ", ".join(name for name, _, _ in caught.value.differences) == case["error"].split(": ")[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "f64"}, "'base\\[0\\]' \\(param\\) has dtype 'f64', expected one of f32, f16"),
        ({"shape": [3, -2]}, "has shape"),
        ({"shape": "3"}, "has shape"),
        ({"dataBase64": "?"}, "not base64"),
        ({"dataBase64": None}, "not base64"),
        ({"dataBase64": "AAAA"}, "has 3 bytes, but f32 of shape \\[3, 2\\] needs 24"),
    ],
)
def test_a_broken_tensor_is_refused_by_name(change, message):
    record = copy.deepcopy(CASES[0]["record"])
    record["trainingState"]["params"]["base[0]"].update(change)
    with pytest.raises(CheckpointCorrupt, match=message):
        list(tensors(record))


def test_a_record_without_its_members_is_refused():
    for broken in ({}, {"trainingState": []}, {"metadata": None}):
        with pytest.raises(CheckpointCorrupt, match="expected an object"):
            list(tensors(broken))
        with pytest.raises(CheckpointCorrupt, match="expected an object"):
            checkpoint_hash(broken)
