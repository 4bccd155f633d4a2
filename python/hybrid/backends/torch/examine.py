"""What torch can do on this machine."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from hybrid.backends.torch.numerics import choose_device


@cache
def examine() -> dict[str, Any]:
    """version, device (that of `auto`), devices (names), and whether torch compiles here; compiles a line for that,
    which takes a few seconds."""
    device = choose_device("auto")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    problem = ""
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.zeros(8, device=device))
    except Exception as error:  # whatever a compiler dies of
        problem = (str(error).strip() or type(error).__name__).splitlines()[0]
    return {
        "version": torch.__version__,
        "device": device.type,
        "devices": names or ["CPU"],
        "compiles": not problem,
        "compileProblem": problem,
    }
