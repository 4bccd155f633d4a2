"""Tables for terminals and logs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Rows as text under headings; values are shown as they are, without markup."""
    result = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        result.add_column(column, overflow="fold")
    for row in rows:
        result.add_row(*(_escape(value) for value in row))
    return result


def _escape(value: object) -> str:
    from rich.markup import escape

    return escape(str(value))
