"""`hybrid export-site`: the page that trains in a tab, as a folder that any file host can serve."""

from __future__ import annotations

import argparse

from hybrid.cli.parser import Subparsers, add_command, path

DESCRIPTION = """\
Writes the page, a small text, and plans for a few sizes of model into a new folder. Everything in it is a file: serve
it from any host, also from a sub-folder, over https (or from localhost, for a look: python -m http.server -d OUT).
Nothing that somebody trains there leaves the browser.

With Python in the tab (19 MB, loaded only by who asks for it) the page also trains models of other sizes, and those
that somebody writes there. `make pyodide` builds it in a checkout."""


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = add_command(subparsers, "export-site", "write the training page as a folder of files", DESCRIPTION)
    parser.add_argument("out", metavar="OUT", type=path, help="the new folder")
    parser.add_argument(
        "--python",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="put Python in the tab beside the page (default: where it is built)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    from hybrid.bridge.site import built_python, export_site

    export_site(arguments.out, note=print, python=built_python(arguments.python))
    print(f"{arguments.out}: serve it with any file server, such as: python -m http.server -d {arguments.out}")
    return 0
