"""A server in a thread of this process, on a free port of 127.0.0.1."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from types import TracebackType

import uvicorn

from hybrid.bridge.server.guard import Asgi, Guard
from hybrid.errors import HybridError

ADDRESS = "127.0.0.1"
NAMES = (ADDRESS, "localhost")
START_SECONDS = 30.0
GRACE_SECONDS = 2  # for answers that are on their way when the server is closed


class Serving:
    """Serves an application behind a guard while the context lasts. most_bytes: of a request's body."""

    def __init__(self, app: Asgi, most_bytes: int, token: str | None = None) -> None:
        self.token = token or secrets.token_urlsafe(24)
        # With its protocol named: asyncio sends small packets at once (TCP_NODELAY) only on such a socket, and without
        # that every answer takes 40 ms.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            self._socket.bind((ADDRESS, 0))
        except OSError as error:
            self._socket.close()
            raise HybridError(f"no server can be opened on {ADDRESS}: {error.strerror or error}") from error
        self.port: int = self._socket.getsockname()[1]
        guard = Guard(app, self.token, [f"{name}:{self.port}" for name in NAMES], most_bytes)
        # Signals belong to the run; its view belongs to the terminal.
        config = uvicorn.Config(
            guard, log_config=None, log_level="critical", access_log=False, lifespan="off", server_header=False,
            date_header=False, timeout_graceful_shutdown=GRACE_SECONDS,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="server", daemon=True
        )

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.port}/{self.token}/"

    def __enter__(self) -> Serving:
        self._thread.start()
        deadline = time.monotonic() + START_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise HybridError(f"the server on {ADDRESS}:{self.port} did not start")
            time.sleep(0.01)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
