"""Where the files outside the Python package lie: `shaders/`, `bridge/`, `web/`.

A wheel carries them in `hybrid/_shared`; an editable install finds them in the checkout.
"""

from __future__ import annotations

from pathlib import Path

from hybrid.errors import HybridError


def resource(relative: str) -> Path:
    """The path of a shipped file or folder, such as `shaders/matmul.wgsl`; HybridError if this installation lacks it."""
    package = Path(__file__).resolve().parent
    for root in (package / "_shared", package.parents[1]):
        candidate = root / relative
        if candidate.exists():
            return candidate
    raise HybridError(f"this installation lacks {relative!r}: install the wheel or work from a whole checkout")
