"""`hybrid tune`: time every variant of every matrix product of a model, and remember the winners for this adapter."""

from __future__ import annotations

import argparse
import json

from hybrid.cli.parser import Subparsers, add_command, add_set_option, path
from hybrid.cli.progress import ProgressLine

DESCRIPTION = """\
Times every variant of each product class that the model of these settings uses, and remembers the
winners for this adapter and driver. Training picks them up; without tuning it times two to four likely ones at its
first start. All variants give the same bits, so a tuned run can be resumed anywhere."""


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = add_command(subparsers, "tune", "find the fastest kernel variants for this adapter", DESCRIPTION)
    parser.add_argument("config", metavar="CONFIG", nargs="?", type=path, help="settings: a .toml or .json file")
    parser.add_argument("--preset", metavar="NAME", help="what the settings start from (default: stdlib-tiny)")
    parser.add_argument("--adapter", metavar="NAME", help="part of a GPU's name, or its number")
    add_set_option(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    from rich.console import Console

    from hybrid.backends.webgpu.variants import VariantCache, tune_variants
    from hybrid.cli.commands.bench import open_session
    from hybrid.cli.tables import table

    session = open_session(arguments, tune=True)
    try:
        with ProgressLine() as progress:
            times = tune_variants(session.executor, progress)
        winners = {name: min(variants, key=variants.__getitem__) for name, variants in times.items()}
        cache = VariantCache(session.device, session.plan.precision)
        cache.add(winners)
        adapter = session.device.name
    finally:
        session.close()
    if arguments.json:
        print(json.dumps({"adapter": adapter, "cache": str(cache.path), "winners": winners, "seconds": times}))
        return 0
    rows = [
        (
            name,
            winners[name],
            ", ".join(f"{v} {s * 1e3:.2f} ms" for v, s in sorted(variants.items(), key=lambda i: i[1])),
        )
        for name, variants in times.items()
    ]
    Console().print(table(("product class", "winner", "times"), rows))
    print(f"remembered for {adapter} in {cache.path}")
    return 0
