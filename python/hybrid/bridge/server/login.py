"""Who may ask a server that people come back to: whoever shows its token, once, and from then on that browser.

The address with `?token=` gives the browser a cookie and is left at once for the same address without the token, so
that no history and no link keeps it. The cookie is kept from every page of another site (SameSite=Strict) and from all
scripts. Programs send `Authorization: token TOKEN`.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
import socket
from http import HTTPStatus
from urllib.parse import parse_qsl, urlencode

from fastapi.responses import Response

from hybrid.bridge.server.guard import HEADERS, POLICY, Asgi, Fields, Gate, Scope
from hybrid.bridge.server.refusals import Refusal
from hybrid.errors import ConfigError, HybridError

PARAMETER = "token"
LEAST_TOKEN = 16
HTTP_PORT = 80

# WebAssembly is compiled, and no text is run as a program.
_HEADERS = {
    **HEADERS,
    "Content-Security-Policy": POLICY.replace(
        "default-src 'self';", "default-src 'self'; script-src 'self' 'wasm-unsafe-eval';"
    ),
}
_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,200}\Z")


def make_token(wanted: str | None) -> str:
    """`wanted`, or a token that nobody can guess. ConfigError for one that is too short or would not survive in an
    address; it does not repeat it."""
    if wanted is None:
        return secrets.token_urlsafe(24)
    if not _TOKEN.match(wanted):
        raise ConfigError(
            f"the token has {len(wanted)} characters: expected {LEAST_TOKEN} to 200 letters, digits, '-' and '_'"
        )
    return wanted


def cookie_name(port: int) -> str:
    """Cookies know no ports, so servers on one machine need names of their own."""
    return f"hybrid-{port}"


class TokenGate(Gate):
    """The whole server behind one token. address: what it listens on. most_bytes: of a request's body."""

    def __init__(self, app: Asgi, token: str, address: str, port: int, most_bytes: int) -> None:
        super().__init__(app, lambda host: is_own_host(host, address, port), most_bytes, _HEADERS)
        self._token = token.encode("ascii")
        self._cookie = cookie_name(port)

    def admitted(self, scope: Scope, fields: Fields) -> Scope | Response:
        self.check_sender(fields)
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        shown = [value for name, value in query if name == PARAMETER]
        if shown and scope["method"] == "GET":
            self._check(shown[0].encode("utf-8", "surrogateescape"))
            return self._remember(scope, [pair for pair in query if pair[0] != PARAMETER])
        self._check(self._known(fields))
        self.check_length(fields)
        return scope

    def _check(self, shown: bytes | None) -> None:
        if shown is None or not hmac.compare_digest(shown, self._token):
            problem = "is missing" if shown is None else "is another one"
            error = HybridError(f"the token {problem}: open the address that `hybrid serve` printed")
            raise Refusal(HTTPStatus.UNAUTHORIZED, error, headers={"WWW-Authenticate": "token"})

    def _known(self, fields: Fields) -> bytes | None:
        for value in fields.get(b"authorization", []):
            scheme, _, token = value.partition(b" ")
            if scheme.lower() in (b"token", b"bearer"):
                return token.strip()
        # By hand: whatever else is served on this machine, on other ports, sets cookies for this host as well, and a
        # parser that minds the look of one of those would find none.
        for value in fields.get(b"cookie", []):
            for cookie in value.split(b";"):
                name, _, token = cookie.strip().partition(b"=")
                if name == self._cookie.encode():
                    return token.strip(b'"')
        return None

    def _remember(self, scope: Scope, query: list[tuple[str, str]]) -> Response:
        # One slash in front: with two it would be another host's address.
        path = "/" + scope.get("raw_path", b"/").decode("latin-1").split("?")[0].lstrip("/\\")
        place = path + (f"?{urlencode(query)}" if query else "")
        cookie = f"{self._cookie}={self._token.decode()}; Path=/; HttpOnly; SameSite=Strict"
        return Response(None, HTTPStatus.SEE_OTHER, {"Location": place, "Set-Cookie": cookie})


def is_own_host(host: str, address: str, port: int) -> bool:
    """Whether the header Host, in lower case, names a server that listens on this address and port.

    On one that is not loopback: the address itself, this machine's name, or any address in numbers (a stranger's DNS
    makes names only).
    """
    name, separator, digits = host.rpartition(":")
    if port == HTTP_PORT and (not separator or host.endswith("]")):
        name = host  # browsers leave that one out
    elif not separator or digits != str(port):
        return False
    if name in ("127.0.0.1", "localhost", "[::1]"):
        return True
    if is_loopback(address):
        return name == address.lower()
    return name in (address.lower(), f"[{address.lower()}]", socket.gethostname().lower()) or _is_number(name)


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    if address.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _is_number(name: str) -> bool:
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") and name.endswith("]") else name)
    except ValueError:
        return False
    return True
