"""Where a run runs: runtime, platform, GPU adapter. Only listed fields are kept, so that nothing private slips in."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from typing import Any

from hybrid.contracts.javascript import is_finite_number, is_number, optional_text

ADAPTER_FIELDS = (
    "name",
    "vendor",
    "vendorId",
    "architecture",
    "device",
    "deviceId",
    "description",
    "driver",
    "backend",
    "adapterType",
    "isFallbackAdapter",
)
_ALIASES = {"name": ("name", "adapterName")}

# Names of machines as JavaScript runtimes give them, so that one machine has one name in every log.
_ARCHITECTURES = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "i386": "ia32", "i686": "ia32"}


def gpu_adapter(info: Any) -> dict[str, Any] | None:
    """The listed fields of an adapter description that are text, numbers or booleans; None when there are none.

    Each field is looked for in `info` itself, then in its members `adapter` and `gpu`.
    """
    if not isinstance(info, Mapping):
        return None
    sources = [info, *(info[member] for member in ("adapter", "gpu") if isinstance(info.get(member), Mapping))]
    kept: dict[str, Any] = {}
    for field in ADAPTER_FIELDS:
        values = (source[alias] for source in sources for alias in _ALIASES.get(field, (field,)) if alias in source)
        value = next((value for value in values if isinstance(value, (str, bool)) or is_number(value)), None)
        if value is not None:
            kept[field] = value
    return kept or None


def javascript_environment(
    options: Mapping[str, Any], process: Mapping[str, Any] | None, navigator: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The environment of a JavaScript runtime, from its `process` and `navigator` (None where it lacks them).

    options: command, surface, gpuAdapterInfo. `runtime` is "node" when the process names a Node version, else
    "browser".
    """
    versions = (process or {}).get("versions") or {}
    facts: dict[str, Any] = {"runtime": "node" if versions.get("node") else "browser", **_asked(options)}
    if process is not None and versions.get("node"):
        facts["nodeVersion"] = versions["node"]
        facts["platform"] = process.get("platform")
        facts["arch"] = process.get("arch")
    if navigator is not None:
        threads = navigator.get("hardwareConcurrency")
        facts["userAgent"] = optional_text(navigator.get("userAgent"))
        facts["hardwareConcurrency"] = threads if is_finite_number(threads) else None
    return _with_adapter(facts, options)


def python_environment(options: Mapping[str, Any]) -> dict[str, Any]:
    """The environment of this Python process, in the same words. options: command, surface, gpuAdapterInfo."""
    machine = platform.machine().lower()
    facts = {
        "runtime": "python",
        **_asked(options),
        "pythonVersion": platform.python_version(),
        "platform": sys.platform,
        "arch": _ARCHITECTURES.get(machine, machine),
    }
    return _with_adapter(facts, options)


def _asked(options: Mapping[str, Any]) -> dict[str, str]:
    texts = {name: optional_text(options.get(name)) for name in ("command", "surface")}
    return {name: text for name, text in texts.items() if text}


def _with_adapter(facts: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    adapter = gpu_adapter(options.get("gpuAdapterInfo"))
    return {**facts, "gpuAdapter": adapter} if adapter else facts
