"""Runs the text of a script: to its end, to its first error (with the line), or until somebody stops it."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import json
import os
import sys
import traceback
from types import CodeType, TracebackType
from typing import Any

from hybrid_tab.session import set_host

NAME = "script.py"  # what a script is called in its tracebacks
SHARED = ("hybrid", "hybrid_tab", "builtins", "asyncio", "json", "traceback", "inspect", "ast", "contextlib", "os")

_running: list[asyncio.Task[Any]] = []


async def run(source: str, host: Any) -> str:
    """What became of it, as JSON: {} at the end; {kind, message, line, text, traceback} for an error.

    `kind` is the error's class, or "Stopped" for a script that was stopped; `line` the last line of the script that was
    at work, or None.

    Python is as it was afterwards, whatever the script has put in the place of what others use: Python's own functions,
    those of this library, the streams, the imported modules. Tasks that it left behind are cancelled.
    """
    before = asyncio.all_tasks()
    own = _state()
    set_host(host)
    outcomes: list[dict[str, Any]] = []
    task = asyncio.ensure_future(_execute(source, outcomes))
    _running.append(task)
    try:
        # A task that is cancelled while it runs counts as cancelled even if it then comes to an end of its own.
        await asyncio.wait([task])
    finally:
        for namespace, values in own:
            namespace.update(values)
        _running.remove(task)
        set_host(None)
        _show_the_rest()
        for other in asyncio.all_tasks() - before - {task}:
            other.cancel()
    return json.dumps(outcomes[0] if outcomes else _outcome(asyncio.CancelledError(), source))


def _state() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Names with what they mean now, which a script could change for those that come after it."""
    shared = [vars(module) for name, module in sys.modules.items() if name.partition(".")[0] in SHARED]
    shared += [sys.modules]
    streams = {"stdout": sys.stdout, "stderr": sys.stderr}
    return [*((names, dict(names)) for names in shared), (vars(sys), streams)]


def _show_the_rest() -> None:
    """What was printed without the end of a line."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
            os.fsync(stream.fileno())


def stop() -> None:
    """Stop the script where it waits next."""
    for task in _running:
        task.cancel()


async def _execute(source: str, outcomes: list[dict[str, Any]]) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__", "__file__": NAME, "__builtins__": __builtins__}
    try:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code: CodeType = compile(source, NAME, "exec", flags=flags, dont_inherit=True)
        value = eval(code, namespace)
        if inspect.iscoroutine(value):
            await value
    except SystemExit as error:
        outcomes.append({} if error.code in (None, 0) else _outcome(error, source))
    except BaseException as error:  # KeyboardInterrupt and CancelledError are how a script is stopped
        outcomes.append(_outcome(error, source))
    else:
        outcomes.append({})


def _outcome(error: BaseException, source: str) -> dict[str, Any]:
    line = error.lineno if isinstance(error, SyntaxError) and error.filename == NAME else _line(error.__traceback__)
    lines = source.splitlines()
    kind = type(error).__name__
    if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
        kind = "Stopped"
    message = error.msg if isinstance(error, SyntaxError) else _message(error)
    return {
        "kind": kind,
        "message": message,
        "line": line,
        "text": lines[line - 1].strip() if line and line <= len(lines) else "",
        "traceback": _traceback(error),
    }


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # an error of the script's own making, which cannot even say what is wrong
        return ""


def _line(trace: TracebackType | None) -> int | None:
    """Where the script itself was: its last line in the traceback."""
    lines = [line for frame, line in traceback.walk_tb(trace) if frame.f_code.co_filename == NAME]
    return lines[-1] if lines else None


def _traceback(error: BaseException) -> str:
    """From the script's first line on, without what runs it."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename != NAME:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)) if trace else f"{error}\n"
