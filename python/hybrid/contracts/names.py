"""Messages for names nobody knows, with the nearest one that exists."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """A sentence such as `unknown scheduler type 'cosin': did you mean 'cosine'? known: constant, cosine`."""
    names = list(known)
    nearest = get_close_matches(name, names, n=1, cutoff=0.6)
    hint = f" did you mean {nearest[0]!r}?" if nearest else ""
    return f"unknown {what} {name!r}:{hint} known: {', '.join(names)}"
