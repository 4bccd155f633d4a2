"""`manifest.json` of a token store: reading, checking, sealing. Every key is required and no other is allowed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybrid.contracts.stable_json import stable_hash
from hybrid.data.files import CHUNK_BYTES
from hybrid.data.tokenizers import LARGEST_VOCABULARY
from hybrid.errors import DataContractError

FORMAT = "hybrid.tokens"
VERSION = 1
FILES = ("tokens.bin", "documents.bin", "tokenizer.json")
LARGEST_COUNT = 2**53 - 1  # exact in JavaScript's numbers


def seal(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with `manifestHash`: the stable hash of all its other fields."""
    body = {key: value for key, value in manifest.items() if key != "manifestHash"}
    return {**body, "manifestHash": stable_hash(body)}


def content_fingerprint(manifest: dict[str, Any]) -> str:
    """What identifies the data: ids, document borders and tokenizer. Not where it came from, nor how it is split."""
    return stable_hash(
        {
            "format": manifest["format"],
            "version": manifest["version"],
            "vocabularySize": manifest["vocabularySize"],
            "tokenizerHash": manifest["tokenizer"]["hash"],
            "endOfText": manifest["endOfText"],
            "documents": manifest["documents"],
            "tokens": manifest["tokens"],
            "tokensSha256": manifest["files"]["tokens.bin"]["sha256"],
            "documentsSha256": manifest["files"]["documents.bin"]["sha256"],
        }
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    """The checked manifest of the store in `folder`, or DataContractError saying which field is wrong and what it
    should be."""
    path = folder / "manifest.json"
    if not folder.is_dir():
        raise DataContractError(f"{folder}: there is no token store here; make one with `hybrid data build`")
    if not path.exists():
        raise DataContractError(f"{folder}: no manifest.json, so this folder is not a token store")
    try:
        manifest = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=_object)
    except OSError as error:
        raise DataContractError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataContractError(f"{path}: not UTF-8 at offset {error.start}") from None
    except json.JSONDecodeError as error:
        raise DataContractError(f"{path}: not JSON at offset {error.pos}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise DataContractError(f"{path}: not JSON that can be read: {error}") from None
    _Checker(path).manifest(manifest)
    return dict(manifest)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An ordinary parser keeps the last of two equal keys, another the first: two readers of two stores."""
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} appears twice in one object")
    return result


class _Checker:
    """Walks the manifest in the order of docs/formats/token_store.md and refuses the first thing that is wrong."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def manifest(self, value: Any) -> None:
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            self._refuse("format", value.get("format") if isinstance(value, dict) else value, f'"{FORMAT}"')
        if value.get("version") != VERSION or isinstance(value.get("version"), bool):
            self._refuse("version", value.get("version"), f"{VERSION}, the version that this program reads")
        self._fields(
            "",
            value,
            {
                "format": lambda name, part: None,
                "version": lambda name, part: None,
                "vocabularySize": lambda name, part: self._whole(name, part, 1, LARGEST_VOCABULARY),
                "tokenType": lambda name, part: self._one_of(name, part, ("uint16", "uint32")),
                "endOfText": self._end_of_text,
                "tokenizer": self._tokenizer,
                "documents": lambda name, part: self._whole(name, part, 1, LARGEST_COUNT),
                "tokens": lambda name, part: self._whole(name, part, 1, LARGEST_COUNT),
                "chunkBytes": lambda name, part: self._whole(name, part, CHUNK_BYTES, CHUNK_BYTES),
                "files": self._files,
                "split": self._split,
                "source": self._object,
                "fingerprint": self._digest,
                "manifestHash": self._digest,
            },
        )
        width = 2 if value["vocabularySize"] <= 2**16 else 4
        if value["tokenType"] != f"uint{8 * width}":
            self._refuse(
                "tokenType", value["tokenType"], f'"uint{8 * width}" for a vocabulary of {value["vocabularySize"]}'
            )
        if value["endOfText"] is not None and value["endOfText"] >= value["vocabularySize"]:
            self._refuse("endOfText", value["endOfText"], f"an id below {value['vocabularySize']}")
        for name, size in (("tokens.bin", value["tokens"] * width), ("documents.bin", (value["documents"] + 1) * 8)):
            if value["files"][name]["bytes"] != size:
                self._refuse(f"files.{name}.bytes", value["files"][name]["bytes"], f"{size}, as the counts say")
        if value["fingerprint"] != content_fingerprint(value):
            self._refuse(
                "fingerprint", value["fingerprint"], f"{content_fingerprint(value)}, the hash of what it covers"
            )
        sealed = seal(value)["manifestHash"]
        if value["manifestHash"] != sealed:
            self._refuse(
                "manifestHash", value["manifestHash"], f"{sealed}: the manifest was changed after it was written"
            )

    def _files(self, name: str, value: Any) -> None:
        self._fields(name + ".", value, dict.fromkeys(FILES, self._file))

    def _file(self, name: str, value: Any) -> None:
        self._fields(
            name + ".",
            value,
            {
                "bytes": lambda part_name, part: self._whole(part_name, part, 1, LARGEST_COUNT),
                "sha256": self._digest,
                "chunks": self._list,
            },
        )
        count = -(-value["bytes"] // CHUNK_BYTES)
        if len(value["chunks"]) != count:
            self._refuse(f"{name}.chunks", f"{len(value['chunks'])} digests", f"{count}, one for each 8 MiB")
        for number, digest in enumerate(value["chunks"]):
            self._digest(f"{name}.chunks[{number}]", digest)

    def _tokenizer(self, name: str, value: Any) -> None:
        kinds = ("bytes", "characters", "bpe")
        self._fields(
            name + ".",
            value,
            {"kind": lambda part_name, part: self._one_of(part_name, part, kinds), "hash": self._digest},
        )

    def _split(self, name: str, value: Any) -> None:
        self._fields(
            name + ".",
            value,
            {
                "by": lambda part_name, part: self._one_of(part_name, part, ("document", "share")),
                "validationShare": self._share,
                "seed": lambda part_name, part: self._whole(part_name, part, 0, LARGEST_COUNT),
            },
        )

    def _fields(self, prefix: str, value: Any, checks: dict[str, Callable[[str, Any], None]]) -> None:
        self._object(prefix.rstrip(".") or "manifest", value)
        for key in checks:
            if key not in value:
                raise DataContractError(f"{self._path}: {prefix}{key} is missing")
        for key in value:
            if key not in checks:
                raise DataContractError(f"{self._path}: {prefix}{key} is not a field of version {VERSION}")
        for key, check in checks.items():
            check(prefix + key, value[key])

    def _object(self, name: str, value: Any) -> None:
        if not isinstance(value, dict):
            self._refuse(name, value, "an object")

    def _list(self, name: str, value: Any) -> None:
        if not isinstance(value, list):
            self._refuse(name, value, "a list")

    def _whole(self, name: str, value: Any, least: int, most: int) -> None:
        if type(value) is not int or not least <= value <= most:
            self._refuse(name, value, str(least) if least == most else f"a whole number from {least} to {most}")

    def _end_of_text(self, name: str, value: Any) -> None:
        if value is not None:
            self._whole(name, value, 0, LARGEST_VOCABULARY)

    def _share(self, name: str, value: Any) -> None:
        if type(value) not in (int, float) or not 0 <= value < 1:
            self._refuse(name, value, "a number from 0 to below 1")

    def _one_of(self, name: str, value: Any, choices: tuple[str, ...]) -> None:
        if value not in choices:
            self._refuse(name, value, " or ".join(f'"{choice}"' for choice in choices))

    def _digest(self, name: str, value: Any) -> None:
        if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
            self._refuse(name, value, "64 lower-case hexadecimal digits")

    def _refuse(self, name: str, value: Any, expected: str) -> None:
        raise DataContractError(f"{self._path}: {name} is {json.dumps(value)[:200]}, expected {expected}")
