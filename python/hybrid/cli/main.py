"""`hybrid COMMAND ...`: finds the command, runs it, and turns errors into one clear message and an exit code.

Exit codes: 0 done; 1 failed; 2 usage or configuration; 3 refused by a contract; 4 alert; 75 stopped on request after
saving.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pkgutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybrid import __version__
from hybrid.cli import commands, early
from hybrid.cli.parser import Parser
from hybrid.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, HybridError
from hybrid.training.view import printable

# The order of the help text. Every module of `hybrid.cli.commands` is a command; those not named here follow by name.
# Each has `register(subparsers)`, which adds its parser with `hybrid.cli.parser.add_command` and sets `run`, a
# function of the parsed arguments that returns an exit code.
FIRST = ("train", "sample", "evaluate", "data", "checkpoint", "doctor")


def build_parser() -> Parser:
    """The parser of the whole command line."""
    parser = Parser(
        prog="hybrid",
        description="Train language models on any desktop GPU, and without one on the CPU.",
        epilog="`hybrid train` without arguments trains a small model on the Python standard library's sources.",
    )
    parser.add_argument("--version", action="version", version=f"hybrid {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)
    others = sorted({module.name for module in pkgutil.iter_modules(commands.__path__)} - set(FIRST))
    for name in (*FIRST, *others):
        importlib.import_module(f"hybrid.cli.commands.{name}").register(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    with early.guarded(words):
        code = _main(words)
    _end_output()
    return code


def _main(words: list[str]) -> int:
    debug = "--debug" in words or bool(os.environ.get("HYBRID_DEBUG"))
    _prepare_output()
    try:
        return _run(words)
    except HybridError as error:
        # The text may quote a file that a stranger made.
        print(f"hybrid: {printable(str(error))}", file=sys.stderr)
        if debug:
            traceback.print_exc()
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output has gone, as in `hybrid ... | head`; keep the interpreter from complaining at exit.
        _forget_the_reader()
        return EXIT_DONE
    except KeyboardInterrupt:
        print("hybrid: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (OSError, MemoryError) as error:
        # The machine's fault and not the program's: a disk that is full, a folder without permission.
        print(f"hybrid: {_machine_problem(error)}", file=sys.stderr)
        if debug:
            traceback.print_exc()
        return EXIT_FAILED
    except Exception as error:
        print(f"hybrid: internal error: {type(error).__name__}: {error}", file=sys.stderr)
        if debug:
            traceback.print_exc()
        else:
            print("  run it again with --debug for the traceback", file=sys.stderr)
        return EXIT_FAILED


def _run(words: list[str]) -> int:
    try:
        parser = build_parser()
        parsed = parser.parse(words)
        if not hasattr(parsed, "run"):
            getattr(parsed, "parser", parser).print_help(sys.stderr)
            return EXIT_USAGE
        code: int = parsed.run(parsed)
        return code
    except BrokenPipeError:
        raise
    except Exception as error:
        # Asked of the words and not of what was parsed: a program that reads JSON is also told of its own mistakes.
        # Of several processes that torchrun started, one speaks.
        if "--json" in words and os.environ.get("RANK", "0") == "0":
            try:
                print(json.dumps({"event": "error", **error_facts(error)}), flush=True)
            except OSError:
                _forget_the_reader()
        raise


def error_facts(error: Exception) -> dict[str, Any]:
    """An error as an event: its class, message, exit code, and the differences of a refusal."""
    differences = [list(row) for row in getattr(error, "differences", ())]
    return {
        "error": type(error).__name__,
        "message": str(error),
        "exitCode": getattr(error, "exit_code", EXIT_FAILED),
        **({"differences": differences} if differences else {}),
    }


def _end_output() -> None:
    """Write what is left, so that the interpreter has nothing to complain about at its end."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_the_reader()
    except (OSError, ValueError):
        pass  # a disk that is full; a stream that somebody has closed


def _forget_the_reader() -> None:
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _prepare_output() -> None:
    """Standard output and error that take any text: one that was closed becomes the null device (Python has None for
    it), and characters that the terminal's encoding lacks are written as escapes."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 (open until the end)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _machine_problem(error: OSError | MemoryError) -> str:
    if isinstance(error, MemoryError):
        return f"out of memory ({str(error) or 'no size is known'}): a smaller model, batch or sequence needs less"
    place = f"{error.filename}: " if error.filename is not None else ""
    return printable(f"{place}{error.strerror or error}")
