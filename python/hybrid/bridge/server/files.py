"""Files as answers, whole or one range of them."""

from __future__ import annotations

import functools
import hashlib
import mimetypes
import os
import re
from collections.abc import Iterator
from enum import Enum
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from hybrid.bridge.server.plain import is_inside, open_plain
from hybrid.bridge.server.refusals import Refusal, not_found
from hybrid.errors import HybridError
from hybrid.resources import resource

PAGE = "launch.html"
SOURCES = ("runtime", "launch")
BLOCK_BYTES = 1024 * 1024

# The system's table may say otherwise, and a browser runs a module only under the right type.
_TYPES = {".js": "text/javascript", ".mjs": "text/javascript", ".wasm": "application/wasm", ".html": "text/html"}
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}\Z")
_RANGE = re.compile(r"bytes=([0-9]{0,15})-([0-9]{0,15})\Z")


def web_build() -> Path:
    """The folder of the built page. HybridError with what to do if there is none."""
    try:
        return resource(f"web/dist/{PAGE}").parent
    except HybridError:
        raise HybridError(
            "the page is not built: run `make web` in the checkout (a wheel has it built in); it needs Node.js 20"
        ) from None


def is_outdated(site: Path) -> bool:
    """Whether a built page is older than its sources, which lie beside it in a checkout only."""
    sources = [_newest(site.parent / name) for name in SOURCES]
    return max(sources) > _newest(site)


def _newest(folder: Path) -> float:
    return max((path.stat().st_mtime for path in folder.rglob("*") if path.is_file()), default=0.0)


class Kept(Enum):
    """What a browser may do with a file that it was given: forget it (what is private, or changes), ask each time
    whether it still is the same (by a hash of its bytes), or take it for what its address means forever."""

    NOT = None
    CHECKED = "private, no-cache"
    FOREVER = "private, max-age=31536000, immutable"


def send_file(request: Request, folder: Path, name: str, kept: Kept = Kept.NOT) -> Response:
    """The file `name` (plain names with / between them) in or below `folder`, as the request's Range header wants it;
    304 for one that is `CHECKED` and that the browser has.

    Nothing outside the folder is reached: not by `..`, not by another kind of separator, not through a link. Errors:
    Refusal (404; 416 for a range beyond the end).
    """
    parts = name.split("/")
    if not all(_PLAIN.match(part) for part in parts):
        raise not_found(name)
    path = folder.joinpath(*parts)
    file = open_plain(path, links=True) if is_inside(path, folder) else None
    if file is None:
        raise not_found(name)
    try:
        facts = os.fstat(file.fileno())
        headers = {} if kept is Kept.NOT else {"Cache-Control": str(kept.value)}
        if kept is Kept.CHECKED:
            headers["ETag"] = f'"{_digest(path, facts.st_size, facts.st_mtime_ns)}"'
            if _has(request, headers["ETag"]):
                file.close()
                return Response(None, HTTPStatus.NOT_MODIFIED, headers)
        return _send(request, file, facts.st_size, _media_type(name), headers)
    except BaseException:
        file.close()
        raise


@functools.lru_cache(maxsize=256)
def _digest(path: Path, size: int, changed: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _has(request: Request, tag: str) -> bool:
    """Whether the browser has the file of this tag (RFC 9110 13.1.2)."""
    tags = [one.strip().removeprefix("W/") for one in request.headers.get("if-none-match", "").split(",")]
    return tag in tags or "*" in tags


def _send(request: Request, file: BinaryIO, size: int, kind: str, headers: dict[str, str]) -> Response:
    # A range of the file that the browser has begun to load, or nothing of it (RFC 9110 13.1.5).
    same = request.headers.get("if-range") in (None, headers.get("ETag"))
    span = _span(request.headers.get("range") if same else None, size)
    begin, end = span or (0, size)
    headers = {**headers, "Accept-Ranges": "bytes", "Content-Length": str(end - begin)}
    status = HTTPStatus.OK
    if span is not None:
        status = HTTPStatus.PARTIAL_CONTENT
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
    if request.method == "HEAD":
        file.close()
        return Response(None, status, headers, kind)
    return StreamingResponse(_blocks(file, begin, end), status, headers, kind)


def _blocks(file: BinaryIO, begin: int, end: int) -> Iterator[bytes]:
    with file:
        file.seek(begin)
        while begin < end and (block := file.read(min(BLOCK_BYTES, end - begin))):
            begin += len(block)
            yield block


def _span(header: str | None, size: int) -> tuple[int, int] | None:
    """Begin and end of the one range that is asked for; None for the whole file, also where the header is none that
    we understand (RFC 9110 14.2). Errors: Refusal 416."""
    match = _RANGE.match(header or "")
    if match is None or not (match[1] or match[2]):
        return None
    if match[1]:
        begin, end = int(match[1]), min(size, int(match[2]) + 1) if match[2] else size
        if match[2] and int(match[2]) < begin:
            return None
    else:
        begin, end = max(0, size - int(match[2])), size
    if begin >= end:
        error = HybridError(f"the range {header} lies beyond the end: the file has {size} bytes")
        headers = {"Content-Range": f"bytes */{size}"}
        raise Refusal(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, error, headers=headers)
    return begin, end


def _media_type(name: str) -> str:
    known = _TYPES.get(PurePosixPath(name).suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"
    return f"{known}; charset=utf-8" if known.startswith("text/") else known
