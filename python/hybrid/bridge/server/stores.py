"""Token stores of this machine, below one folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hybrid.bridge.server.plain import is_inside
from hybrid.bridge.server.refusals import not_found
from hybrid.bridge.server.runs import NAME
from hybrid.data.manifest import read_manifest
from hybrid.errors import DataContractError

MANIFEST = "manifest.json"

_NAME = re.compile(NAME.removesuffix("$") + r"\Z")


def list_stores(folder: Path) -> list[dict[str, Any]]:
    """Each store with its size, or what is wrong with it."""
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return []
    return [_described(path) for path in paths if _NAME.match(path.name) and _is_store(folder, path)]


def find_store(folder: Path, name: str) -> Path:
    """The folder of a store. Errors: Refusal 404 for a name that is no store's, or leads elsewhere."""
    path = folder / name
    if _NAME.match(name) is None or not _is_store(folder, path):
        raise not_found(f"token store {name!r:.140}")
    return path


def _is_store(folder: Path, path: Path) -> bool:
    try:
        manifest = path / MANIFEST
        return manifest.is_file() and not manifest.is_symlink() and is_inside(path, folder)
    except OSError:
        return False


def _described(path: Path) -> dict[str, Any]:
    known: dict[str, Any] = dict.fromkeys(("tokens", "documents", "vocabularySize", "fingerprint"))
    try:
        manifest = read_manifest(path)
    except DataContractError as error:
        return {"name": path.name, **known, "problem": str(error)}
    return {"name": path.name, **{key: manifest[key] for key in known}, "problem": None}
