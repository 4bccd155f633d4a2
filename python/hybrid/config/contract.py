"""What a resume must agree on: the settings that can change the trajectory, and nothing else.

Outside the contract: logging, telemetry, cadence, folders, backend, how a batch is split into microbatches (rounding
only), and the length of the run, so that a run can move between machines and be continued. The data and the tokenizer
have fingerprints of their own.
"""

from __future__ import annotations

from typing import Any

from hybrid.config.loading import to_settings
from hybrid.config.tree import RunConfig

# Schedule keys that matter, by type.
_SCHEDULE = {
    "constant": (),
    "step_decay": ("stepSize", "gamma", "minLr"),
    "cosine": ("totalSteps", "minLr"),
    "cosine_to_min": ("totalSteps", "minLr"),
    "wsd": ("totalSteps", "decayShare", "decayShape", "minLr"),
}


def contract(config: RunConfig) -> dict[str, Any]:
    """The trajectory's settings of a resolved configuration, nested, camelCase; hashed, they are `configHash`."""
    settings = to_settings(config)
    schedule, scaling, data = settings["schedule"], settings["lossScaling"], settings["data"]
    kind = schedule["type"]
    used = ["type", "warmupSteps", *_SCHEDULE[kind]]
    if kind == "constant" and schedule["warmupSteps"]:
        used.append("minLr")
    # The last step of a run in epochs may be partly empty, so going on with more of them is another trajectory.
    run = ["seed", "epochs"] if settings["run"]["steps"] is None else ["seed"]
    return {
        "model": settings["model"],
        "data": {key: data[key] for key in ("sequenceLength", "batchSize", "split", "samples")},
        "objective": settings["objective"],
        "optimizer": settings["optimizer"],
        "schedule": {key: schedule[key] for key in used},
        "precision": _precision(settings["precision"]),
        "lossScaling": scaling if scaling["enabled"] else {"enabled": False},
        "run": {key: settings["run"][key] for key in run},
    }


def _precision(settings: dict[str, Any]) -> dict[str, Any]:
    """Exact numerics are what every run has that does not ask for others; they go without saying."""
    return {key: value for key, value in settings.items() if (key, value) != ("numerics", "exact")}
