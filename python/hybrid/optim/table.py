"""The optimizer's table: everything about a step that depends on its number, computed in float64 on the host.

Devices hold a window of rows as float32 and pick one by their own step counter, which does not advance on a skipped
step.
"""

from __future__ import annotations

from hybrid.errors import ConfigError
from hybrid.optim.arithmetic import power
from hybrid.optim.schedules import learning_rate
from hybrid.optim.settings import OptimizerSettings

COLUMNS = (
    "bias_correction1",
    "bias_correction2",
    "lr_decay",
    "weight_decay_decay",
    "lr_no_decay",
    "weight_decay_no_decay",
)


def rows(optimizer: OptimizerSettings, first: int, count: int) -> list[list[float]]:
    """Rows of the optimizer steps first .. first + count - 1 (first >= 1), each [bc1, bc2, lr 0, wd 0, lr 1, wd 1].

    bc1 = 1 - beta1^t and bc2 = 1 - beta2^t. Group 0 ("decay") has the settings' weight decay, group 1 ("no_decay")
    has 0.
    """
    if first < 1:
        raise ConfigError(f"optimizer step {first} has no table row: steps count from 1")
    document = optimizer.to_dict()
    table = []
    for t in range(first, first + count):
        rate = learning_rate(document, t)[0]
        corrections = [1 - power(optimizer.beta1, t), 1 - power(optimizer.beta2, t)]
        table.append([*corrections, rate, optimizer.weight_decay, rate, 0.0])
    return table
