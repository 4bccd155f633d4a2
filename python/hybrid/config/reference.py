"""The reference tables of docs/configuration.md. `python -m hybrid.config.reference` writes them between the file's
markers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybrid.config.schema import config_schema

FILE = Path("docs/configuration.md")
BEGIN = "<!-- begin: python -m hybrid.config.reference -->"
END = "<!-- end -->"


def reference_tables() -> str:
    """A heading, a sentence and a table of keys for each section, in the order of the tree."""
    schema = config_schema()
    sections = {name: value for name, value in schema["properties"].items() if "$ref" in value}
    return "\n".join(_section(schema["$defs"], name, value) for name, value in sections.items())


def with_tables(document: str) -> str:
    """The document with the tables between its markers renewed."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{reference_tables()}\n{END}{after}"


def _section(definitions: dict[str, Any], name: str, value: dict[str, Any]) -> str:
    definition = definitions[_name(value)]
    lines = [f"### {name}", "", definition["description"], ""]
    lines += ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    lines += [
        f"| `{key}` | {kind} | {default} | {text} |" for key, kind, default, text in _rows(definitions, definition)
    ]
    return "\n".join([*lines, ""])


def _rows(
    definitions: dict[str, Any], definition: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, str, str, str]]:
    for key, value in definition["properties"].items():
        if "$ref" in value:
            yield from _rows(definitions, definitions[_name(value)], f"{prefix}{key}.")
        else:
            text = value.get("description", "").replace("\n", " ").replace("|", "\\|")
            yield f"{prefix}{key}", _kind(value), f"`{json.dumps(value['default'])}`", text


def _name(value: dict[str, Any]) -> str:
    reference: str = value["$ref"]
    return reference.rsplit("/", 1)[-1]


def _kind(value: dict[str, Any]) -> str:
    """The values that a key takes, in words."""
    if "anyOf" in value:
        return " or ".join(_kind(option) for option in value["anyOf"])
    if "enum" in value:
        return ", ".join(f"`{option}`" for option in value["enum"])
    if value["type"] == "array":
        return "list"
    words = {"integer": "whole number", "number": "number", "boolean": "true, false", "string": "text", "null": "null"}
    kind = words[value["type"]]
    limits = [
        f"{sign} {value[name]:,}"
        for name, sign in (("exclusiveMinimum", ">"), ("minimum", "≥"), ("exclusiveMaximum", "<"), ("maximum", "≤"))
        if name in value and value[name] < 2**53 - 1
    ]
    return " ".join([kind, ", ".join(limits)]).strip()


def main() -> None:
    """Renew the tables in the checkout that is the current folder."""
    FILE.write_text(with_tables(FILE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
