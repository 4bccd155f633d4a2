"""Packs Python for the tab: modules as byte code, in archives that are the same bytes each time.

Runs inside Pyodide, whose Python is the one that will read them, when the bundle is built (`web/build_pyodide.js`).
"""

from __future__ import annotations

import py_compile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

# The parts of `hybrid` that need nothing but the standard library.
LAYERS = ("contracts", "random", "ops", "graph", "models", "objectives", "optim", "plan")
MODULES = ("__init__.py", "errors.py", "resources.py", "ops.py")
# Of Python's own library: what has no use in a tab (processes, sockets, terminals, servers, debuggers, builds).
# fmt: off
UNWANTED = frozenset((
    "__hello__", "__phello__", "_android_support", "_apple_support", "_ios_support", "_osx_support", "_pyrepl",
    "_pyio", "antigravity", "bdb", "cProfile", "cmd", "code", "compileall", "ctypes", "curses", "dbm", "doctest",
    "ensurepip", "filecmp", "fileinput", "ftplib", "getopt", "getpass", "html", "http", "idlelib", "imaplib",
    "lib2to3", "mailbox", "mimetypes", "modulefinder", "msilib", "multiprocessing", "netrc", "nturl2path",
    "optparse", "pdb", "pickletools", "plistlib", "poplib", "profile", "pstats", "pty", "pyclbr", "pydoc",
    "pydoc_data", "pydoc_topics", "rlcompleter", "runpy", "sched", "shelve", "smtplib", "socketserver", "sqlite3",
    "symtable", "tabnanny", "telnetlib", "test", "this", "timeit", "tkinter", "trace", "tty", "turtle",
    "turtledemo", "unittest", "venv", "wave", "webbrowser", "wsgiref", "xml", "xmlrpc", "zipapp", "zoneinfo",
))
# fmt: on
ENCODINGS = frozenset({"__init__", "aliases", "ascii", "cp437", "latin_1", "utf_8", "utf_8_sig"})
STORED_AT = (1980, 1, 1, 0, 0, 0)  # the beginning of time for archives: the same bytes from the same sources


def byte_code(name: str, source: bytes) -> bytes:
    """The .pyc of a module. Nobody looks for its source again, so it holds no time and no path but `name`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "module.py")
        path.write_bytes(source)
        compiled = path.with_suffix(".pyc")
        py_compile.compile(
            str(path),
            str(compiled),
            dfile=name,
            doraise=True,
            optimize=0,  # docstrings stay: dataclasses work one out where there is none, at each start
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
        return compiled.read_bytes()


def write_archive(path: Path, files: Iterable[tuple[str, bytes]]) -> None:
    """Modules (.py) go in as byte code at the same place, all else as it is; sorted by name."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in sorted(files):
            if name.endswith(".py"):
                name, content = f"{name}c", byte_code(name, content)
            entry = zipfile.ZipInfo(name, STORED_AT)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)


def library_files(checkout: Path) -> Iterable[tuple[str, bytes]]:
    """What `hybrid.zip` holds: the layers, the shaders where a wheel has them, and `hybrid_tab`."""
    package = checkout / "python" / "hybrid"
    sources = [package / name for name in MODULES]
    for layer in LAYERS:
        sources += (package / layer).rglob("*.py")
    for path in sources:
        if not path.stem.endswith("_numpy"):
            yield f"hybrid/{path.relative_to(package).as_posix()}", path.read_bytes()
    for path in (checkout / "shaders").rglob("*.wgsl"):
        yield f"hybrid/_shared/shaders/{path.relative_to(checkout / 'shaders').as_posix()}", path.read_bytes()
    tab = checkout / "bridge" / "pyodide"
    for path in (tab / "hybrid_tab").rglob("*.py"):
        yield path.relative_to(tab).as_posix(), path.read_bytes()


def standard_library_files(archive: Path) -> Iterable[tuple[str, bytes]]:
    """Pyodide's library without what a tab has no use for."""
    with zipfile.ZipFile(archive) as library:
        for name in library.namelist():
            first, _, rest = name.partition("/")
            stem = rest.removesuffix(".py")
            if name.endswith("/") or first.removesuffix(".py") in UNWANTED:
                continue
            if first == "encodings" and stem not in ENCODINGS:
                continue
            yield name, library.read(name)


def pack(checkout: str, pyodide: str, out: str) -> None:
    """Write `hybrid.zip` and `python_stdlib.zip` into the folder `out`."""
    write_archive(Path(out, "hybrid.zip"), library_files(Path(checkout)))
    write_archive(Path(out, "python_stdlib.zip"), standard_library_files(Path(pyodide, "python_stdlib.zip")))
