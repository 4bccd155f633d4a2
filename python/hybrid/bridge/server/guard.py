"""Who may ask: only a page that this server has served itself, at an address that nobody can guess.

A server on loopback can be reached by every page that is open in a browser of this machine. So a request needs the
token in its path (others get 404, and learn nothing); its Host must be this server's, or a name that a stranger's DNS
points at 127.0.0.1 would do; and its Origin, which browsers send with everything that changes something, must be this
server too.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http import HTTPStatus
from typing import Any

from hybrid.bridge.server.refusals import Refusal, TooLarge, not_found, refusal_response
from hybrid.errors import HybridError, LimitExceeded

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

# Nothing is loaded from elsewhere, kept, framed, or named to others. Cross-origin isolation gives precise clocks and
# shared memory.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "object-src 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Guard:
    """Wraps an application: below `/<token>/` of these hosts (`127.0.0.1:8000`) it sees its own paths, and nothing
    else. most_bytes: of a request's body."""

    def __init__(self, app: Asgi, token: str, hosts: Iterable[str], most_bytes: int) -> None:
        self._app = app
        self._prefix = f"/{token}/".encode("ascii")
        self._hosts = frozenset(hosts)
        self._most = most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # `lifespan`; a websocket is closed by an application that has none
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *extra]}
            await send(message)

        path = scope["path"].encode("utf-8", "surrogateescape")
        refusal = self._problem(path, scope)
        if refusal is not None:
            await refusal_response(refusal)(scope, receive, send_with_headers)
            return
        inner = path[len(self._prefix) - 1 :]
        scope = {**scope, "path": inner.decode("utf-8", "surrogateescape"), "raw_path": inner}
        await self._app(scope, self._counted(receive), send_with_headers)

    def _problem(self, path: bytes, scope: Scope) -> Refusal | None:
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        if not hmac.compare_digest(path[: len(self._prefix)], self._prefix):
            return not_found("the address")
        hosts = [value.decode("latin-1").lower() for value in headers.get(b"host", [])]
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            return _forbidden("Host", hosts)
        origins = [value.decode("latin-1").lower() for value in headers.get(b"origin", [])]
        if any(origin != f"http://{hosts[0]}" for origin in origins):
            return _forbidden("Origin", origins)
        sites = [value.decode("latin-1").lower() for value in headers.get(b"sec-fetch-site", [])]
        if any(site not in ("same-origin", "none") for site in sites):
            return _forbidden("Sec-Fetch-Site", sites)
        lengths = headers.get(b"content-length", [])
        if any(not length.isdigit() or len(length) > 15 or int(length) > self._most for length in lengths):
            error = LimitExceeded(f"the body of a request has at most {self._most} bytes")
            return Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, error)
        return None

    def _counted(self, receive: Receive) -> Receive:
        """A body that was sent without its length is cut off as well."""
        seen = 0

        async def receive_some() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._most:
                raise TooLarge(self._most)
            return message

        return receive_some


def _forbidden(header: str, values: list[str]) -> Refusal:
    shown = ", ".join(values)[:200] or "missing"
    return Refusal(HTTPStatus.FORBIDDEN, HybridError(f"{header} is {shown}: only this server's own page may ask"))
