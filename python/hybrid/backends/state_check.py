"""Whether a state fits a model, before any of it reaches a session."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from hybrid.backends.protocol import SessionState
from hybrid.errors import CheckpointCorrupt

SECOND_MOMENT = "moment2"  # its root is taken
SLOTS = ("moment1", SECOND_MOMENT)


def check_state(state: SessionState, shapes: Mapping[str, tuple[int, ...]], slots: tuple[str, ...] = SLOTS) -> None:
    """CheckpointCorrupt, naming the tensor, unless weights and moments are exactly the float32 tensors that `shapes`
    says.

    The moments are `<slot>/<name>` for each slot and name. Scaler fields are judged by the scaler when it restores
    them.
    """
    moments = _moments(shapes, slots)
    for kind, arrays, expected in (("weight", state.model, shapes), ("moment", state.optimizer, moments)):
        _check_names(kind, arrays, expected)
        for name, shape in expected.items():
            _check_values(kind, name, arrays[name], shape)
    for name in shapes if SECOND_MOMENT in slots else ():
        _check_squares(f"{SECOND_MOMENT}/{name}", state.optimizer[f"{SECOND_MOMENT}/{name}"])
    if isinstance(state.optimizer_step, bool) or not isinstance(state.optimizer_step, int) or state.optimizer_step < 0:
        raise CheckpointCorrupt(f"optimizer step is {state.optimizer_step!r}: expected a whole number of at least 0")


class StateCheck:
    """The same for a state whose tensors come one after the other. names: of all of them, each with its group, "model"
    or "optimizer". Errors: as `check_state`.
    """

    def __init__(self, names: Iterable[tuple[str, str]], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._expected = {"model": shapes, "optimizer": _moments(shapes, SLOTS)}
        listed = list(names)
        for group, kind in _KINDS.items():
            _check_names(kind, [name for of, name in listed if of == group], self._expected[group])

    def tensor(self, group: str, name: str, array: Any) -> None:
        _check_values(_KINDS[group], name, array, self._expected[group][name])
        if name.startswith(f"{SECOND_MOMENT}/"):
            _check_squares(name, array)


_KINDS = {"model": "weight", "optimizer": "moment"}


def _moments(shapes: Mapping[str, tuple[int, ...]], slots: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    return {f"{slot}/{name}": shape for slot in slots for name, shape in shapes.items()}


def _check_names(kind: str, names: Collection[str], shapes: Mapping[str, tuple[int, ...]]) -> None:
    if missing := [name for name in shapes if name not in names]:
        raise CheckpointCorrupt(f"{kind} tensor {missing[0]!r} is missing ({len(missing)} of {len(shapes)} are)")
    if extra := [name for name in names if name not in shapes]:
        raise CheckpointCorrupt(
            f"{kind} tensor {extra[0]!r} belongs to no parameter of this model ({len(extra)} do not)"
        )


def _check_values(kind: str, name: str, array: Any, shape: tuple[int, ...]) -> None:
    if array.dtype != np.float32 or array.shape != shape:
        raise CheckpointCorrupt(
            f"{kind} tensor {name!r} is {array.dtype} {list(array.shape)}: expected float32 {list(shape)}"
        )
    if not np.isfinite(array).all():
        raise CheckpointCorrupt(
            f"{kind} tensor {name!r} holds {np.count_nonzero(~np.isfinite(array))} non-finite value(s)"
        )


def _check_squares(name: str, array: Any) -> None:
    if (array < 0).any():
        raise CheckpointCorrupt(f"moment tensor {name!r} holds negative value(s): it is a mean of squares")
