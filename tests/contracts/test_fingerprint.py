"""A resume that disagrees is shown field by field."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.contracts.fingerprint import ABSENT, differences, format_table, identity_hashes, require_agreement
from hybrid.contracts.stable_json import stable_hash
from hybrid.errors import EXIT_REFUSED, ConfigError, ContractMismatch

SAVED = {
    "dataset": {"tokens": 100, "sha256": "a" * 64},
    "tokenizer": {"kind": "bytes"},
    "contract": {"optimizer": {"lr": 0.001, "beta1": 0.9}, "model": {"schedule": [0, 1], "window": None}},
}
CURRENT = {
    "dataset": {"tokens": 100.0, "sha256": "b" * 64},
    "tokenizer": {"kind": "bytes"},
    "contract": {"optimizer": {"lr": 0.002, "beta1": 0.9}, "model": {"schedule": [0, 1, 1]}, "seed": 1},
}


def test_each_difference_has_its_dotted_path_and_both_values():
    assert differences(SAVED, CURRENT) == (
        ("dataset.sha256", "a" * 64, "b" * 64),
        ("contract.optimizer.lr", 0.001, 0.002),
        ("contract.model.schedule", [0, 1], [0, 1, 1]),
        ("contract.model.window", None, ABSENT),
        ("contract.seed", ABSENT, 1),
    )


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.just(1.0) | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from("abc"), VALUES), st.dictionaries(st.sampled_from("abc"), VALUES))
def test_there_is_a_difference_exactly_when_the_hashes_differ(saved, current):
    assert bool(differences(saved, current)) == (stable_hash(saved) != stable_hash(current))


def test_the_table_lines_up_and_shortens_long_values():
    table = format_table([("a", 1, ABSENT), ("model.width", "x" * 200, {"b": [1]})]).splitlines()
    assert table[0].split() == ["field", "saved", "current"]
    assert table[1].split() == ["a", "1", ABSENT]
    assert table[2].endswith('  {"b":[1]}')
    assert " ..." in table[2]
    assert len({line.index(last) for line, last in zip(table, ("current", ABSENT, '{"b"'), strict=True)}) == 1


def test_a_resume_that_agrees_is_silent():
    assert require_agreement(SAVED, SAVED) == ()


def test_a_resume_that_disagrees_is_refused_with_the_table_and_the_way_out():
    with pytest.raises(ContractMismatch, match="5 fields differ") as caught:
        require_agreement(SAVED, CURRENT)
    assert caught.value.exit_code == EXIT_REFUSED
    assert caught.value.differences == differences(SAVED, CURRENT)
    assert "contract.optimizer.lr" in str(caught.value)
    assert "--accept-change FIELD --reason TEXT" in str(caught.value)
    assert str(caught.value).endswith("begin another run with --resume never.")


def test_accepted_changes_pass_and_are_returned_for_the_lineage():
    with pytest.raises(ContractMismatch, match="2 fields differ") as caught:
        require_agreement(SAVED, CURRENT, ["contract.model", "dataset.sha256"])
    assert [field for field, _, _ in caught.value.differences] == ["contract.optimizer.lr", "contract.seed"]
    accepted = require_agreement(SAVED, CURRENT, ["contract", "dataset.sha256"])
    assert accepted == differences(SAVED, CURRENT)


def test_accepting_a_change_that_did_not_happen_is_a_mistake():
    with pytest.raises(ConfigError, match=r"'contract\.optimizer\.beta1' is no difference"):
        require_agreement(SAVED, CURRENT, ["contract.optimizer.beta1"])
    with pytest.raises(ConfigError, match="differences: none"):
        require_agreement(SAVED, SAVED, ["contract"])


def test_identity_hashes_are_those_of_the_documents():
    assert identity_hashes(SAVED) == {
        "configHash": stable_hash(SAVED["contract"]),
        "datasetHash": stable_hash(SAVED["dataset"]),
        "tokenizerHash": stable_hash(SAVED["tokenizer"]),
    }
    assert identity_hashes({"contract": {"a": 1}, "dataset": {}})["datasetHash"] is None
    assert identity_hashes({})["tokenizerHash"] is None
