"""Puts the built page into the wheel, where there is one: `make wheel` builds it first, and only that needs Node.js."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PAGE = "web/dist"
LEFT_OUT = {"pyodide"}  # 19 MB that few want: docs/decisions/0006-python-beside-the-page.md


class CustomBuildHook(BuildHookInterface):
    """Of the wheel target."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return  # the checkout is used as it lies
        page = Path(self.root) / PAGE
        if page.is_dir():
            for part in page.iterdir():
                if part.name not in LEFT_OUT:
                    build_data["force_include"][str(part)] = f"hybrid/_shared/{PAGE}/{part.name}"
        else:
            self.app.display_warning(f"{PAGE} is missing: this wheel cannot train in a browser; `make wheel` builds it")
