"""`api/uploads`: a packed checkpoint in pieces, until it is a run."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import FastAPI, Path, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from hybrid.bridge.server import answers
from hybrid.bridge.server.answers import MOST_EXACT, UPLOAD_ID, errors
from hybrid.bridge.server.imports import Imports, Piece
from hybrid.bridge.server.refusals import json_response

OFFSET = "Upload-Offset"
BLOCK_BYTES = 1024 * 1024
BODY = {"requestBody": {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}}

UploadId = Annotated[str, Path(pattern=UPLOAD_ID)]


def add_upload_routes(app: FastAPI, imports: Imports) -> None:
    @app.post(
        "/api/uploads", response_model=answers.Upload, responses=errors(400, 409, 507),
        summary="Declare a file, or find out where it stands",
    )  # fmt: skip
    def declare_upload(upload: answers.UploadRequest) -> Response:
        return json_response(imports.declare(upload.name, upload.size, upload.sha256))

    @app.get(
        "/api/uploads/{upload}", response_model=answers.Upload, responses=errors(404), summary="Where a file stands"
    )
    def show_upload(upload: UploadId) -> Response:
        return json_response(imports.state(upload))

    @app.head(
        "/api/uploads/{upload}", responses=errors(404), response_class=answers.Nothing,
        summary="Where a file stands, as the header Upload-Offset",
    )  # fmt: skip
    def upload_offset(upload: UploadId) -> Response:
        return Response(None, headers={OFFSET: str(imports.state(upload)["received"])})

    @app.put(
        "/api/uploads/{upload}", response_model=answers.Received, responses=errors(404, 409, 507), openapi_extra=BODY,
        summary="The next bytes of a file",
    )  # fmt: skip
    async def put_piece(
        request: Request, upload: UploadId, offset: Annotated[int, Query(ge=0, le=MOST_EXACT)]
    ) -> Response:
        piece = await run_in_threadpool(imports.begin, upload, offset)
        await _receive(request, piece)
        return json_response({"received": piece.position})

    @app.post(
        "/api/uploads/{upload}/commit", response_model=answers.Upload, responses=errors(404, 409, 507),
        summary="Verify a file and make a run of it",
    )  # fmt: skip
    def commit_upload(upload: UploadId) -> Response:
        return json_response(imports.commit(upload))

    @app.delete(
        "/api/uploads/{upload}", status_code=HTTPStatus.NO_CONTENT, responses=errors(404),
        response_class=answers.Nothing, summary="Forget a file",
    )  # fmt: skip
    def drop_upload(upload: UploadId) -> Response:
        imports.drop(upload)
        return Response(None, HTTPStatus.NO_CONTENT)


async def _receive(request: Request, piece: Piece) -> None:
    """Append a body as it comes. What came before it broke off stays."""
    waiting = bytearray()

    async def write() -> None:
        data = bytes(waiting)
        waiting.clear()
        if data:
            await run_in_threadpool(piece.write, data)

    try:
        async for part in request.stream():
            waiting += part
            if len(waiting) >= BLOCK_BYTES:
                await write()
    except ClientDisconnect:
        await write()
        raise
    await write()
