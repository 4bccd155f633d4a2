"""`hybrid serve`: the page, plans for its device, and the runs of this machine, for a browser."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import time
import webbrowser
from pathlib import Path

from hybrid.cli.parser import Subparsers, add_command, path
from hybrid.errors import ConfigError, MissingDependency

TOKEN = "HYBRID_TOKEN"
PAUSE_SECONDS = 0.1
DESCRIPTION = f"""\
Serves the page that trains in a tab, with plans for any model; the runs below --runs, live and side by side; their
checkpoints and token stores; and takes packed checkpoints (*.hybrid). Open the address that it prints: it has a token
in it, without which nothing is served. --token or the environment variable {TOKEN} (which other users of the machine
do not see) give one that stays the same. Ctrl+C ends it."""

_SIZE = re.compile(r"([0-9]{1,12})(?:([KMGT])(?:i?B)?|B)?\Z", re.IGNORECASE)


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = add_command(subparsers, "serve", "serve the page and the runs of this machine to a browser", DESCRIPTION)
    parser.add_argument("--port", type=_port, help="port to listen on; 0: any (default: 8321, or the next free one)")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: 127.0.0.1, this machine only)")
    parser.add_argument(
        "--runs", metavar="DIR", type=path, default=Path("runs"), help="the run folders (default: runs)"
    )
    parser.add_argument("--data", metavar="DIR", type=path, help="the token stores (default: the cache)")
    parser.add_argument("--token", help=f"16 to 200 letters, digits, - and _ (default: {TOKEN}, else a random one)")
    parser.add_argument(
        "--max-upload",
        metavar="SIZE",
        type=_size,
        default=4 * 2**30,
        help="the most bytes of one checkpoint, such as 500M (default: 4G)",
    )
    parser.add_argument("--no-browser", action="store_true", help="open no browser")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    for package in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise MissingDependency(package, "web")
    from hybrid.bridge.launch.browser import has_desktop
    from hybrid.bridge.server.login import make_token
    from hybrid.bridge.server.serve import Options, serving, warning
    from hybrid.resources import cache_folder
    from hybrid.training.signals import StopFlag

    for option in ("runs", "data"):
        folder = getattr(arguments, option)
        if folder is not None and folder.exists() and not folder.is_dir():
            raise ConfigError(f"--{option} {folder}: expected a folder, and this is none")
    stop = StopFlag()
    with stop.installed(lambda text: print("ending", flush=True)):
        options = Options(
            runs=arguments.runs,
            data=arguments.data or cache_folder("data"),
            token=make_token(arguments.token or os.environ.get(TOKEN) or None),
            host=arguments.host,
            port=arguments.port,
            most_upload=arguments.max_upload,
            plans=cache_folder("plans"),
        )
        with serving(options) as place:
            if said := warning(options.host):
                print(said)
            print(f"serving {options.runs}: open {place.url}\nCtrl+C ends it", flush=True)
            if not arguments.no_browser and has_desktop():
                with contextlib.suppress(webbrowser.Error, OSError):
                    webbrowser.open(place.url)
            while not stop.requested:
                time.sleep(PAUSE_SECONDS)
    return 0


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text[:6]) < 2**16):
        raise argparse.ArgumentTypeError(f"expected 0 to 65535, got {text!r}")
    return int(text)


def _size(text: str) -> int:
    match = _SIZE.match(text)
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"expected a number of bytes, such as 500M or 4G, got {text!r}")
    size: int = int(match[1]) * 1024 ** " KMGT".index((match[2] or " ").upper())
    return size
