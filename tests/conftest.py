"""What a test needs beside Python (markers `webgpu`, `swiftshader`, `torch`), and what happens where it is missing.

A missing one skips the tests with a reason that the summary prints. Where HYBRID_REQUIRE names it (CI does), they fail.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

SWIFTSHADER = Path(os.environ.get("HYBRID_SWIFTSHADER_ICD", "/usr/lib/chromium/vk_swiftshader_icd.json"))

if not os.environ.get("XDG_RUNTIME_DIR"):  # Vulkan's loader complains without one
    os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="hybrid-runtime-")


def adapter_problem(environment: dict[str, str]) -> str | None:
    """Why wgpu finds no adapter, asked in a process of its own: two Vulkan drivers do not share one."""
    if find_spec("wgpu") is None:
        return "the package wgpu is not installed"
    script = "import wgpu; print(wgpu.gpu.request_adapter_sync().summary)"
    run = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | environment, capture_output=True, text=True, timeout=120
    )
    if run.returncode == 0:
        return None
    return "no WebGPU adapter: " + (run.stderr.strip().splitlines() or ["no message"])[-1]


def webgpu_problem() -> str | None:
    problem = adapter_problem({})
    return problem and f"{problem} (Debian: apt-get install mesa-vulkan-drivers)"


def swiftshader_problem() -> str | None:
    if not SWIFTSHADER.exists():
        return f"no SwiftShader driver at {SWIFTSHADER} (Debian: apt-get install chromium)"
    return adapter_problem({"VK_ICD_FILENAMES": str(SWIFTSHADER)})


def torch_problem() -> str | None:
    return None if find_spec("torch") else "the package torch is not installed: pip install 'hybrid[torch]'"


PROBLEMS: dict[str, Callable[[], str | None]] = {
    "webgpu": cache(webgpu_problem),
    "swiftshader": cache(swiftshader_problem),
    "torch": cache(torch_problem),
}


def required() -> set[str]:
    return {name.strip() for name in os.environ.get("HYBRID_REQUIRE", "").split(",") if name.strip()}


def pytest_configure(config: pytest.Config) -> None:
    unknown = required() - set(PROBLEMS)
    if unknown:
        raise pytest.UsageError(f"HYBRID_REQUIRE names {sorted(unknown)}; it may name {sorted(PROBLEMS)}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name, problem in PROBLEMS.items():
        if item.get_closest_marker(name) and (reason := problem()):
            if name in required():
                pytest.fail(f"HYBRID_REQUIRE names {name}, and {reason}", pytrace=False)
            pytest.skip(reason)
