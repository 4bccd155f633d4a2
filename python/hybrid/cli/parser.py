"""argparse with near names: an unknown command or option says which one was probably meant."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from hybrid.config.problems import nearest
from hybrid.errors import ConfigError

Subparsers = Any  # argparse gives its return type of add_subparsers no public name


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print its usage and exit."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter, **options})

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            deepest: argparse.ArgumentParser = getattr(parsed, "parser", self)
            options = [name for action in deepest._actions for name in action.option_strings]
            word = unknown[0].split("=")[0]
            if not word.startswith("-"):
                raise ConfigError(f"unexpected argument {unknown[0]!r}; see `{deepest.prog} --help`")
            raise ConfigError(f"unknown option {word!r} of `{deepest.prog}`{_hint(word, options)}")
        return parsed

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            raise ConfigError(f"unknown command {value!r} of `{self.prog}`{_hint(value, list(action.choices))}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")


def _hint(word: str, candidates: list[str]) -> str:
    near = nearest(word, candidates)
    return f": did you mean {near!r}?" if near else f"; there are: {', '.join(sorted(candidates))}"


def add_command(subparsers: Subparsers, name: str, summary: str, description: str = "") -> argparse.ArgumentParser:
    """A command's parser, with the options that every command has. The caller sets `run` with `set_defaults`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name, help=summary, description=description or summary, prog=None
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(parser=parser)
    return parser
