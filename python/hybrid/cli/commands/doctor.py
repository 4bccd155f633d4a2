"""`hybrid doctor`: what this machine can train on, and what to install where it cannot."""

from __future__ import annotations

import argparse
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hybrid.cli.parser import Subparsers, add_command

PACKAGES = ("numpy", "wgpu", "tokenizers", "safetensors", "pydantic", "rich")
EXTRAS = {  # each is an extra of that name
    "torch": "for --backend torch",
    "tensorboard": "for telemetry.tensorboard",
    "wandb": "for telemetry.wandb",
}

F16_TEXTS = {True: " and mixed-f16", False: " (no mixed-f16 here)", None: ", and mixed-f16 where its adapter can"}

# Limits that decide what fits, and how many bytes or threads WebGPU grants everywhere.
LIMITS = (
    "maxBufferSize",
    "maxStorageBufferBindingSize",
    "maxStorageBuffersPerShaderStage",
    "maxComputeWorkgroupStorageSize",
    "maxComputeInvocationsPerWorkgroup",
)


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = add_command(
        subparsers, "doctor", "what this machine can train on",
        "Lists the GPU adapters with their features, limits and measured subgroup size, and says which backends and\n"
        "precisions run here, and what to install for those that do not.",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    report = examine()
    if arguments.json:
        print(json.dumps(report))
    else:
        print(report_text(report))
    return 0


def examine() -> dict[str, Any]:
    """Everything that the command reports, as plain data."""
    from hybrid import __version__
    from hybrid.backends.webgpu.device import NoAdapter, list_adapters
    from hybrid.resources import cache_folder

    try:
        adapters = [_examine_adapter(adapter) for adapter in list_adapters()]
        problem = "" if any(adapter["works"] for adapter in adapters) else _no_adapter()
    except NoAdapter as error:
        adapters, problem = [], str(error)
    chosen = _chosen()
    return {
        "hybrid": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "extras": {name: {"version": _version(name), "use": use} for name, use in EXTRAS.items()},
        "cache": str(cache_folder("")),
        "adapters": adapters,
        "adapterInUse": chosen,
        "backends": {
            "webgpu": {"runs": chosen is not None, "problem": problem, "mixedF16": _has_f16(adapters, chosen)},
            "reference": {"runs": True, "problem": "", "mixedF16": True},
            "torch": _examine_torch(),
            "browser": _examine_browser(),
        },
    }


def _examine_adapter(adapter: Any) -> dict[str, Any]:
    """One adapter, with what opening it shows. A driver that fails is reported, it does not end the examination."""
    from hybrid.backends.webgpu.device import choose_adapter, open_device, probe_subgroup_size

    facts = {
        "index": adapter.index,
        "name": adapter.name,
        "vendor": adapter.vendor,
        "driver": adapter.description,
        "interface": adapter.backend,
        "kind": adapter.kind,
        "features": sorted(adapter.features),
        "limits": {name: adapter.limits[name] for name in LIMITS if name in adapter.limits},
        "works": False,
        "subgroupSize": None,
        "problem": "",
    }
    try:
        choose_adapter([adapter])
        device = open_device(str(adapter.index))
        try:
            facts["subgroupSize"] = probe_subgroup_size(device)
            facts["works"] = True
        finally:
            device.close()
    except Exception as error:
        facts["problem"] = f"it cannot be opened: {error}"
    return facts


def _examine_torch() -> dict[str, Any]:
    """Version, devices, and whether torch compiles here. Nothing of torch is loaded where it is not installed."""
    from hybrid.errors import MissingDependency

    try:
        from hybrid.backends.torch.examine import examine as examine_torch

        return {"runs": True, "problem": "", "mixedF16": True, **examine_torch()}
    except MissingDependency as error:
        return {"runs": False, "problem": str(error), "mixedF16": None}
    except (ImportError, OSError) as error:  # an installation that is broken
        return {"runs": False, "problem": f"torch cannot be loaded: {error}", "mixedF16": None}


def _examine_browser() -> dict[str, Any]:
    """Whether a page can be served here. mixedF16: null, for only the browser knows its adapter."""
    from hybrid.bridge.launch import check_installation
    from hybrid.errors import HybridError

    try:
        check_installation()
    except HybridError as error:
        return {"runs": False, "problem": str(error), "mixedF16": None}
    return {"runs": True, "problem": "", "mixedF16": None}


def _chosen() -> int | None:
    from hybrid.backends.webgpu.device import NoAdapter, choose_adapter, list_adapters

    try:
        return choose_adapter(list_adapters()).index
    except NoAdapter:
        return None


def _no_adapter() -> str:
    from hybrid.backends.webgpu.device import DRIVER_HINT

    return f"no adapter can be used. {DRIVER_HINT}"


def _has_f16(adapters: list[dict[str, Any]], chosen: int | None) -> bool:
    return any("shader-f16" in adapter["features"] for adapter in adapters if adapter["index"] == chosen)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def report_text(report: dict[str, Any]) -> str:
    """The report for people."""
    from hybrid.training.view import bytes_text

    packages = ", ".join(f"{name} {number or 'MISSING'}" for name, number in report["packages"].items())
    lines = [
        f"hybrid {report['hybrid']}, Python {report['python']}, {report['platform']}",
        f"packages: {packages}",
        f"cache: {report['cache']}",
        "",
        "adapters:" if report["adapters"] else "adapters: none",
    ]
    for adapter in report["adapters"]:
        used = "  (used unless --adapter names another)" if adapter["index"] == report["adapterInUse"] else ""
        lines.append(f"  {adapter['index']}: {adapter['name']} ({adapter['interface']}, {adapter['kind']}){used}")
        if adapter["problem"]:
            lines.append(f"     {adapter['problem']}")
            continue
        limits, features = adapter["limits"], adapter["features"]
        lines.append(f"     driver: {adapter['driver']}")
        lines.append(
            f"     16-bit floats: {_yes('shader-f16' in features)}; timestamps: {_yes('timestamp-query' in features)}; "
            f"subgroup size, measured: {adapter['subgroupSize'] or 'no subgroups'}"
        )
        lines.append(
            f"     buffers up to {bytes_text(limits['maxBufferSize'])}, bindings up to "
            f"{bytes_text(limits['maxStorageBufferBindingSize'])}, {limits['maxStorageBuffersPerShaderStage']} in a "
            f"shader; workgroups of {limits['maxComputeInvocationsPerWorkgroup']} threads with "
            f"{bytes_text(limits['maxComputeWorkgroupStorageSize'])}"
        )
    lines += ["", "backends:"]
    for name, facts in report["backends"].items():
        if facts["runs"]:
            lines.append(f"  {name}: runs; precision f32{F16_TEXTS[facts['mixedF16']]}{_torch_text(facts)}")
        else:
            lines.append(f"  {name}: does not run: {facts['problem']}")
    missing = {name: facts["use"] for name, facts in report["extras"].items() if facts["version"] is None}
    if missing:
        lines += ["", "optional packages that are not installed:"]
        lines += [f"  {name} ({use}): pip install 'hybrid[{name}]'" for name, use in missing.items()]
    return "\n".join(lines)


def _torch_text(facts: dict[str, Any]) -> str:
    """What is known of torch only; empty for other backends."""
    if "compiles" not in facts:
        return ""
    compiles = "compiles" if facts["compiles"] else f"does not compile ({facts['compileProblem']})"
    return f" and mixed-bf16\n     torch {facts['version']} on {', '.join(facts['devices'])}; {compiles}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
