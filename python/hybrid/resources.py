"""Where the files outside the Python package lie: `shaders/`, `bridge/`, `web/`.

A wheel carries them in `hybrid/_shared`; an editable install finds them in the checkout.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hybrid.errors import HybridError


def resource(relative: str) -> Path:
    """The path of a shipped file or folder, such as `shaders/norm.wgsl`; HybridError if this installation lacks it."""
    package = Path(__file__).resolve().parent
    for root in (package / "_shared", package.parents[1]):
        candidate = root / relative
        if candidate.exists():
            return candidate
    raise HybridError(f"this installation lacks {relative!r}: install the wheel or work from a whole checkout")


def cache_folder(name: str) -> Path:
    """The folder `name` in the user's cache (not created): HYBRID_CACHE, else the platform's place for caches."""
    override = os.environ.get("HYBRID_CACHE")
    if override:
        return Path(override) / name
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "hybrid" / name
