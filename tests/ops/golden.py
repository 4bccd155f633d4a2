"""The golden vectors of distillation and triplets as the arrays that ops take.

What is done here is what an objective does on the host: columns for a teacher without token ids, the column of a
target, rows that a mask leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contracts.vectors import load
from hybrid.data.batch import IGNORE

Array = NDArray[Any]


@dataclass(frozen=True)
class Distillation:
    """logits float32 [N, V]; ids, probs [N, K]; targets [N]; settings of `topk_kl`; rows: how many are taught."""

    name: str
    logits: Array
    ids: Array
    probs: Array
    targets: Array
    settings: dict[str, float]
    rows: int
    expected: dict[str, Any]


@dataclass(frozen=True)
class Triplets:
    """sides: anchor, positive, negative, float32 [N, C]; mask [N]; columns [N, K] or None; rows: how many count."""

    name: str
    sides: tuple[Array, Array, Array]
    mask: Array
    columns: Array | None
    margin: float
    rows: int
    expected: dict[str, Any]


def distillations() -> Iterator[Distillation]:
    for case in load("kd")["cases"]:
        logits = np.array(case["student_logits"], np.float32)
        taught = np.array(case["teacher_top_probs"], np.float64)
        rows, columns = taught.shape
        ids = np.full((len(logits), columns), IGNORE, np.uint32)
        ids[:rows] = np.arange(columns) if case["teacher_top_indices"] is None else case["teacher_top_indices"]
        probs = np.zeros((len(logits), columns))
        probs[:rows] = taught
        targets = np.full(len(logits), IGNORE, np.uint32)
        for row in range(rows):
            targets[row] = np.argmax(taught[row])
            if case["target_indices"] is not None:
                targets[row] = np.clip(case["target_indices"][row], 0, columns - 1)
            token = None if case["target_token_ids"] is None else case["target_token_ids"][row]
            if token in ids[row]:
                targets[row] = np.flatnonzero(ids[row] == token)[0]
        settings = {
            "temperature": max(1e-4, 1.0 if case["temperature"] is None else case["temperature"]),
            "alpha_kl": case["alpha_kd"],
            "alpha_nll": case["alpha_ce"],
        }
        yield Distillation(case["name"], logits, ids, probs, targets, settings, rows, case["expected"])


def triplets() -> Iterator[Triplets]:
    for case in load("triplet")["cases"]:
        given = [np.array(case[name], np.float32) for name in ("anchor", "positive", "negative")]
        rows = min(map(len, given))
        sides = given[0][:rows], given[1][:rows], given[2][:rows]
        mask = np.ones(rows, np.uint32)
        for row, counts in enumerate((case["mask"] or [])[:rows]):
            mask[row] = counts is not False
        columns = None
        if case["top_indices"] is not None:
            columns = np.array(case["top_indices"], np.uint32)
        elif case["dim"] is not None:
            columns = np.tile(np.arange(case["dim"], dtype=np.uint32), (rows, 1))
        margin = max(0.0, case["margin"])
        yield Triplets(case["name"], sides, mask, columns, margin, int(mask.sum()), case["expected"])


def check_distillation(case: Distillation, loss: Array, kl: Array, nll: Array, gradient: Array) -> None:
    """Rows of the losses, and the gradient of the sum of all, against the vector within its own tolerances."""
    expected = case.expected
    mean = {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(loss.sum() / case.rows, expected["distill_loss_total"], **mean)
    np.testing.assert_allclose(case.settings["alpha_kl"] * kl.sum() / case.rows, expected["loss_kd"], **mean)
    auxiliary = case.settings["alpha_nll"] * nll.sum() / case.rows
    np.testing.assert_allclose(auxiliary, expected["distill_loss_ce_aux"], **mean)
    wanted = np.array(expected["logit_grad"])
    np.testing.assert_allclose(gradient / case.rows, wanted, rtol=0, atol=1e-5 * max(np.abs(wanted).max(), 1e-2))


def check_triplets(case: Triplets, hinge: Array, *gradients: Array) -> None:
    """Rows of the hinge, and the gradients of their sum by anchor, positive and negative."""
    expected = case.expected
    rows = max(case.rows, 1)
    assert case.rows == expected["considered_rows"]
    np.testing.assert_allclose(hinge.sum() / rows, expected["loss_triplet"], rtol=1e-6, atol=1e-9)
    assert np.count_nonzero(hinge) == expected["active_count"]
    for side, gradient in zip(("anchor", "positive", "negative"), gradients, strict=True):
        wanted = np.array(expected[f"grad_{side}"])[: len(hinge)]
        limit = 1e-6 * max(np.abs(wanted).max(initial=0.0), 1e-2)
        np.testing.assert_allclose(gradient / rows, wanted, rtol=0, atol=limit, err_msg=side)
