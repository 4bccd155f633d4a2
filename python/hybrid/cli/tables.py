"""Tables for terminals and logs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

WIDE = 1000  # columns, where no terminal limits them: a path in a log is not to be broken


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Rows as text under headings; values are shown as they are, without markup."""
    result = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        result.add_column(column, overflow="fold")
    for row in rows:
        result.add_row(*(escape(str(value)) for value in row))
    return result


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a `table` on standard output, as wide as it needs to be where that is no terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE)
    console.print(table(columns, rows))
