"""What a tab reports: events of a few kinds, checked before they are believed.

The kinds of a view (`training.view`) with their keys, and beside them `entry` and `validation` (rows of the run
folder's files), `cut` (of these files), `record` (for run.json), `end` and `error`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from hybrid.errors import ConfigError

MOST_EVENTS = 10_000  # of one report
MOST_TEXT = 100_000

Step = Annotated[int, Field(ge=0, le=2**53 - 1)]
Text = Annotated[str, Field(max_length=MOST_TEXT)]
Names = Annotated[list[Text], Field(max_length=100)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Event(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str

    def facts(self) -> dict[str, Any]:
        """Everything but the kind, as the view wants it."""
        return self.model_dump(exclude={"kind"})


class PhaseEvent(Event):
    kind: Literal["phase"]
    phase: Literal["data", "warm-up", "train", "evaluate", "sample", "save"]


class ProgressEvent(Event):
    kind: Literal["progress"]
    stage: Text
    done: Finite
    total: Finite | None


class NoteEvent(Event):
    kind: Literal["note"]
    text: Text


class RunEvent(Event):
    """runDir and resumedFrom: this side knows better."""

    kind: Literal["run"]
    name: Text
    runId: Text
    runDir: Any = None
    step: Step
    steps: Step
    backend: Text
    adapter: Text | None
    precision: Text
    parameters: Step
    trainTokens: Step
    tokensPerStep: Step
    memory: dict[str, Finite]
    resumedFrom: Any = None


class StepEvent(Event):
    kind: Literal["step"]
    step: Step
    steps: Step
    epoch: Step
    loss: Finite
    lr: Finite
    gradNorm: Finite | None
    lossScale: Finite
    skipped: Step
    tokensPerSecond: Finite
    stepMs: Finite
    memoryBytes: Finite
    etaSeconds: Finite | None
    alerts: Names


class SampleEvent(Event):
    kind: Literal["sample"]
    step: Step
    prompt: Text
    text: Text


class CheckpointEvent(Event):
    """path: this side knows better."""

    kind: Literal["checkpoint"]
    step: Step
    path: Any = None


class EntryEvent(Event):
    """A row of metrics.jsonl; `contracts.metrics` says what is in it."""

    kind: Literal["entry"]
    row: dict[str, Any]


class ValidationRow(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    step: Step
    split: Literal["validation"]
    loss: Finite
    perplexity: Finite
    targetTokens: Step
    overflow: Literal[True] | None = None


class ValidationEvent(Event):
    """A row of validation.jsonl, which is shown too."""

    kind: Literal["validation"]
    row: ValidationRow


class CutEvent(Event):
    """Rows after `step` belong to steps that will be done again."""

    kind: Literal["cut"]
    file: Literal["metrics", "validation"]
    step: Step


class Recorded(BaseModel):
    """What a tab knows better than this side; what else it says of the run is left out."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    backend: dict[str, Any] = {}
    environment: dict[str, Any] = {}
    provenance: dict[str, Any] | None = None
    step: Step = 0


class RecordEvent(Event):
    """For run.json."""

    kind: Literal["record"]
    record: Annotated[Recorded, Field(alias="facts")]


class EndEvent(Event):
    kind: Literal["end"]
    status: Literal["finished", "stopped", "alert"]
    step: Step
    steps: Step | None = None
    message: Text = ""
    exitCode: int | None = None
    alerts: Names = []


class ErrorEvent(Event):
    kind: Literal["error"]
    name: Text
    message: Text
    exitCode: int | None = None
    differences: Annotated[list[Annotated[list[Any], Field(min_length=3, max_length=3)]], Field(max_length=1000)] = []
    alerts: Names = []
    step: Step = 0
    stack: Text = ""


AnyEvent = Annotated[
    PhaseEvent | ProgressEvent | NoteEvent | RunEvent | StepEvent | SampleEvent | CheckpointEvent | EntryEvent
    | ValidationEvent | CutEvent | RecordEvent | EndEvent | ErrorEvent,
    Field(discriminator="kind"),
]  # fmt: skip


class Report(BaseModel):
    """Events in order. sequence: 1 for a tab's first report, then one more each time."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sequence: Annotated[int, Field(ge=1, le=2**53 - 1)]
    events: Annotated[list[AnyEvent], Field(max_length=MOST_EVENTS)]


_REPORT = TypeAdapter(Report)


def parse_report(body: bytes) -> Report:
    """The report in a request's body. ConfigError naming the first thing that is wrong."""
    try:
        return _REPORT.validate_python(json.loads(body, parse_constant=_no_constant))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the document"
        raise ConfigError(f"events: {place}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"events: not JSON: {error}") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
