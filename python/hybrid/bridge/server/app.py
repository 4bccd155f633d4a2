"""The addresses of `hybrid serve`, and what all of them have in common."""

from __future__ import annotations

import logging
from http import HTTPStatus
from pathlib import Path as Folder
from typing import Annotated, Any, Protocol

from fastapi import FastAPI, Path, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import RedirectResponse, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from hybrid import __version__
from hybrid.bridge.server import answers
from hybrid.bridge.server.answers import FILE_NAME, errors, file_answers
from hybrid.bridge.server.files import Kept, send_file
from hybrid.bridge.server.hub import Hub
from hybrid.bridge.server.imports import Imports
from hybrid.bridge.server.planning import plan_settings_of
from hybrid.bridge.server.plans import PlanShelf, profile_of
from hybrid.bridge.server.refusals import Refusal, answer_errors, error_facts, json_response, refusal_response
from hybrid.bridge.server.routes_runs import add_run_routes
from hybrid.bridge.server.routes_uploads import add_upload_routes
from hybrid.bridge.server.runs import NAME, RunFolders
from hybrid.bridge.server.stores import find_store, list_stores
from hybrid.bridge.server.uploads import PIECE_BYTES
from hybrid.errors import HybridError

MOST_BYTES = PIECE_BYTES  # of any request's body
INDEX = "index.html"

Name = Annotated[str, Path(pattern=FILE_NAME)]

log = logging.getLogger(__name__)


class Page(Protocol):
    """Something that sends the files of a page."""

    def send(self, request: Request, name: str) -> Response: ...


def serve_app(
    folders: RunFolders, data: Folder, hub: Hub, imports: Imports, shelf: PlanShelf, page: Page, watch: Folder | None
) -> FastAPI:
    """data: the folder of token stores. page: the one that trains. watch: the folder of the one that watches runs."""
    app = FastAPI(
        title="hybrid", version=__version__, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        description="Runs, plans, token stores and checkpoints of this machine: docs/server.md.",
    )  # fmt: skip
    answer_errors(app)

    async def broken(request: Request, error: Exception) -> Response:
        if not isinstance(error, ClientDisconnect):
            log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return json_response({"error": error_facts(error)}, HTTPStatus.INTERNAL_SERVER_ERROR)

    async def wrong_method(request: Request, error: Exception) -> Response:
        return _method_refused(app, request)

    app.add_exception_handler(Exception, broken)
    app.add_exception_handler(HTTPStatus.METHOD_NOT_ALLOWED, wrong_method)
    add_run_routes(app, folders, hub)
    add_upload_routes(app, imports)

    @app.get("/api/server", response_model=answers.ServerFacts, responses=errors(), summary="This server")
    def server() -> Response:
        return json_response(
            {
                "version": __version__,
                "runs": str(folders.folder),
                "data": str(data),
                "maxUpload": imports.most_bytes,
                "pieceBytes": MOST_BYTES,
            }
        )

    @app.post(
        "/api/plans", response_model=answers.PlanPlace, responses=errors(400, 507), summary="Compile the plan of a run"
    )
    def compile_plan(request: answers.PlanRequest) -> Response:
        name = shelf.compile(plan_settings_of(request.config), profile_of(request.profile.model_dump()))
        return json_response({"plan": f"api/plans/{name}/"})

    @app.get("/api/data", response_model=answers.Stores, responses=errors(), summary="The token stores")
    def stores() -> Response:
        return json_response({"stores": list_stores(data)})

    def plan_file(request: Request, plan: Annotated[str, Path(pattern=answers.SHA256)], file: Name) -> Response:
        return send_file(request, shelf.folder, f"{plan}/{file}", Kept.FOREVER)

    def data_file(request: Request, store: Annotated[str, Path(pattern=NAME)], file: Name) -> Response:
        return send_file(request, find_store(data, store), file)

    for method in ("GET", "HEAD"):
        for path, endpoint, what, kept in (
            ("/api/plans/{plan}/{file}", plan_file, "A file of a plan", Kept.FOREVER),
            ("/api/data/{store}/{file}", data_file, "A file of a token store", Kept.NOT),
        ):
            app.add_api_route(
                path, endpoint, methods=[method], name=f"{method.lower()}_{endpoint.__name__}",
                responses=file_answers(kept), response_class=answers.Nothing,
                summary=f"{what}, whole or one range of it",
            )  # fmt: skip

    @app.get("/api/openapi.json", include_in_schema=False)
    def description() -> Response:
        return json_response(openapi(app))

    _add_pages(app, page, watch)
    return app


def _add_pages(app: FastAPI, page: Page, watch: Folder | None) -> None:
    read = ["GET", "HEAD"]
    if watch is not None:

        @app.api_route("/runs", methods=read, include_in_schema=False)
        def runs_page() -> Response:
            return RedirectResponse("/runs/", HTTPStatus.PERMANENT_REDIRECT)

        @app.api_route("/runs/{path:path}", methods=read, include_in_schema=False)
        def runs_page_file(request: Request, path: str) -> Response:
            return send_file(request, watch, path or INDEX, Kept.CHECKED)

    @app.api_route("/{path:path}", methods=read, include_in_schema=False)
    def page_file(request: Request, path: str) -> Response:
        if path.startswith("api/") and _methods(app, request):
            return _method_refused(app, request)
        return page.send(request, path or INDEX)


def _method_refused(app: FastAPI, request: Request) -> Response:
    methods = ", ".join(_methods(app, request) or ("GET", "HEAD"))
    error = HybridError(f"{request.method} is none of what this address knows: {methods}")
    return refusal_response(Refusal(HTTPStatus.METHOD_NOT_ALLOWED, error, headers={"Allow": methods}))


def _methods(app: FastAPI, request: Request) -> list[str]:
    """What the address of a request knows, below `api/`."""
    path, found = request.url.path, set[str]()
    for route in app.routes:
        if isinstance(route, APIRoute) and route.path.startswith("/api/") and route.path_regex.match(path):
            found |= route.methods or set()
    return sorted(found)


def openapi(app: FastAPI) -> dict[str, Any]:
    """The description of everything below `api/`: bridge/schemas/server.openapi.json."""
    document = get_openapi(title=app.title, version="1", description=app.description, routes=app.routes)
    schemes = {
        "cookie": {
            "type": "apiKey",
            "in": "cookie",
            "name": "hybrid-PORT",
            "description": "set by any address with ?token=",
        },
        "header": {"type": "apiKey", "in": "header", "name": "Authorization", "description": "token TOKEN"},
    }
    document.setdefault("components", {})["securitySchemes"] = schemes
    document["security"] = [{name: []} for name in schemes]
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    return document
