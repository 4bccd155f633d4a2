"""`api/runs` and `api/compare`: the run folders of this machine, live."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from itertools import islice
from pathlib import Path as Folder
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Header, Path, Query, Request
from fastapi.responses import Response, StreamingResponse

from hybrid.bridge.server import answers, runs
from hybrid.bridge.server.answers import FIELDS, FILE_NAME, MOST_EXACT, errors, file_answers
from hybrid.bridge.server.compare import Places, compare
from hybrid.bridge.server.feed import Cursor, Event
from hybrid.bridge.server.files import send_file
from hybrid.bridge.server.hub import Hub
from hybrid.bridge.server.refusals import json_response, not_found
from hybrid.bridge.server.rows import only, rows_after
from hybrid.bridge.server.runs import NAME, RunFolders
from hybrid.checkpoint.finding import CHECKPOINTS_FOLDER
from hybrid.checkpoint.manifest import MANIFEST_NAME
from hybrid.training.metrics_log import METRICS, VALIDATION

MOST_RUNS = 16
MOST_ROWS = 10_000
COMPARED = "total_loss"
MOST_PLACES = 2000  # characters of the id of an event
RETRY_MS = 1000
# A comment for a connection on which nothing else has come: a dead one is noticed by it.
SILENCE = b": nothing new\n\n"
STREAM = "text/event-stream"
EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"description": "events without end", "content": {STREAM: {"schema": {"type": "string"}}}}
}

RunName = Annotated[str, Path(pattern=NAME)]
Name = Annotated[str, Path(pattern=FILE_NAME)]
RunNames = Annotated[list[Annotated[str, Query(pattern=NAME)]], Query(min_length=1, max_length=MOST_RUNS)]
Fields = Annotated[str | None, Query(pattern=FIELDS, description="only these fields of the metrics rows, `a,b,c`")]


def add_run_routes(app: FastAPI, folders: RunFolders, hub: Hub) -> None:
    @app.get("/api/runs", response_model=answers.Runs, responses=errors(), summary="All runs")
    def list_runs() -> Response:
        return json_response({"runs": folders.summaries()})

    @app.get("/api/runs/{run}", response_model=answers.Run, responses=errors(404), summary="One run")
    def show_run(run: RunName) -> Response:
        folder = folders.find(run)
        return json_response({"run": runs.summary(folder), "facts": finite(runs.run_facts(folder)[0])})

    @app.get(
        "/api/runs/{run}/metrics", response_model=answers.Rows, responses=errors(404),
        summary="Rows of metrics.jsonl or validation.jsonl, in step order",
    )  # fmt: skip
    def run_metrics(
        run: RunName,
        after: Annotated[int, Query(ge=0, le=MOST_EXACT, description="rows of later steps")] = 0,
        limit: Annotated[int, Query(ge=1, le=MOST_ROWS)] = 1000,
        fields: Fields = None,
        file: Annotated[Literal["metrics", "validation"], Query()] = "metrics",
    ) -> Response:
        path = folders.find(run) / (METRICS if file == "metrics" else VALIDATION)
        found = list(islice(rows_after(path, after, limit + 1), limit + 1))
        rows = [only(row, _names(fields)) for row in found[:limit]]
        return json_response({"rows": rows, "next": rows[-1]["step"] if len(found) > limit else None})

    @app.get(
        "/api/runs/{run}/events", response_class=answers.Nothing, responses={**EVENTS, **errors(404)},
        summary="What happens in a run, as server-sent events",
    )  # fmt: skip
    async def run_events(
        run: RunName,
        fields: Fields = None,
        lastEventId: Annotated[str, Query(max_length=200, description="for clients that set no headers")] = "",
        last_event_id: Annotated[str | None, Header(max_length=200)] = None,
    ) -> Response:
        folder = folders.find(run)
        at = Cursor.parse(last_event_id if last_event_id is not None else lastEventId)
        return StreamingResponse(_stream(hub, folder, at, _names(fields)), media_type=STREAM)

    @app.get(
        "/api/compare", response_model=answers.Comparison, responses=errors(404),
        summary="Rows of several runs, aligned by step, and the settings in which they differ",
    )  # fmt: skip
    def compare_runs(
        run: RunNames,
        fields: Annotated[str, Query(pattern=FIELDS)] = COMPARED,
        points: Annotated[int, Query(ge=1, le=MOST_ROWS, description="about so many steps")] = 1000,
    ) -> Response:
        found = [folders.find(name) for name in run]
        return json_response(finite(compare(found, fields.split(","), points)))

    @app.get(
        "/api/compare/events", response_class=answers.Nothing, responses={**EVENTS, **errors(404)},
        summary="What happens in several runs, as server-sent events",
    )  # fmt: skip
    async def compared_events(
        run: RunNames,
        fields: Fields = None,
        lastEventId: Annotated[str, Query(max_length=MOST_PLACES, description="`at` of a comparison")] = "",
        last_event_id: Annotated[str | None, Header(max_length=MOST_PLACES)] = None,
    ) -> Response:
        found = [folders.find(name) for name in run]
        at = Places.parse(last_event_id if last_event_id is not None else lastEventId, len(found))
        return StreamingResponse(_stream_of_all(hub, found, at, _names(fields)), media_type=STREAM)

    @app.get(
        "/api/runs/{run}/checkpoints", response_model=answers.Checkpoints, responses=errors(404),
        summary="The checkpoints of a run",
    )  # fmt: skip
    def list_checkpoints(run: RunName) -> Response:
        return json_response({"checkpoints": runs.checkpoints(folders.find(run))})

    def checkpoint_file(request: Request, run: RunName, checkpoint: Name, file: Name) -> Response:
        folder = folders.find(run)
        if not (folder / CHECKPOINTS_FOLDER / checkpoint / MANIFEST_NAME).is_file():
            raise not_found(f"{run}/{checkpoint}")
        return send_file(request, folder, f"{CHECKPOINTS_FOLDER}/{checkpoint}/{file}")

    for method in ("GET", "HEAD"):
        app.add_api_route(
            "/api/runs/{run}/checkpoints/{checkpoint}/{file}", checkpoint_file, methods=[method],
            name=f"{method.lower()}_checkpoint_file", responses=file_answers(), response_class=answers.Nothing,
            summary="A file of a checkpoint, whole or one range of it",
        )  # fmt: skip


def finite(value: Any) -> Any:
    """JSON without the numbers that it does not have: those are null."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


async def _stream(hub: Hub, folder: Folder, at: Cursor, fields: list[str] | None) -> AsyncIterator[bytes]:
    yield f"retry: {RETRY_MS}\n\n".encode()
    async with aclosing(hub.follow(folder, at)) as following:
        async for news in following:
            yield "".join(_text(event, fields) for event in news.events).encode() or SILENCE


async def _stream_of_all(
    hub: Hub, found: Sequence[Folder], at: Places, fields: list[str] | None
) -> AsyncIterator[bytes]:
    yield f"retry: {RETRY_MS}\n\n".encode()
    async with aclosing(hub.follow_all(found, at.cursors)) as following:
        async for index, news in following:
            text = ""
            for event in news.events:
                at = at.moved(index, event.at)
                value = {"run": found[index].name, "data": _value(event, fields)}
                text += _block(at.id, event.kind, value)
            yield text.encode() or SILENCE


def _text(event: Event, fields: list[str] | None) -> str:
    return _block(event.at.id, event.kind, _value(event, fields))


def _value(event: Event, fields: list[str] | None) -> dict[str, Any]:
    return only(event.value, fields) if event.kind == "entry" else event.value


def _block(identity: str, kind: str, value: dict[str, Any]) -> str:
    data = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII, so without line ends
    return f"id: {identity}\nevent: {kind}\ndata: {data}\n\n"


def _names(fields: str | None) -> list[str] | None:
    return fields.split(",") if fields is not None else None
