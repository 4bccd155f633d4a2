"""A plan as a folder: `plan.json`, and each binary constant in a file named by its sha256. What an executor in another
process, or in a browser, reads.
"""

from __future__ import annotations

import json
from pathlib import Path

from hybrid.errors import ConfigError
from hybrid.plan.document import Plan

DOCUMENT = "plan.json"


def write_plan(plan: Plan, folder: Path) -> None:
    """Write the folder, which may exist. The document comes last: a reader that finds it finds the constants too."""
    folder.mkdir(parents=True, exist_ok=True)
    for sha, data in plan.constant_data.items():
        (folder / f"{sha}.bin").write_bytes(data)
    (folder / DOCUMENT).write_text(json.dumps(plan.to_json(), separators=(",", ":")), encoding="utf-8")


def read_plan(folder: Path) -> Plan:
    """The plan that `write_plan` wrote, checked like any document. ConfigError for a file that is missing or
    foreign."""
    try:
        document = json.loads((folder / DOCUMENT).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"plan: {folder / DOCUMENT} cannot be read ({error})") from error
    constants = document.get("constants", {}) if isinstance(document, dict) else {}
    names = {str(constant.get("sha256")) for constant in constants.values()}
    found = {name: (folder / f"{name}.bin").read_bytes() for name in names if (folder / f"{name}.bin").is_file()}
    return Plan.from_json(document if isinstance(document, dict) else {}, found)
