"""Runs whose plans the tab must compile from their settings alone, to the same bytes.

`PYTHONPATH=tests python -m tab_python.runs` prints, as JSON, the resolved settings of each run and the sha256 of every
file of its plan.
"""

from __future__ import annotations

import json
import sys

from hybrid.bridge.job import plan_settings
from hybrid.config.loading import load_config, to_settings
from hybrid.config.resolve import resolve
from tab_python.cases import F16, expected, facts

SMALL = [
    "model.layers=1",
    "model.width=32",
    "model.heads=2",
    "model.kvHeads=1",
    "data.batchSize=4",
    "data.sequenceLength=16",
]
RUNS = {
    "as it is by default": [],
    "with everything set": [
        *("precision.type=mixed-f16", "optimizer.maxNorm=0", "data.microbatchSize=2", "backend.recompute=true"),
        *("model.dropout=0.5", "model.schedule=[0,0]", "schedule.warmupSteps=3", "model.activation=silu"),
    ],
}


def main() -> None:
    found = []
    for name, changes in RUNS.items():
        config = resolve(load_config(None, None, [*SMALL, *changes], {}), 256, 1000)
        found.append(
            {
                "name": name,
                "settings": to_settings(config),
                "profile": facts(F16),
                "files": expected(plan_settings(config), F16)["files"],
            }
        )
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
