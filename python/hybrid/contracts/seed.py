"""Which seed a run has."""

from __future__ import annotations

from collections.abc import Mapping
from math import floor, isfinite
from typing import Any

from hybrid.contracts.javascript import to_number

DEFAULT_SEED = 1337


def resolve_seed(options: Mapping[str, Any], training: Mapping[str, Any]) -> int:
    """The first number among options.seed, training.seed, training.distill.seed, training.ul.seed, floored; else 1337.

    Text that spells a number counts; None and blank text do not (a seed that was left empty is not the seed 0).
    """
    candidates = (
        options.get("seed"),
        training.get("seed"),
        (training.get("distill") or {}).get("seed"),
        (training.get("ul") or {}).get("seed"),
    )
    for candidate in candidates:
        number = to_number(candidate)
        if isfinite(number):
            return candidate if isinstance(candidate, int) else floor(number)
    return DEFAULT_SEED
