"""Whether a state fits a model, before any of it reaches a session."""

from __future__ import annotations

from collections.abc import Mapping
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
    _check_tensors("weight", state.model, shapes)
    _check_tensors(
        "moment", state.optimizer, {f"{slot}/{name}": shape for slot in slots for name, shape in shapes.items()}
    )
    for name in shapes if SECOND_MOMENT in slots else ():
        if (state.optimizer[f"{SECOND_MOMENT}/{name}"] < 0).any():
            raise CheckpointCorrupt(
                f"moment tensor '{SECOND_MOMENT}/{name}' holds negative value(s): it is a mean of squares"
            )
    if isinstance(state.optimizer_step, bool) or not isinstance(state.optimizer_step, int) or state.optimizer_step < 0:
        raise CheckpointCorrupt(f"optimizer step is {state.optimizer_step!r}: expected a whole number of at least 0")


def _check_tensors(kind: str, arrays: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    if missing := [name for name in shapes if name not in arrays]:
        raise CheckpointCorrupt(f"{kind} tensor {missing[0]!r} is missing ({len(missing)} of {len(shapes)} are)")
    if extra := [name for name in arrays if name not in shapes]:
        raise CheckpointCorrupt(
            f"{kind} tensor {extra[0]!r} belongs to no parameter of this model ({len(extra)} do not)"
        )
    for name, shape in shapes.items():
        array = arrays[name]
        if array.dtype != np.float32 or array.shape != shape:
            raise CheckpointCorrupt(
                f"{kind} tensor {name!r} is {array.dtype} {list(array.shape)}: expected float32 {list(shape)}"
            )
        if not np.isfinite(array).all():
            raise CheckpointCorrupt(
                f"{kind} tensor {name!r} holds {np.count_nonzero(~np.isfinite(array))} non-finite value(s)"
            )
