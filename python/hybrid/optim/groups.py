"""Parameter groups: which tensors weight decay pulls towards zero.

Decay belongs to tensors with two or more dimensions (matrices and embedding tables). Biases and norm weights have one
dimension; pulling a norm's weight towards zero would only fight the layer that follows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class Spec(Protocol):
    """The part of a parameter's description that grouping reads."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Group:
    """Tensors that share a learning rate and a weight decay; `names` in the model's order."""

    name: str
    decay: bool
    names: tuple[str, ...]


def parameter_groups(specs: Iterable[Spec]) -> tuple[Group, ...]:
    """Always two groups, in the order of the columns of `table.rows`: 0 "decay", 1 "no_decay". Either may be empty."""
    decay: list[str] = []
    no_decay: list[str] = []
    for spec in specs:
        (decay if len(spec.shape) >= 2 else no_decay).append(spec.name)
    return Group("decay", True, tuple(decay)), Group("no_decay", False, tuple(no_decay))
