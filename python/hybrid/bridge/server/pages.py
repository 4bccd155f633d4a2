"""The pages of a server: the one that trains in a tab, with its plans and text, and the one that watches runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fastapi import Request
from fastapi.responses import Response

from hybrid.bridge.server.files import Kept, send_file
from hybrid.bridge.server.temporary import TemporaryFolder
from hybrid.bridge.site import PAGE, built_python, export_site
from hybrid.errors import HybridError
from hybrid.resources import resource

INDEX = "index.html"
WATCH = "web/dist/watch"
PLANNER = "api/plans"

Export = Callable[[Path], None]


def built_page(page: str = PAGE) -> Path:
    """The folder of a built page. HybridError with what to do if there is none."""
    try:
        return resource(f"{page}/{INDEX}").parent
    except HybridError:
        raise HybridError(
            f"{page} is not built: run `make web` in the checkout (a wheel has it built in); it needs Node.js 20"
        ) from None


def export_for_server(out: Path) -> None:
    """What `export-site` writes, with the address where this server compiles plans in place of plans."""
    export_site(out, python=built_python(), server=PLANNER)


class Site:
    """The page that trains, as it was when the server began. Errors of `built_page`, and of its export."""

    def __init__(self, export: Export = export_for_server) -> None:
        built_page()
        self._temporary = TemporaryFolder("hybrid-site-")
        self._folder = self._temporary.path / "site"
        try:
            export(self._folder)
        except BaseException:
            self.close()
            raise

    def send(self, request: Request, name: str) -> Response:
        """A file of the page. Errors: Refusal."""
        return send_file(request, self._folder, name, Kept.CHECKED)

    def close(self) -> None:
        self._temporary.close()


def watch_page() -> Path:
    """The folder of the page that watches runs. HybridError if it is not built."""
    return built_page(WATCH)
