"""What a run shows while it runs: events of a few kinds, as plain lines or as JSON.

Kinds and what they carry (docs/cli.md lists every key): `phase` (data, warm-up, train, evaluate, sample, save),
`progress` (of long work before the first step), `note` (a sentence for the user), `run` (what begins), `step` (every
run.logEvery steps), `validation`, `sample`, `checkpoint`, `end`.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol, TextIO

Facts = dict[str, Any]

WORTH_SAYING = 0.05  # from this share of time on, lines tell that steps wait for data


class View(Protocol):
    """Receives events; a context manager, so that it can leave the terminal as it was."""

    def __enter__(self) -> View: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def event(self, kind: str, facts: Facts) -> None: ...


class QuietView:
    """Shows nothing; the base of the others."""

    def __enter__(self) -> View:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def event(self, kind: str, facts: Facts) -> None:
        return None


class WatchedView(QuietView):
    """Another view, as long as somebody reads it. gone: called once, when nobody does any more.

    A reader that has gone, as in `hybrid train | head`, has seen enough; but an error in the middle of a step would
    cost what was not saved yet.
    """

    def __init__(self, view: View, gone: Callable[[], None]) -> None:
        self._view = view
        self._gone = gone
        self._is_read = True

    def __enter__(self) -> View:
        self._view.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._heard():
            self._view.__exit__(kind, error, trace)

    def event(self, kind: str, facts: Facts) -> None:
        if self._is_read:
            with self._heard():
                self._view.event(kind, facts)

    @contextmanager
    def _heard(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            if self._is_read:
                self._is_read = False
                self._gone()


class JsonView(QuietView):
    """One JSON object a line: `{"event": kind, ...facts}`."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def event(self, kind: str, facts: Facts) -> None:
        self._out.write(json.dumps({"event": kind, **facts}, allow_nan=False) + "\n")
        self._out.flush()


class PlainView(QuietView):
    """A line an event, for logs and pipes."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def event(self, kind: str, facts: Facts) -> None:
        text = event_text(kind, facts)
        if text:
            self._out.write(text + "\n")
            self._out.flush()


def event_text(kind: str, facts: Facts) -> str:
    """The event in words; empty for one that needs none."""
    return _TEXTS[kind](facts) if kind in _TEXTS else ""


def _phase_text(facts: Facts) -> str:
    """Of what may take a while before the first step shows anything."""
    return {"data": "reading the data", "warm-up": "preparing the device"}.get(facts["phase"], "")


def _run_text(facts: Facts) -> str:
    lines = [
        f"run {facts['name']} in {facts['runDir']}: step {facts['step']} of {facts['steps']}",
        f"  model: {facts['parameters']:,} parameters; {facts['precision']} on {facts['backend']} ({facts['adapter']})",
        f"  data: {facts['trainTokens']:,} training tokens, {facts['tokensPerStep']:,} a step",
    ]
    if facts.get("utilisation"):
        lines.append(f"  {facts['utilisation']}")
    return "\n".join(lines)


def _step_text(facts: Facts) -> str:
    parts = [f"step {facts['step']}/{facts['steps']}", f"loss {facts['loss']:.4f}", f"lr {facts['lr']:.2e}"]
    if facts["gradNorm"] is not None:
        parts.append(f"grad {facts['gradNorm']:.2f}")
    if facts["skipped"]:
        parts.append(f"skipped {facts['skipped']} (scale {facts['lossScale']:g})")
    parts.append(f"{facts['tokensPerSecond']:,.0f} tokens/s")
    if facts.get("mfu") is not None:
        parts.append(f"MFU {facts['mfu']:.1%}")
    if facts.get("dataWaitShare", 0) >= WORTH_SAYING:
        parts.append(f"waiting for data {facts['dataWaitShare']:.0%}")
    if facts["etaSeconds"] is not None:
        parts.append(f"{duration(facts['etaSeconds'])} left")
    parts += [f"ALERT {name}" for name in facts["alerts"]]
    return "  ".join(parts)


def _validation_text(facts: Facts) -> str:
    doubt = "; not the loss of the model, for a value overflowed" if facts.get("overflow") else ""
    return f"validation at step {facts['step']}: loss {facts['loss']:.4f} ({facts['targetTokens']:,} tokens){doubt}"


def _sample_text(facts: Facts) -> str:
    body = printable(facts["prompt"] + facts["text"]).strip("\n").replace("\n", "\n  | ")
    return f"sample at step {facts['step']}:\n  | {body}"


def _checkpoint_text(facts: Facts) -> str:
    return f"saved step {facts['step']} to {facts['path']}"


def _end_text(facts: Facts) -> str:
    return str(facts["message"])


_TEXTS: dict[str, Callable[[Facts], str]] = {
    "phase": _phase_text,
    "note": lambda facts: str(facts["text"]),
    "run": _run_text,
    "step": _step_text,
    "validation": _validation_text,
    "sample": _sample_text,
    "checkpoint": _checkpoint_text,
    "end": _end_text,
}


def printable(text: str) -> str:
    """Text that a model made, without the characters that command a terminal; line ends and tabs stay."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)


def duration(seconds: float) -> str:
    """Seconds as 42s, 3m05s or 2h07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def bytes_text(count: float) -> str:
    """A number of bytes with a unit: 512 B, 1.5 KiB, 3.2 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
