"""What the addresses below `api/` answer, for OpenAPI."""

from __future__ import annotations

from typing import Any

from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from hybrid.bridge.server.files import Kept
from hybrid.bridge.server.guard import NEVER
from hybrid.bridge.server.plans import ProfileFacts

FILE_NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,199}$"
FIELDS = r"^[A-Za-z0-9_]{1,64}(,[A-Za-z0-9_]{1,64}){0,63}$"
SHA256 = r"^[0-9a-f]{64}$"
UPLOAD_ID = r"^[0-9a-f]{32}$"
MOST_EXACT = 2**53 - 1


class Answer(BaseModel):
    """An object with just these members."""

    model_config = ConfigDict(extra="forbid")


class ErrorFacts(Answer):
    name: str = Field(description="the class of the error, such as ConfigError")
    message: str = Field(description="one or more sentences for a person")
    differences: list[list[Any]] | None = Field(
        default=None, description="of a ContractMismatch: field, saved, current"
    )


class Error(Answer):
    """Every answer that is none of success."""

    error: ErrorFacts
    size: int | None = Field(default=None, description="409 of an upload: how many bytes are there")


class ServerFacts(Answer):
    version: str
    runs: str = Field(description="the folder of the runs")
    data: str = Field(description="the folder of the token stores")
    maxUpload: int = Field(description="the most bytes of an uploaded file")
    pieceBytes: int = Field(description="the most bytes of one piece of it, as of any body")


class RunState(Answer):
    """What run.json says of a run; null where it says nothing."""

    name: str = Field(description="of the folder")
    status: str | None
    message: str | None
    step: int | None
    steps: int | None
    runId: str | None
    createdAt: str | None
    updatedAt: str | None
    parameters: int | None
    backend: str | None
    problem: str | None = Field(description="what is wrong with run.json")


class RunSummary(RunState):
    loss: float | None = Field(description="of the newest step")
    validationLoss: float | None = Field(description="the newest one")


class Runs(Answer):
    runs: list[RunSummary]


class Run(Answer):
    run: RunSummary
    facts: dict[str, Any] = Field(description="run.json")


class Rows(Answer):
    rows: list[dict[str, Any]]
    next: int | None = Field(description="`after` of the next request; null when these are the last rows for now")


class Aligned(Answer):
    steps: list[int]
    values: list[dict[str, list[Any]]] = Field(
        description="for each run, and each field, a value for each step or null"
    )


class Difference(Answer):
    key: str
    values: list[Any] = Field(description="of each run; null also where it has no such setting")


class Comparison(Answer):
    at: str = Field(description="`lastEventId` for the events of these runs, which then tell what comes later")
    runs: list[str]
    metrics: Aligned
    validation: Aligned
    config: list[Difference] = Field(description="settings that are not the same in all runs")


class Checkpoint(Answer):
    name: str = Field(description="of the folder")
    status: str = Field(description="complete, unfinished, damaged or set aside")
    detail: str
    step: int | None
    sequence: int | None
    checkpointHash: str | None
    stateHash: str | None
    timestampMs: int | None
    bytes: int | None


class Checkpoints(Answer):
    checkpoints: list[Checkpoint] = Field(description="the newest complete one last")


class Store(Answer):
    name: str
    tokens: int | None
    documents: int | None
    vocabularySize: int | None
    fingerprint: str | None
    problem: str | None


class Stores(Answer):
    stores: list[Store]


class PlanRequest(Answer):
    config: dict[str, Any] = Field(
        description="settings of a run (bridge/schemas/config.schema.json) with model.vocabularySize"
    )
    profile: ProfileFacts


class PlanPlace(Answer):
    plan: str = Field(description="the folder of the plan, relative to the server's root")


class UploadRequest(Answer):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(pattern=FILE_NAME, description="of the file, such as run-step-00000500.hybrid")
    size: int = Field(ge=1, le=MOST_EXACT)
    sha256: str = Field(pattern=SHA256, description="of the whole file")


class Upload(Answer):
    id: str = Field(pattern=UPLOAD_ID)
    name: str
    size: int
    sha256: str
    received: int = Field(description="bytes that are there: where the next piece begins")
    run: str | None = Field(description="the run that it has become; null before the commit")
    checkpoint: str | None
    step: int | None
    checkpointHash: str | None


class Received(Answer):
    received: int


class Nothing(Response):
    """Of operations that say themselves what they answer."""

    media_type = None


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What an operation may answer in place of success: these, and what any may."""
    described = {
        400: "the body is no JSON",
        401: "the token is missing or another one",
        403: "the request comes from elsewhere",
        404: "there is no such thing",
        409: "not now, or not in this order",
        413: "too many bytes",
        416: "the range lies beyond the end",
        422: "what was sent is refused",
        500: "a fault of the server",
        507: "the disk has no room",
    }
    found = sorted({401, 403, 413, 422, 500, *statuses})
    return {status: {"model": Error, "description": described[status]} for status in found}


def file_answers(kept: Kept = Kept.NOT) -> dict[int | str, dict[str, Any]]:
    """Of operations that send a file, or a range of it."""
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}, "application/json": {}}
    headers = {"Cache-Control": {"schema": {"type": "string", "const": kept.value or NEVER}}}
    whole = {"description": "the file", "content": content, "headers": headers}
    part = {"description": "the range of it that was asked for", "content": content, "headers": headers}
    return {200: whole, 206: part, **errors(404, 416)}
