"""Which view a command shows: JSON lines, a live display on a terminal, or plain lines."""

from __future__ import annotations

import sys

from hybrid.training.view import JsonView, PlainView, View


def choose_view(json: bool) -> View:
    """JSON if asked for; the live view if standard output is a capable terminal; else plain lines."""
    if json:
        return JsonView(sys.stdout)
    from rich.console import Console

    console = Console()
    if console.is_terminal and not console.is_dumb_terminal:
        from hybrid.training.live import LiveView

        return LiveView(console)
    return PlainView(sys.stdout)
