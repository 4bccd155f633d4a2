"""The addresses of a run that a tab takes: below `http://127.0.0.1:PORT/TOKEN/`."""

from __future__ import annotations

import json
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from hybrid.bridge.launch.desk import Desk
from hybrid.bridge.launch.events import parse_report
from hybrid.bridge.server.files import PAGE, send_file
from hybrid.bridge.server.plans import PlanShelf, profile_of
from hybrid.bridge.server.refusals import Refusal, answer_errors, error_facts, json_response, not_found
from hybrid.bridge.server.uploads import PIECE_BYTES, Uploads
from hybrid.errors import ConfigError
from hybrid.plan.compiler import PlanSettings

TAB = "x-hybrid-tab"
MOST_BYTES = PIECE_BYTES  # of any request's body

T = TypeVar("T")


class RunSide(Protocol):
    """What the addresses need of a run."""

    uploads: Uploads
    data_folder: Path
    plan_settings: PlanSettings

    def job(self) -> dict[str, Any]: ...

    def checkpoint_folder(self, name: str) -> Path | None: ...


def launch_app(desk: Desk, run: RunSide, site: Path, shelf: PlanShelf) -> FastAPI:
    """site: the folder of the built page."""
    app = FastAPI(title="hybrid launch", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    answer_errors(app)

    async def broken(request: Request, error: Exception) -> Response:
        """A fault of this side ends the run; a tab that was closed in the middle of a request does not."""
        if not isinstance(error, ClientDisconnect):
            desk.fail(error)
        return json_response({"error": error_facts(error)}, HTTPStatus.INTERNAL_SERVER_ERROR)

    app.add_exception_handler(Exception, broken)
    read = ["GET", "HEAD"]

    async def answered(request: Request, work: Callable[[bytes], T]) -> T:
        """What `work` makes of the body, in a thread, for the tab that has the run."""
        with desk.request(request.headers.get(TAB)):
            body = await request.body()
            return await run_in_threadpool(work, body)

    @app.get("/job.json")
    def job(request: Request) -> Response:
        with desk.claim(request.headers.get(TAB)):
            run.uploads.clear()
            return json_response(run.job())

    @app.post("/events")
    async def events(request: Request) -> Response:
        body = await request.body()
        tab = request.headers.get(TAB)
        return json_response(await run_in_threadpool(lambda: desk.report(tab, parse_report(body))))

    @app.post("/leave")
    def leave(request: Request) -> Response:
        desk.leave(request.headers.get(TAB))
        return json_response({})

    @app.post("/profile")
    async def profile(request: Request) -> Response:
        name = await answered(request, lambda body: shelf.compile(run.plan_settings, profile_of(_json(body))))
        return json_response({"plan": f"plans/{name}/"})

    @app.api_route("/plans/{name}/{file}", methods=read)
    def plan(request: Request, name: str, file: str) -> Response:
        return send_file(request, shelf.folder, f"{name}/{file}")

    @app.api_route("/data/{file}", methods=read)
    def data(request: Request, file: str) -> Response:
        return send_file(request, run.data_folder, file)

    @app.api_route("/checkpoints/{name}/{file}", methods=read)
    def checkpoint(request: Request, name: str, file: str) -> Response:
        folder = run.checkpoint_folder(name)
        if folder is None:
            raise not_found(name)
        return send_file(request, folder, file)

    @app.put("/checkpoints/{name}/{file}")
    async def upload(request: Request, name: str, file: str) -> Response:
        offset = _offset(request)
        size = await answered(request, lambda body: run.uploads.append(name, file, offset, body))
        return json_response({"size": size})

    @app.post("/checkpoints/{name}/commit")
    async def commit(request: Request, name: str) -> Response:
        ref = await answered(request, lambda body: run.uploads.commit(name, body))
        return json_response({"checkpointHash": ref.checkpoint_hash})

    @app.api_route("/", methods=read)
    def page(request: Request) -> Response:
        return send_file(request, site, PAGE)

    @app.api_route("/{path:path}", methods=read)
    def page_file(request: Request, path: str) -> Response:
        return send_file(request, site, path)

    return app


def _offset(request: Request) -> int:
    text = request.query_params.get("offset", "")
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise Refusal(HTTPStatus.BAD_REQUEST, ConfigError(f"offset is {text!r:.40}: expected a number of bytes"))
    return int(text)


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the body is not JSON: {error}") from None
