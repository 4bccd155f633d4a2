"""Something that happens to this process in one phase of a run: an error, a signal, or the end of the time limit.

Each phase is a function of the product, replaced by one that does it first, at the named call.
"""

from __future__ import annotations

import importlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from hybrid.training.signals import StopFlag

BOOM = "boom"
flags: list[StopFlag] = []  # of this process's run

# Phase -> (module, object in it, function, at which call). Rank 0 alone does those of the second group.
PHASES: dict[str, tuple[str, str, str, int]] = {
    "rendezvous": ("hybrid.backends.torch.ranks", "", "rendezvous", 1),
    "connecting": ("torch.distributed", "", "init_process_group", 1),
    "building": ("hybrid.backends.torch.session", "", "initial_rows", 1),
    "compile": ("hybrid.backends.torch.session", "TorchSession", "_compile", 1),
    "step": ("hybrid.backends.torch.session", "TorchSession", "accumulate", 7),
    "update": ("hybrid.backends.torch.session", "TorchSession", "apply", 3),
    "evaluation": ("hybrid.backends.torch.session", "TorchSession", "evaluate", 1),
    "writing": ("torch.distributed.checkpoint.hf_storage", "HuggingFaceStorageWriter", "write_data", 1),
    # Collectives of FSDP2 in step 2, which the other ranks are in: of the forward part, and of the backward part.
    "gathering": ("torch.distributed", "", "all_gather_single", 12),
    "scattering": ("torch.distributed", "", "reduce_scatter_single", 5),
    "decoding": ("hybrid.backends.torch.session", "TorchSession", "decode", 2),
    # ---
    "settings": ("torch_backend.forked", "", "micro_config", 1),
    "reading": ("hybrid.training.start", "", "prepare", 1),
    "loading": ("hybrid.data.loader", "DataLoader", "step", 3),
    "logging": ("hybrid.training.metrics_log", "JsonLines", "append", 3),
    "export": ("hybrid.training.saving", "Saver", "save", 1),
}


def install(phase: str, kind: str, moment: Path) -> None:
    """kind: "error", "signal", "hours" (the time limit), "kill", or "hang" (a signal, and it does not come back).
    moment: a file for the time at which it happens."""
    module, holder, name, call = PHASES[phase]
    place: Any = importlib.import_module("__main__" if module == "torch_backend.forked" else module)
    place = getattr(place, holder) if holder else place
    original, calls = getattr(place, name), [0]

    def faulty(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            moment.write_text(str(time.time()))
            if kind == "error":
                raise RuntimeError(BOOM)
            _stop(kind)
        return original(*arguments, **options)

    setattr(place, name, faulty)


def _stop(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind in ("signal", "hang"):
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        flags[0].limit(0.0)
    time.sleep(3600 if kind == "hang" else 0.5)  # the other ranks hear of it
