"""argparse with near names: an unknown command or option says which one was probably meant."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hybrid.errors import ConfigError

Subparsers = Any  # argparse gives its return type of add_subparsers no public name


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of descriptions, and options and their help on one line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)
        self._action_max_length = 14  # room for the longest command, which argparse measures without its indent


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print its usage and exit."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": _Formatter, **options})

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The parsed arguments. ConfigError for anything that is not known."""
        parsed, unknown = self.parse_known_args(arguments)
        if unknown:
            parser: argparse.ArgumentParser = getattr(parsed, "parser", self)
            word = unknown[0].split("=")[0]
            if not word.startswith("-"):
                raise ConfigError(f"unexpected argument {unknown[0]!r}; see `{parser.prog} --help`")
            options = [name for action in parser._actions for name in action.option_strings]
            raise ConfigError(f"unknown option {word!r} of `{parser.prog}`{_hint(word, options)}")
        return parsed

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            raise ConfigError(f"unknown command {value!r} of `{self.prog}`{_hint(value, list(action.choices))}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")


def _hint(word: str, candidates: list[str]) -> str:
    from hybrid.config.problems import nearest  # not above: it takes longer than all the rest of `hybrid --help`

    near = nearest(word, candidates)
    return f": did you mean {near!r}?" if near else f"; there are: {', '.join(sorted(candidates))}"


def add_command(
    subparsers: Subparsers, name: str, summary: str, description: str | None = None
) -> argparse.ArgumentParser:
    """A command's parser, with what every command has. The caller sets `run` with `set_defaults`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=summary, description=description or summary)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(parser=parser)
    return parser


def add_group(subparsers: Subparsers, name: str, summary: str) -> Subparsers:
    """A command that has commands of its own; without one of them it prints its help."""
    parser = add_command(subparsers, name, summary)

    def run(arguments: argparse.Namespace) -> int:
        parser.print_help(sys.stderr)
        return ConfigError.exit_code

    parser.set_defaults(run=run)
    return parser.add_subparsers(metavar="COMMAND", parser_class=Parser)


def path(text: str) -> Path:
    """An argument that names a file or folder. An empty one, from a variable that is not set, would mean the current
    folder."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got an empty text")
    return Path(text)


def add_backend_options(parser: argparse.ArgumentParser, backends: str = "auto, webgpu, reference or torch") -> None:
    """`--backend` and `--adapter`. backends: those of the command, for its help."""
    parser.add_argument("--backend", metavar="NAME", help=f"{backends} (default: auto)")
    parser.add_argument(
        "--adapter", metavar="NAME", help="part of a GPU's name, or its number; `hybrid doctor` lists them"
    )


def add_set_option(parser: argparse.ArgumentParser) -> None:
    """`--set`."""
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], dest="assignments",
        help="a setting, such as model.width=256; can be repeated",
    )  # fmt: skip


def flags(arguments: argparse.Namespace, **keys: str) -> dict[str, Any]:
    """Options that were given, by the configuration key that they stand for."""
    return {key: value for name, key in keys.items() if (value := getattr(arguments, name)) is not None}
