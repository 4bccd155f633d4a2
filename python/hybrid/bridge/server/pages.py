"""The pages of a server: the one that trains in a tab, with its plans and text, and the one that watches runs."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from fastapi import Request
from fastapi.responses import Response

from hybrid.bridge.server.files import send_file
from hybrid.bridge.server.refusals import Refusal
from hybrid.bridge.server.temporary import TemporaryFolder
from hybrid.bridge.site import PAGE, built_python, export_site
from hybrid.errors import HybridError, StopRequested
from hybrid.resources import resource

INDEX = "index.html"
WATCH = "web/dist/watch"
PLANNER = "api/plans"
EXPORT_SECONDS = 120.0

Note = Callable[[str], None]
Export = Callable[[Path, Note], None]


def built_page(page: str = PAGE) -> Path:
    """The folder of a built page. HybridError with what to do if there is none."""
    try:
        return resource(f"{page}/{INDEX}").parent
    except HybridError:
        raise HybridError(
            f"{page} is not built: run `make web` in the checkout (a wheel has it built in); it needs Node.js 20"
        ) from None


def export_for_server(out: Path, note: Note) -> None:
    """What `export-site` writes, with the address where this server compiles plans. note: told of each part."""
    export_site(out, note=note, python=built_python(), server=PLANNER)


class Site:
    """The page that trains. Compiling its plans takes seconds, so that happens beside: until then it is served as it
    was built, and who asks for more waits. Errors of `built_page`."""

    def __init__(self, export: Export = export_for_server) -> None:
        self._built = built_page()
        self._temporary = TemporaryFolder("hybrid-site-")
        self._folder = self._temporary.path / "site"
        self._export = export
        self._problem: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._write, name="export", daemon=True)
        self._thread.start()

    def send(self, request: Request, name: str) -> Response:
        """A file of the page. Errors: Refusal; HybridError when the plans could not be compiled."""
        if self._thread.is_alive() or self._problem is not None:
            try:
                return send_file(request, self._built, name)
            except Refusal:
                self._thread.join(EXPORT_SECONDS)
        if self._problem is not None:
            raise HybridError(f"the plans of the page could not be compiled: {self._problem}") from self._problem
        return send_file(request, self._folder, name)

    def close(self) -> None:
        """What is still compiled is given up."""
        self._closed = True
        self._thread.join(EXPORT_SECONDS)
        self._temporary.close()

    def _write(self) -> None:
        try:
            self._export(self._folder, self._go_on)
        except Exception as error:  # whatever it is, who asks for a plan is told
            self._problem = error
            shutil.rmtree(self._folder, ignore_errors=True)

    def _go_on(self, part: str) -> None:
        if self._closed:
            raise StopRequested(f"the server has ended: {part} was the last part")


def watch_page() -> Path:
    """The folder of the page that watches runs. HybridError if it is not built."""
    return built_page(WATCH)
