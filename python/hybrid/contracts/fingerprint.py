"""Fingerprints of a run, and what a resume says when they differ.

A checkpoint keeps three documents: `dataset` (the data's own fingerprint), `tokenizer`, and `contract` (every setting
that can change the trajectory). They are kept whole, not only hashed, so that a refusal can show each field with both
values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hybrid.contracts.stable_json import stable_hash, stable_json
from hybrid.errors import ConfigError, ContractMismatch

ABSENT = "(absent)"

Difference = tuple[str, object, object]

_WIDEST = 72


def identity_hashes(fingerprints: Mapping[str, Mapping[str, Any]]) -> dict[str, str | None]:
    """{configHash, datasetHash, tokenizerHash} of {dataset, tokenizer, contract}; None for an absent document."""
    fields = {"configHash": "contract", "datasetHash": "dataset", "tokenizerHash": "tokenizer"}
    return {
        name: stable_hash(dict(fingerprints[member])) if fingerprints.get(member) else None
        for name, member in fields.items()
    }


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> tuple[Difference, ...]:
    """(dotted path, saved value, current value) of each field that differs, in the order of `saved`, then of `current`.

    Objects are compared member by member, everything else as a whole, by stable JSON: there is no difference exactly
    when the hashes are equal. A field that one side lacks has the value ABSENT there.
    """
    return tuple(_walk("", saved, current))


def format_table(found: Iterable[Difference]) -> str:
    """The differences as lines of three columns: field, saved, current."""
    rows = [("field", "saved", "current")]
    rows += [(path, _text(saved), _text(current)) for path, saved, current in found]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}" for row in rows)


def require_agreement(
    saved: Mapping[str, Any], current: Mapping[str, Any], accepted: Iterable[str] = ()
) -> tuple[Difference, ...]:
    """The differences, when all of them are accepted; the caller records them in the lineage.

    `accepted` holds dotted paths; one accepts the field itself and everything below it. Errors: ContractMismatch with
    the table when a difference is not accepted; ConfigError for an accepted path that does not differ (a typing
    mistake would otherwise accept nothing and say nothing).
    """
    found = differences(saved, current)
    paths = list(accepted)
    for path in paths:
        if not any(_covers(path, field) for field, _, _ in found):
            known = ", ".join(field for field, _, _ in found) or "none"
            raise ConfigError(f"accepted change {path!r} is no difference to the checkpoint; differences: {known}")
    refused = tuple(item for item in found if not any(_covers(path, item[0]) for path in paths))
    if refused:
        noun = "1 field differs" if len(refused) == 1 else f"{len(refused)} fields differ"
        raise ContractMismatch(
            f"resume refused: {noun} from the checkpoint\n{format_table(refused)}\n"
            "Go back to the saved values, accept each change with --accept-change FIELD --reason TEXT, or begin "
            "another run with --resume never.",
            refused,
        )
    return found


def _walk(path: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterable[Difference]:
    for key in dict.fromkeys((*saved, *current)):
        field = f"{path}.{key}" if path else key
        if key not in saved or key not in current:
            yield field, saved.get(key, ABSENT), current.get(key, ABSENT)
            continue
        old, new = saved[key], current[key]
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _walk(field, old, new)
        elif stable_json(old) != stable_json(new):
            yield field, old, new


def _covers(path: str, field: str) -> bool:
    return field == path or field.startswith(f"{path}.")


def _text(value: object) -> str:
    text = ABSENT if value is ABSENT else stable_json(value)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 4]} ..."
