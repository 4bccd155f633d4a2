"""Reads the golden vectors of `bridge/vectors/`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "bridge" / "vectors"


def load(name: str) -> dict[str, Any]:
    """The parsed file `<name>.json`. Numbers beyond float64 (1e400) arrive as infinity, as the vectors intend."""
    document: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return document
