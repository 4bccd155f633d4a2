"""A state that does not fit the model is refused by the name of the first tensor that is wrong."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hybrid.backends.protocol import SessionState
from hybrid.backends.state_check import check_state
from hybrid.errors import CheckpointCorrupt

SHAPES = {"a": (2, 3), "b": (4,)}


def state() -> SessionState:
    return SessionState(
        model={name: np.ones(shape, np.float32) for name, shape in SHAPES.items()},
        optimizer={
            f"{s}/{n}": np.zeros(shape, np.float32) for s in ("moment1", "moment2") for n, shape in SHAPES.items()
        },
        optimizer_step=3,
    )


def test_a_state_that_fits_passes() -> None:
    check_state(state(), SHAPES)


def poisoned() -> np.ndarray:
    array = np.ones((2, 3), np.float32)
    array[1, 2] = np.nan
    return array


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: s.model.pop("b"), r"weight tensor 'b' is missing \(1 of 2 are\)"),
        (lambda s: s.optimizer.pop("moment2/a"), "moment tensor 'moment2/a' is missing"),
        (lambda s: s.model.update(c=np.ones(1, np.float32)), "weight tensor 'c' belongs to no parameter"),
        (
            lambda s: s.model.update(a=np.ones((3, 2), np.float32)),
            r"'a' is float32 \[3, 2\]: expected float32 \[2, 3\]",
        ),
        (lambda s: s.model.update(a=np.ones((2, 3))), r"'a' is float64 \[2, 3\]"),
        (lambda s: s.model.update(a=poisoned()), r"'a' holds 1 non-finite value"),
        (lambda s: s.optimizer.update({"moment2/b": -np.ones(4, np.float32)}), "'moment2/b' holds negative value"),
        (lambda s: setattr(s, "optimizer_step", -1), "optimizer step is -1"),
        (lambda s: setattr(s, "optimizer_step", 1.0), "optimizer step is 1.0"),
    ],
)
def test_what_does_not_fit_is_named(spoil: Callable[[SessionState], object], message: str) -> None:
    broken = state()
    spoil(broken)
    with pytest.raises(CheckpointCorrupt, match=message):
        check_state(broken, SHAPES)
