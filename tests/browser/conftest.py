"""What the browser tests share: the runtime and the plans, served to a page."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser.harness import BrowserPage, Chromium, StaticServer
from browser.plan_fixtures import write
from hybrid.resources import resource

BUILD = "import('./build_pyodide.js').then((build) => build.buildPyodide(process.argv[1])).then(() => process.exit(0))"


@pytest.fixture(scope="session")
def python_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python in the tab, built from the sources as they are."""
    folder = tmp_path_factory.mktemp("bundle")
    subprocess.run(
        ["node", "-e", BUILD, str(folder)], cwd=resource("web"), check=True, capture_output=True, timeout=300
    )
    return folder


@pytest.fixture(scope="session")
def plan_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plans and expected numbers of `plan_fixtures`."""
    folder = tmp_path_factory.mktemp("plans")
    write(folder)
    return folder


@pytest.fixture(scope="session")
def server(plan_folder: Path) -> Iterator[StaticServer]:
    web = resource("web")
    folders = {"/runtime/": web / "runtime", "/test/": web / "test", "/plans/": plan_folder}
    with StaticServer(folders) as running:
        yield running


@pytest.fixture
def page(chromium: Chromium, server: StaticServer) -> Iterator[BrowserPage]:
    """A fresh page, with storage of its own."""
    opened = chromium.open(server)
    yield opened
    opened.close()
