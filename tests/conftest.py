"""What tests may need beyond the core install, and what happens when it is missing.

A test says with a marker what it needs (`webgpu`, `swiftshader`, `torch`, `browser`, `node`). Where that is missing the
test is skipped, and the summary says how many and why. HYBRID_REQUIRE=webgpu,swiftshader,torch,browser,node turns a
missing one into a failure of the whole session: CI sets it, so that nothing goes untested unnoticed. `acceptance` tests
are long; they run when the `-m` expression names them.

The whole session has a cache of its own (HYBRID_CACHE): nothing that tests time or build stays with the user, and
nothing that the user's cache holds changes a test.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from hybrid.errors import HybridError

# Where Chromium builds keep the manifest of their software Vulkan driver.
SWIFTSHADER_FOLDERS = (
    "/usr/lib/chromium",
    "/usr/lib/chromium-browser",
    "/usr/lib64/chromium-browser",
    "/opt/google/chrome",
    "/opt/chromium.org/chromium",
    "/snap/chromium/current/usr/lib/chromium-browser",
    "~/.cache/ms-playwright",
)


def swiftshader_icd() -> Path | None:
    """Chromium's `vk_swiftshader_icd.json`, or None."""
    for folder in SWIFTSHADER_FOLDERS:
        root = Path(folder).expanduser()
        for pattern in ("vk_swiftshader_icd.json", "chromium-*/chrome-linux*/vk_swiftshader_icd.json"):
            found = sorted(root.glob(pattern))
            if found:
                return found[-1]
    return None


def _why_no_webgpu() -> str | None:
    from hybrid.backends.webgpu.device import open_device

    try:
        open_device(features=(), default_limits=True).close()
    except HybridError as error:
        return str(error)
    return None


def _why_no_swiftshader() -> str | None:
    if swiftshader_icd() is None:
        return "no vk_swiftshader_icd.json in any of Chromium's usual folders: apt install chromium"
    return _why_no_wgpu_package()


def _why_no_wgpu_package() -> str | None:
    return None if importlib.util.find_spec("wgpu") else "the Python package wgpu is not installed"


def _why_no_torch() -> str | None:
    return None if importlib.util.find_spec("torch") else "torch is not installed: pip install 'hybrid[torch]'"


def _why_no_browser() -> str | None:
    from browser.harness import why_no_browser

    return why_no_browser()


OLDEST_NODE = 20


def _why_no_node() -> str | None:
    if shutil.which("node") is None:
        return f"node is not on PATH: install Node.js {OLDEST_NODE} or newer"
    version = subprocess.run(["node", "--version"], capture_output=True, text=True).stdout.strip()
    major = version.removeprefix("v").split(".")[0]
    if not major.isdigit() or int(major) < OLDEST_NODE:
        return f"node is {version or 'broken'}: install Node.js {OLDEST_NODE} or newer"
    return None


_CHECKS = {
    "webgpu": _why_no_webgpu,
    "swiftshader": _why_no_swiftshader,
    "torch": _why_no_torch,
    "browser": _why_no_browser,
    "node": _why_no_node,
}


@cache
def missing(requirement: str) -> str | None:
    """Why `requirement` cannot be used here, or None when it can."""
    return _CHECKS[requirement]()


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # a worker of pytest-xdist inherits it
        folder = tempfile.TemporaryDirectory(prefix="hybrid-test-cache-", ignore_cleanup_errors=True)
        patch = pytest.MonkeyPatch()
        patch.setenv("HYBRID_CACHE", folder.name)
        config.add_cleanup(patch.undo)
        config.add_cleanup(folder.cleanup)
    if config.option.markexpr == "acceptance":
        from acceptance import recording

        config.pluginmanager.register(recording)


def pytest_sessionstart(session: pytest.Session) -> None:
    required = [name.strip() for name in os.environ.get("HYBRID_REQUIRE", "").split(",") if name.strip()]
    for name in required:
        if name not in _CHECKS:
            raise pytest.UsageError(f"HYBRID_REQUIRE names {name!r}: expected some of {', '.join(_CHECKS)}")
        reason = missing(name)
        if reason is not None:
            raise pytest.UsageError(f"HYBRID_REQUIRE names {name!r}, which is missing: {reason}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wants_acceptance = "acceptance" in (config.option.markexpr or "")
    for item in items:
        if item.get_closest_marker("acceptance"):
            item.add_marker(pytest.mark.timeout(0))
            if not wants_acceptance:
                _skip(item, "acceptance", "a long check: run it with `make acceptance` or -m acceptance")
                continue
        for name in _CHECKS:
            reason = missing(name) if item.get_closest_marker(name) else None
            if reason is not None:
                _skip(item, name, reason)
                break


def _skip(item: pytest.Item, name: str, reason: str) -> None:
    item.add_marker(pytest.mark.skip(reason=f"needs {name}: {reason}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """From the reports, which arrive from workers of pytest-xdist too."""
    reports = [report for report in terminalreporter.stats.get("skipped", ()) if isinstance(report.longrepr, tuple)]
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    if not reasons:
        return
    terminalreporter.section("not run")
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"{count} test(s): {reason}")


@pytest.fixture(scope="session")
def chromium():  # type: ignore[no-untyped-def]
    """A browser for the whole session: see `browser.harness`."""
    from browser.harness import Chromium

    with Chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def device():  # type: ignore[no-untyped-def]
    """The WebGPU device of the kernel tests, with WebGPU's default limits: what runs there runs everywhere."""
    from kernels.harness import shared_device

    return shared_device()


@pytest.fixture
def f16_device(device):  # type: ignore[no-untyped-def]
    """The same device; the test is skipped where it lacks shader-f16."""
    if not device.has_f16:
        pytest.skip(f"{device.name} lacks shader-f16")
    return device


@pytest.fixture(params=["f32", "mixed-f16"])
def precision(request: pytest.FixtureRequest) -> str:
    """Each precision; mixed-f16 needs `f16_device`."""
    if request.param == "mixed-f16":
        request.getfixturevalue("f16_device")
    return str(request.param)
