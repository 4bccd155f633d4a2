"""How much memory a run uses, as the metrics tell it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid.contracts.javascript import is_finite_number

_HEAP_FIELDS = {
    "js_heap_used_bytes": "usedJSHeapSize",
    "js_heap_total_bytes": "totalJSHeapSize",
    "js_heap_limit_bytes": "jsHeapSizeLimit",
}


def heap_stats(memory: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The JavaScript heap from `performance.memory`; None where there is no such thing."""
    if memory is None:
        return None
    return {
        field: memory.get(source) if is_finite_number(memory.get(source)) else None
        for field, source in _HEAP_FIELDS.items()
    }


def host_stats(device: Mapping[str, int] | None = None) -> dict[str, Any] | None:
    """{host_rss_bytes, device_bytes}: memory of this Python process and of the device; None when neither is known.

    `device` is what a session's `memory()` gives: bytes by arena and their `total`.
    """
    resident = resident_bytes()
    if resident is None and not device:
        return None
    return {"host_rss_bytes": resident, "device_bytes": dict(device) if device else None}


def peak_resident_bytes() -> int | None:
    """The most physical memory that this process has had, where the system tells it, else None."""
    try:
        import resource  # not on Windows

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    except (ImportError, OSError):
        return None
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes() -> int | None:
    """Physical memory of this process where the system tells it without a library (Linux), else None."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
