"""`hybrid serve`: everything of this folder together, until it is told to stop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hybrid.bridge.server.app import MOST_BYTES, serve_app
from hybrid.bridge.server.guard import Asgi
from hybrid.bridge.server.hub import Hub
from hybrid.bridge.server.imports import Imports
from hybrid.bridge.server.login import TokenGate, is_loopback
from hybrid.bridge.server.pages import Export, Site, export_for_server, watch_page
from hybrid.bridge.server.plans import PlanShelf
from hybrid.bridge.server.runs import RunFolders
from hybrid.bridge.server.serving import ADDRESS, Server
from hybrid.errors import HybridError

DEFAULT_PORT = 8321
NEXT_PORTS = 20  # tried when nobody asked for a port and the usual one is taken
KEPT_PLANS = 32


@dataclass(frozen=True)
class Options:
    """runs, data: the folders of runs and of token stores. port: None for the usual one or one of the next.
    most_upload: bytes. plans: where compiled plans are kept for the next server; None: nowhere."""

    runs: Path
    data: Path
    token: str
    host: str = ADDRESS
    port: int | None = None
    most_upload: int = 4 * 2**30
    plans: Path | None = None


@dataclass(frozen=True)
class Place:
    """A server that runs: its port, and the address to open."""

    port: int
    url: str


@contextlib.contextmanager
def serving(options: Options, export: Export = export_for_server) -> Iterator[Place]:
    """Serve while the context lasts. export: writes the page. Errors: HybridError when the page is not
    built, or nothing can be served there."""
    with contextlib.ExitStack() as stack:
        site = Site(export)
        stack.callback(site.close)
        shelf = PlanShelf(KEPT_PLANS, options.plans)
        stack.callback(shelf.close)
        hub = Hub()
        imports = Imports(options.runs, options.most_upload)
        app = serve_app(RunFolders(options.runs), options.data, hub, imports, shelf, site, watch_page())

        def gate(port: int) -> Asgi:
            return TokenGate(app, options.token, options.host, port, MOST_BYTES)

        server = stack.enter_context(_server(options, gate, hub.close))
        yield Place(server.port, f"http://{_shown(options.host)}:{server.port}/?token={options.token}")


def warning(host: str) -> str | None:
    """What to say about a server that others can reach; None for one that they cannot."""
    if is_loopback(host):
        return None
    return (
        f"warning: with --host {host}, whoever reaches this machine and knows the token can read its runs and upload "
        "checkpoints, and the connection is not encrypted: whoever is on its way can read the token"
    )


def _server(options: Options, gate: Callable[[int], Asgi], closing: Callable[[], None]) -> Server:
    if options.port is not None:
        return Server(gate, options.host, options.port, closing)
    for port in range(DEFAULT_PORT, DEFAULT_PORT + NEXT_PORTS):
        with contextlib.suppress(HybridError):
            return Server(gate, options.host, port, closing)
    return Server(gate, options.host, 0, closing)


def _shown(host: str) -> str:
    """What people type for an address that a server listens on."""
    if host in ("0.0.0.0", "::"):
        return ADDRESS
    return f"[{host}]" if ":" in host else host
