"""A resume that would follow another trajectory is refused with a table, unless each change is accepted with a
reason.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from checkpoint import examples
from hybrid.checkpoint.manifest import Fingerprints
from hybrid.checkpoint.resume import check_resume
from hybrid.checkpoint.store import CheckpointStore
from hybrid.errors import EXIT_REFUSED, ConfigError, ContractMismatch

SAVED = Fingerprints(
    dataset={"hash": "a", "documents": 3},
    tokenizer={"kind": "bytes"},
    contract={"optimizer": {"learning_rate": 0.001, "beta1": 0.9}, "seed": 1},
)


def now() -> float:
    return examples.TIME


def test_a_run_that_is_the_same_goes_on_without_a_word() -> None:
    assert check_resume(SAVED, SAVED, {}) == ()


def test_a_difference_is_refused_with_a_table_of_both_values() -> None:
    current = replace(SAVED, dataset={"hash": "b", "documents": 3}, contract={**SAVED.contract, "seed": 2})
    with pytest.raises(ContractMismatch) as caught:
        check_resume(SAVED, current, {})
    assert caught.value.exit_code == EXIT_REFUSED
    assert caught.value.differences == (("dataset.hash", "a", "b"), ("contract.seed", 1, 2))
    lines = [line.split() for line in str(caught.value).splitlines()]
    assert ["dataset.hash", '"a"', '"b"'] in lines and ["contract.seed", "1", "2"] in lines


def test_accepting_one_change_does_not_accept_another() -> None:
    current = replace(SAVED, dataset={"hash": "b", "documents": 3}, contract={**SAVED.contract, "seed": 2})
    with pytest.raises(ContractMismatch) as caught:
        check_resume(SAVED, current, {"dataset.hash": "cleaned"})
    assert caught.value.differences == (("contract.seed", 1, 2),)


def test_accepted_changes_become_audits_that_later_saves_keep(tmp_path: Path) -> None:
    optimizer = {"learning_rate": 0.002, "beta1": 0.95}
    current = replace(SAVED, contract={"optimizer": optimizer, "seed": 1})
    accepted = {"contract.optimizer": "retuned", "contract.optimizer.beta1": "as in the paper"}
    audits = check_resume(SAVED, current, accepted, source="command:train", operator="ada", now=now)
    shared = {"timestamp": "2023-11-14T22:13:20.250Z", "source": "command:train", "operator": "ada"}
    assert audits == (
        {"field": "contract.optimizer.learning_rate", "saved": 0.001, "current": 0.002, "reason": "retuned", **shared},
        {"field": "contract.optimizer.beta1", "saved": 0.9, "current": 0.95, "reason": "as in the paper", **shared},
    )
    store = CheckpointStore(tmp_path, clock=examples.clock)
    with_audits = store.load(store.save(examples.snapshot(1, resume_audits=audits))).manifest
    without = store.load(store.save(examples.snapshot(2))).manifest
    assert with_audits.resume_audits == audits
    forgotten = replace(with_audits, resume_audits=())
    assert forgotten.checkpoint_hash != with_audits.checkpoint_hash, "audits are hashed"
    assert without.resume_audits == ()


def test_an_acceptance_says_why_and_names_a_change() -> None:
    current = replace(SAVED, contract={**SAVED.contract, "seed": 2})
    with pytest.raises(ConfigError, match=r"'contract\.seed' has no reason"):
        check_resume(SAVED, current, {"contract.seed": " "})
    with pytest.raises(ConfigError, match=r"'contract\.sead' is no difference"):
        check_resume(SAVED, current, {"contract.sead": "typo"})
