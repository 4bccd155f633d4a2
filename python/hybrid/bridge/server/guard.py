"""Who may ask: only a page that this server has served itself, and whoever knows its token.

A server on loopback can be reached by every page that is open in a browser of this machine. So a request needs the
token (in its path here, where others get 404 and learn nothing; `login` has another way); its Host must be this
server's, or a name that a stranger's DNS points at 127.0.0.1 would do; and its Origin, which browsers send with
everything that changes something, must be this server too.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from http import HTTPStatus
from typing import Any

from fastapi.responses import Response

from hybrid.bridge.server.refusals import Refusal, TooLarge, not_found, refusal_response
from hybrid.errors import HybridError, LimitExceeded

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

# Nothing is loaded from elsewhere, framed, named to others, or kept, unless an answer itself says that it may be.
# Cross-origin isolation gives precise clocks and shared memory.
POLICY = (
    "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'"
)
NEVER = "no-store"
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": NEVER,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

Fields = Mapping[bytes, list[bytes]]  # the headers of a request, by name in lower case


class Gate:
    """Wraps an application: it sees what `admitted` lets through, and every answer gets `headers`.

    is_host: whether a Host (`127.0.0.1:8000`) is this server. most_bytes: of a request's body.
    """

    def __init__(
        self, app: Asgi, is_host: Callable[[str], bool], most_bytes: int, headers: Mapping[str, str] = HEADERS
    ) -> None:
        self._app = app
        self._is_host = is_host
        self._most = most_bytes
        self._headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    def admitted(self, scope: Scope, fields: Fields) -> Scope | Response:
        """The request as the application is to see it, or what is answered in its place. Errors: Refusal."""
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # `lifespan`; a websocket is closed by an application that has none
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = message.get("headers", ())
                given = {name.lower() for name, _ in own}
                extra = [(name, value) for name, value in self._headers if name not in given]
                message = {**message, "headers": [*own, *extra]}
            await send(message)

        fields: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            fields.setdefault(name.lower(), []).append(value)
        try:
            found = self.admitted(scope, fields)
        except Refusal as refusal:
            found = refusal_response(refusal)
        if isinstance(found, Response):
            await found(scope, receive, send_with_headers)
        else:
            await self._app(found, self._counted(receive), send_with_headers)

    def check_sender(self, fields: Fields) -> None:
        """Refusal 403 for a request that another site has made, or one that was meant for another."""
        hosts = _texts(fields, b"host")
        if len(hosts) != 1 or not self._is_host(hosts[0]):
            raise _forbidden("Host", hosts)
        origins = _texts(fields, b"origin")
        if any(origin != f"http://{hosts[0]}" for origin in origins):
            raise _forbidden("Origin", origins)
        sites = _texts(fields, b"sec-fetch-site")
        if any(site not in ("same-origin", "none") for site in sites):
            raise _forbidden("Sec-Fetch-Site", sites)

    def check_length(self, fields: Fields) -> None:
        """Refusal 413 for a body that is announced to be longer than any may be."""
        lengths = fields.get(b"content-length", [])
        if any(not length.isdigit() or len(length) > 15 or int(length) > self._most for length in lengths):
            error = LimitExceeded(f"the body of a request has at most {self._most} bytes")
            raise Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, error)

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


class Guard(Gate):
    """Below `/<token>/` of these hosts the application sees its own paths, and nothing else."""

    def __init__(self, app: Asgi, token: str, hosts: Iterable[str], most_bytes: int) -> None:
        super().__init__(app, frozenset(hosts).__contains__, most_bytes)
        self._prefix = f"/{token}/".encode("ascii")

    def admitted(self, scope: Scope, fields: Fields) -> Scope | Response:
        path = scope["path"].encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(path[: len(self._prefix)], self._prefix):
            raise not_found("the address")
        self.check_sender(fields)
        self.check_length(fields)
        inner = path[len(self._prefix) - 1 :]
        return {**scope, "path": inner.decode("utf-8", "surrogateescape"), "raw_path": inner}


def _texts(fields: Fields, name: bytes) -> list[str]:
    return [value.decode("latin-1").lower() for value in fields.get(name, [])]


def _forbidden(header: str, values: list[str]) -> Refusal:
    shown = ", ".join(values)[:200] or "missing"
    return Refusal(HTTPStatus.FORBIDDEN, HybridError(f"{header} is {shown}: only this server's own page may ask"))
