"""AdamW, as data that kernels implement and as a float64 reference that tests compare them with.

Adam: Kingma and Ba, 2015; decoupled weight decay: Loshchilov and Hutter, 2019. With weight decay 0 it is plain Adam.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from math import sqrt

from hybrid.optim.settings import OptimizerSettings


@dataclass(frozen=True)
class UpdateRule:
    """An elementwise update rule.

    slots: state tensors of each parameter, float32, zero before the first step, saved as `<slot>/<tensor>`. formula:
    one assignment a line, over p (parameter), g (gradient), the slots and scalars. `multiplier` unscales and clips: 1
    / loss_scale times the clip factor. bc1, bc2, lr and wd come from the row of the step in `table.rows`.
    """

    name: str
    slots: tuple[str, ...]
    formula: tuple[str, ...]


ADAMW = UpdateRule(
    name="adamw",
    slots=("moment1", "moment2"),
    formula=(
        "g = g * multiplier",
        "moment1 = beta1 * moment1 + (1 - beta1) * g",
        "moment2 = beta2 * moment2 + (1 - beta2) * g * g",
        "p = p - lr * ((moment1 / bc1) / (sqrt(moment2 / bc2) + eps) + wd * p)",
    ),
)


def step(
    parameter: MutableSequence[float],
    gradient: Sequence[float],
    moment1: MutableSequence[float],
    moment2: MutableSequence[float],
    settings: OptimizerSettings,
    row: Sequence[float],
    group: int,
    multiplier: float = 1.0,
) -> None:
    """Apply `ADAMW` in place to the elements of one tensor, in float64.

    `row` is the step's row of `table.rows`, `group` the tensor's group (0 decays, 1 does not).
    """
    bias_correction1, bias_correction2 = row[0], row[1]
    rate, weight_decay = row[2 + 2 * group], row[3 + 2 * group]
    for index, raw in enumerate(gradient):
        g = raw * multiplier
        moment1[index] = settings.beta1 * moment1[index] + (1 - settings.beta1) * g
        moment2[index] = settings.beta2 * moment2[index] + (1 - settings.beta2) * g * g
        direction = (moment1[index] / bias_correction1) / (sqrt(moment2[index] / bias_correction2) + settings.eps)
        parameter[index] -= rate * (direction + weight_decay * parameter[index])
