"""What the browser tests share: the runtime and the plans, served to a page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from browser.harness import BrowserPage, Chromium, StaticServer
from browser.plan_fixtures import write
from hybrid.resources import resource


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
