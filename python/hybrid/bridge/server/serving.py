"""A server in a thread of this process."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from hybrid.bridge.server.guard import Asgi, Guard
from hybrid.errors import HybridError

ADDRESS = "127.0.0.1"
NAMES = (ADDRESS, "localhost")
START_SECONDS = 30.0
GRACE_SECONDS = 2  # for answers that are on their way when the server is closed
SILENT_SECONDS = 20.0  # that a connection may last without asking for anything


class Connection(H11Protocol):
    """One that is closed when nothing whole is asked for on it for a while: a process has few, and who knows no token
    could take all of them."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def _watch(self) -> None:
        self._answered = self.cycle
        self.loop.call_later(SILENT_SECONDS, self._look)

    def _look(self) -> None:
        if self.transport.is_closing():
            return
        waits = self.cycle is None or self.cycle.response_complete
        if waits and self.cycle is self._answered:
            self.transport.close()
        else:
            self._watch()


class Server:
    """Serves while the context lasts.

    make_app: the application for the port. address: of this machine, in numbers or by name. port: 0 for a free one.
    closing: called when the server is about to close, for answers that would never end by themselves. Errors:
    HybridError when nothing can be served there.
    """

    def __init__(
        self,
        make_app: Callable[[int], Asgi],
        address: str = ADDRESS,
        port: int = 0,
        closing: Callable[[], None] = lambda: None,
    ) -> None:
        self._closing = closing
        self._address = address
        self._socket = _listening(address, port)
        self.port: int = self._socket.getsockname()[1]
        # Signals belong to the command; its view belongs to the terminal.
        config = uvicorn.Config(
            make_app(self.port), http=Connection, log_config=None, log_level="critical", access_log=False,
            lifespan="off", server_header=False, date_header=False, timeout_graceful_shutdown=GRACE_SECONDS,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="server", daemon=True
        )

    def __enter__(self) -> Server:
        self._thread.start()
        deadline = time.monotonic() + START_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise HybridError(f"the server on {self._address}:{self.port} did not start")
            time.sleep(0.01)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing()
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


class Serving(Server):
    """Serves an application below a token, on a free port of 127.0.0.1. most_bytes: of a request's body."""

    def __init__(self, app: Asgi, most_bytes: int, token: str | None = None) -> None:
        self.token = token or secrets.token_urlsafe(24)
        super().__init__(lambda port: Guard(app, self.token, [f"{name}:{port}" for name in NAMES], most_bytes))

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.port}/{self.token}/"

    def __enter__(self) -> Serving:
        super().__enter__()
        return self


def _listening(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # With its protocol named: asyncio sends small packets at once (TCP_NODELAY) only on such a socket, and without
    # that every answer takes 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if port and hasattr(socket, "SO_REUSEADDR") and not hasattr(socket, "SO_EXCLUSIVEADDRUSE"):
            # After a restart, connections of the server before may linger. (On Windows it would share the port.)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address, port))
        listening.listen()  # until then another server could take the same port
    except OSError as error:
        listening.close()
        place = f"{address}:{port}" if port else address
        raise HybridError(f"no server can be opened on {place}: {error.strerror or error}") from error
    return listening
