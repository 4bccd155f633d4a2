"""Where documents come from: text files, JSON Lines, and the Python standard library's own source files.

A source is iterated as often as needed (a tokenizer may have to be trained first) and gives the same documents in the
same order each time. `describe()` is plain data for the manifest; `digest()` changes when the source's files do.
"""

from __future__ import annotations

import codecs
import glob
import io
import json
import os
import platform
import sys
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hybrid.contracts.stable_json import stable_hash
from hybrid.errors import ConfigError, DataContractError

# Parts of the standard library that are tests, tables, third-party, generated for one platform, or packaged apart by
# some distributions; without them the corpus is the same on every machine that has this Python version.
SKIPPED_PARTS = frozenset(
    [
        "__phello__",
        "__pycache__",
        "curses",
        "dist-packages",
        "distutils",
        "encodings",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "msilib",
        "pydoc_data",
        "site-packages",
        "sqlite3",
        "test",
        "tests",
        "tkinter",
        "turtledemo",
        "venv",
    ]
)
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")


@dataclass(frozen=True)
class Document:
    """One text and the name by which errors call it."""

    name: str
    text: str


class Source(Protocol):
    """A corpus."""

    def documents(self) -> Iterator[Document]: ...

    def describe(self) -> dict[str, Any]: ...

    def digest(self) -> str: ...


@dataclass(frozen=True)
class TextFiles:
    """Text files, one document each; JSON Lines files (`.jsonl`), one document a line.

    paths: files, folders (every file below that is not hidden) or glob patterns (`**` goes into folders). Names are
    sorted by code point within a folder or pattern; a file named twice is read once. Text is UTF-8; a byte order mark
    is dropped and nothing else is changed. field: the key of the text in a JSON Lines object. max_bytes: read this
    many bytes of text (as UTF-8) and no more.
    """

    paths: tuple[str, ...]
    field: str = "text"
    max_bytes: int | None = None

    def files(self) -> list[Path]:
        """The files, in order. DataContractError for a path that is not there, or if there is no file at all."""
        found: dict[Path, Path] = {}  # by resolved path, so that no file is read twice
        for given in self.paths:
            path = Path(given).expanduser()
            if path.is_dir():
                matches = sorted(_visible(path), key=lambda file: file.relative_to(path).as_posix())
            elif path.is_file():
                matches = [path]
            elif glob.has_magic(given):
                names = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 (Path.glob takes no absolute pattern)
                matches = [Path(name) for name in names if Path(name).is_file()]
            else:
                problem = "neither a file nor a folder" if path.exists() else "there is no such file or folder"
                raise DataContractError(
                    f"{given}: {problem}; data.source takes text files, folders and patterns such as 'folder/**/*.txt'"
                )
            if not matches:
                raise DataContractError(f"{given}: no file found there, hidden ones aside; name a folder with text")
            for match in matches:
                found.setdefault(match.resolve(), match)
        if not found:
            raise DataContractError("the corpus is empty: no path was given")
        return list(found.values())

    def documents(self) -> Iterator[Document]:
        """DataContractError for a file that cannot be read or is not UTF-8, naming file and offset, and for a bad
        line."""
        return _within(self._all(), self.max_bytes)

    def describe(self) -> dict[str, Any]:
        return {"type": "files", "paths": list(self.paths), "field": self.field, "maxBytes": self.max_bytes}

    def digest(self) -> str:
        """Hash of the description and of each file's path, size and modification time."""
        listing = []
        for file in self.files():
            status = file.stat()
            listing.append([str(file.resolve()), status.st_size, str(status.st_mtime_ns)])
        return stable_hash({"source": self.describe(), "files": listing})

    def _all(self) -> Iterator[Document]:
        for file in self.files():
            if file.suffix == ".jsonl":
                yield from self._lines(file)
            else:
                yield self._whole(file)

    def _whole(self, file: Path) -> Document:
        # A little more than what may be used (a mark, an unfinished character), so that a huge file is not read for
        # its beginning.
        limit = -1 if self.max_bytes is None else self.max_bytes + 8
        data = _read_bytes(file, limit)
        complete = limit < 0 or len(data) < limit
        data = data.removeprefix(codecs.BOM_UTF8)
        try:
            text = codecs.getincrementaldecoder("utf-8")().decode(data, final=complete)
        except UnicodeDecodeError as error:
            raise DataContractError(
                f"{file}: not UTF-8 at offset {error.start} (byte 0x{data[error.start]:02X}: {error.reason}); "
                "convert the file, or name the text files with a pattern such as 'folder/**/*.txt'"
            ) from None
        return Document(str(file), text)

    def _lines(self, file: Path) -> Iterator[Document]:
        try:
            with file.open("rb") as stream:
                for number, line in enumerate(stream, start=1):
                    if number == 1:
                        line = line.removeprefix(codecs.BOM_UTF8)
                    if line.strip():
                        yield Document(f"{file}:{number}", self._text_of(line, f"{file}, line {number}"))
        except OSError as error:
            raise DataContractError(f"{file}: cannot be read: {error.strerror}") from None

    def _text_of(self, line: bytes, place: str) -> str:
        try:
            value = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DataContractError(f"{place}: not UTF-8 at byte {error.start} of the line") from None
        except (ValueError, RecursionError) as error:
            raise DataContractError(f"{place}: not JSON: {error}") from None
        if not isinstance(value, dict):
            raise DataContractError(f"{place}: a JSON {type(value).__name__}, expected an object with {self.field!r}")
        if self.field not in value:
            known = ", ".join(sorted(value)[:10]) or "none"
            raise DataContractError(f"{place}: no field {self.field!r}; it has: {known}")
        text = value[self.field]
        if not isinstance(text, str):
            raise DataContractError(f"{place}: field {self.field!r} is {json.dumps(text)[:80]}, expected a string")
        return text


@dataclass
class StandardLibrary:
    """The default corpus: the source files of the running Python's standard library, found on every machine.

    Sorted by name; skipped are tests, data tables, third-party packages and platform files (SKIPPED_PARTS). Decoded
    as PEP 263 says, line ends become \\n. max_bytes: as in `TextFiles`. A file that cannot be read or decoded is
    skipped, and counted in `skipped`.
    """

    max_bytes: int | None = 8_000_000
    root: Path = field(default_factory=lambda: Path(sysconfig.get_path("stdlib")))
    skipped: int = 0

    def files(self) -> list[Path]:
        """The files, in order. DataContractError if there are none."""
        found = {}
        for folder, folders, names in os.walk(self.root):
            folders[:] = [name for name in folders if not _skipped(name)]
            for name in names:
                if name.endswith(".py") and not _skipped(name):
                    file = Path(folder, name)
                    found[file.relative_to(self.root).as_posix()] = file
        if not found:
            raise DataContractError(
                f"{self.root}: no source files of the Python standard library here; "
                "name a text file or folder as data.source"
            )
        return [found[name] for name in sorted(found)]

    def documents(self) -> Iterator[Document]:
        """The files as documents, named by their path below the library's folder."""
        return _within(self._all(), self.max_bytes)

    def _all(self) -> Iterator[Document]:
        self.skipped = 0
        for file in self.files():
            try:
                data = file.read_bytes()
                encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
                text = data.decode(encoding)
            except (OSError, SyntaxError, UnicodeDecodeError, LookupError):
                self.skipped += 1
                continue
            yield Document(file.relative_to(self.root).as_posix(), text.replace("\r\n", "\n").replace("\r", "\n"))

    def describe(self) -> dict[str, Any]:
        version = platform.python_version()
        return {"type": "stdlib", "python": f"{sys.implementation.name} {version}", "maxBytes": self.max_bytes}

    def digest(self) -> str:
        """Hash of the description and of each file's name and size; the same in every installation of this version."""
        listing = [[file.relative_to(self.root).as_posix(), file.stat().st_size] for file in self.files()]
        return stable_hash({"source": self.describe(), "files": listing})


def open_source(source: str | Sequence[str], *, max_bytes: int | None = None, field: str = "text") -> Source:
    """The corpus that `data.source` names: "stdlib", or files, folders and patterns. max_bytes as in the classes."""
    if source == "stdlib":
        return StandardLibrary(max_bytes=max_bytes)
    paths = (source,) if isinstance(source, str) else tuple(source)
    if "stdlib" in paths:
        raise ConfigError("data.source: stdlib stands alone, it is not one of several paths")
    return TextFiles(paths, field=field, max_bytes=max_bytes)


def _skipped(name: str) -> bool:
    return name in SKIPPED_PARTS or name.startswith(SKIPPED_PREFIXES)


def _within(documents: Iterator[Document], max_bytes: int | None) -> Iterator[Document]:
    """The documents up to `max_bytes` of text; the one that crosses the line is cut at a character."""
    room = sys.maxsize if max_bytes is None else max_bytes
    for document in documents:
        data = document.text.encode("utf-8", "surrogatepass")
        if len(data) > room:
            if room:
                yield Document(document.name, data[:room].decode("utf-8", "ignore"))
            return
        room -= len(data)
        yield document


def _visible(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _visible(entry)
        elif entry.is_file():
            yield entry


def _read_bytes(file: Path, limit: int = -1) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(limit)
    except OSError as error:
        raise DataContractError(f"{file}: cannot be read: {error.strerror}") from None
