"""Errors as answers: `{"error": {"name", "message", "differences"?}}` with a status.

A HybridError that an endpoint raises is a refusal of what was sent (422). `Refusal` is one with another status.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from hybrid.errors import ConfigError, HybridError, LimitExceeded


class Refusal(Exception):
    """An answer with this status and error. more: members beside `error`."""

    def __init__(
        self,
        status: HTTPStatus,
        error: BaseException,
        more: dict[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(str(error))
        self.status = status
        self.error = error
        self.more = more or {}
        self.headers = headers


class TooLarge(HTTPException):
    """The body of a request is longer than any may be. FastAPI passes this one on while it reads a body."""

    def __init__(self, most: int) -> None:
        super().__init__(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {most} bytes")


def json_response(value: Any, status: int = HTTPStatus.OK, headers: Mapping[str, str] | None = None) -> Response:
    """`value` as JSON in ASCII, so that a lone surrogate (of a file name, say) survives. ValueError for NaN."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Response(text, status, headers, media_type="application/json")


def error_facts(error: BaseException) -> dict[str, Any]:
    """An error as JSON: the name of its class, its message, and the differences of a ContractMismatch."""
    differences = [list(row) for row in getattr(error, "differences", ())]
    return {
        "name": type(error).__name__ if isinstance(error, HybridError) else "Error",
        "message": str(error) or type(error).__name__,
        **({"differences": differences} if differences else {}),
    }


def refusal_response(refusal: Refusal) -> Response:
    return json_response({"error": error_facts(refusal.error), **refusal.more}, refusal.status, refusal.headers)


def answer_errors(app: FastAPI) -> None:
    """Let an application answer with typed errors."""

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        return refusal_response(error)

    async def typed(request: Request, error: Exception) -> Response:
        return json_response({"error": error_facts(error)}, HTTPStatus.UNPROCESSABLE_ENTITY)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        place, problem = ".".join(str(part) for part in first["loc"]), first["msg"]
        kind = request.headers.get("content-type", "")
        if place == "body" and not kind.startswith("application/json"):
            problem = f"expected JSON, with the header Content-Type: application/json; it is {kind or 'missing'!r}"
        return json_response(
            {"error": error_facts(ConfigError(f"{place}: {problem}"))}, HTTPStatus.UNPROCESSABLE_ENTITY
        )

    async def plain(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        typed = LimitExceeded if isinstance(error, TooLarge) else HybridError
        return json_response({"error": error_facts(typed(str(error.detail)))}, error.status_code, error.headers)

    app.add_exception_handler(Refusal, refused)
    app.add_exception_handler(HybridError, typed)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, plain)


def no_room(message: str) -> Refusal:
    return Refusal(HTTPStatus.INSUFFICIENT_STORAGE, HybridError(message))


def not_found(what: str) -> Refusal:
    return Refusal(HTTPStatus.NOT_FOUND, HybridError(f"{what:.300}: there is no such file here"))
