"""`hybrid data build|verify|inspect`: token stores."""

from __future__ import annotations

import argparse
import json
from typing import Any

from hybrid.cli.parser import Subparsers, add_command, add_group, add_set_option, path
from hybrid.cli.progress import ProgressLine


def register(subparsers: Subparsers) -> None:
    """Add the commands."""
    group = add_group(subparsers, "data", "build, verify and inspect token stores")

    parser = add_command(group, "build", "make a token store of a corpus")
    parser.add_argument("out", metavar="OUT", type=path, help="the new folder")
    parser.add_argument("--config", metavar="CONFIG", type=path, help="settings whose data section says what to build")
    parser.add_argument("--preset", metavar="NAME", help="what the settings start from (default: stdlib-tiny)")
    parser.add_argument(
        "--source", metavar="PATH", action="append", help="a text file or folder, or stdlib; can be repeated"
    )
    parser.add_argument("--tokenizer", metavar="TYPE", help="bytes, characters or bpe")
    parser.add_argument("--replace", action="store_true", help="replace an existing store")
    add_set_option(parser)
    _json_option(parser)
    parser.set_defaults(run=build)

    parser = add_command(group, "verify", "check every byte of a token store")
    parser.add_argument("path", metavar="STORE", type=path)
    _json_option(parser)
    parser.set_defaults(run=verify)

    parser = add_command(group, "inspect", "what a token store holds")
    parser.add_argument("path", metavar="STORE", type=path)
    parser.add_argument(
        "--sequence-length", metavar="T", type=int, help="also show how samples of T tokens would be cut"
    )
    parser.add_argument(
        "--documents", metavar="N", type=int, default=3, help="documents to show the beginning of (default: 3)"
    )
    _json_option(parser)
    parser.set_defaults(run=inspect)


def _json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def build(arguments: argparse.Namespace) -> int:
    """`data build`."""
    from hybrid.config.loading import load_config
    from hybrid.data import commands
    from hybrid.training.signals import StopFlag

    given: dict[str, Any] = {}
    if arguments.source:
        given["data.source"] = arguments.source[0] if len(arguments.source) == 1 else arguments.source
    if arguments.tokenizer:
        given["data.tokenizer.type"] = arguments.tokenizer
    # Options stand for settings, and --set has the last word about what they do not name.
    config = load_config(arguments.config, arguments.preset, arguments.assignments, given)
    with StopFlag().installed() as stop, ProgressLine() as progress:
        report = commands.build(
            config.data,
            arguments.out,
            replace=arguments.replace,
            progress=progress,
            should_stop=lambda: stop.requested,
        )
    text = (
        f"{report['path']}: {report['tokens']:,} tokens in {report['documents']:,} documents, "
        f"vocabulary of {report['vocabularySize']:,}\nfingerprint: {report['fingerprint']}"
    )
    return _print(report, text, arguments.json)


def verify(arguments: argparse.Namespace) -> int:
    """`data verify`."""
    from hybrid.data import commands
    from hybrid.training.signals import StopFlag

    with StopFlag().installed() as stop, ProgressLine() as progress:
        report = commands.verify(arguments.path, progress=progress, should_stop=lambda: stop.requested)
    text = f"{report['path']}: every byte is what was written ({report['tokens']:,} tokens, {report['bytes']:,} bytes)"
    return _print(report, text, arguments.json)


def inspect(arguments: argparse.Namespace) -> int:
    """`data inspect`."""
    from hybrid.data import commands

    report = commands.inspect(arguments.path, sequence_length=arguments.sequence_length, documents=arguments.documents)
    return _print(report, commands.inspect_text(report), arguments.json)


def _print(report: dict[str, Any], text: str, as_json: bool) -> int:
    print(json.dumps(report) if as_json else text)
    return 0
