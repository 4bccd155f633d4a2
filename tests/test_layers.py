"""Imports point downwards only, the lower layers need nothing but the standard library, and optional packages stay in
their folder.

Every import statement counts, also one inside a function or under TYPE_CHECKING: where it stands changes when it runs,
not what depends on what.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "python" / "hybrid"

LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "resources", "contracts", "random"}),
    frozenset({"ops", "graph"}),
    frozenset({"models", "objectives", "optim"}),
    frozenset({"plan"}),
    frozenset({"config"}),
    frozenset({"data", "checkpoint"}),
    frozenset({"backends"}),
    frozenset({"training"}),
    frozenset({"bridge"}),
    frozenset({"cli"}),
)
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
HIGHEST_STANDARD_LIBRARY_LAYER = RANK["plan"]

# Which part of the package may import which package that is not always wanted. A prefix covers everything below it.
ONLY_IN = {
    "wgpu": ("backends.webgpu",),
    "torch": ("backends.torch",),
    "fastapi": ("bridge",),
    "uvicorn": ("bridge",),
    "datasets": ("data",),
    "transformers": ("checkpoint",),
    "tensorboard": ("training",),
    "wandb": ("training",),
    "tokenizers": ("data",),
    "pydantic": ("config", "bridge"),
    "rich": ("cli", "training"),
}


def module_name(path: Path) -> str:
    """ "graph.ir" for .../hybrid/graph/ir.py; "" for the package's own __init__."""
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules() -> dict[str, Path]:
    return {module_name(path): path for path in sorted(PACKAGE.rglob("*.py")) if "_shared" not in path.parts}


def imports(name: str, tree: ast.AST, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of every import; `from a import b` gives `a.b`, a module or something in one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = ["hybrid", *(name.split(".") if name else [])]
                package = package[: len(package) - node.level + (1 if is_package else 0)]
                base = ".".join(package + ([base] if base else []))
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def all_imports() -> Iterator[tuple[str, int, str]]:
    for name, path in modules().items():
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        for line, imported in imports(name, tree, path.name == "__init__.py"):
            yield name, line, imported


def part_of(name: str) -> str:
    return name.split(".")[0]


def test_every_module_belongs_to_a_layer() -> None:
    strangers = {part_of(name) for name in modules()} - set(RANK) - {"", "__main__"}
    assert not strangers, f"{sorted(strangers)}: name their layer in {Path(__file__).name} and in the architecture"


def test_imports_point_downwards() -> None:
    upward = [
        f"{name}:{line} imports {imported}"
        for name, line, imported in all_imports()
        if imported.startswith("hybrid.")
        and name not in ("", "__main__")
        and RANK.get(part_of(imported.removeprefix("hybrid.")), 0) > RANK.get(part_of(name), 0)
    ]
    assert not upward, "\n".join(upward)


def test_parts_of_one_layer_do_not_import_each_other_in_a_circle() -> None:
    edges: dict[str, set[str]] = {}
    for name, _, imported in all_imports():
        source, target = part_of(name), part_of(imported.removeprefix("hybrid."))
        if imported.startswith("hybrid.") and source in RANK and target in RANK and source != target:
            edges.setdefault(part_of(name), set()).add(target)

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        frontier = [start]
        while frontier:
            for following in edges.get(frontier.pop(), set()) - seen:
                seen.add(following)
                frontier.append(following)
        return seen

    circular = sorted(part for part in edges if part in reachable(part))
    assert not circular, f"import each other in a circle: {circular}"


def test_the_lower_layers_need_only_the_standard_library() -> None:
    """They run in Pyodide's core. NumPy twins (`*_numpy.py`) are modules of their own that no plain module imports."""
    foreign = []
    for name, line, imported in all_imports():
        if RANK.get(part_of(name), len(LAYERS)) > HIGHEST_STANDARD_LIBRARY_LAYER or name.endswith("_numpy"):
            continue
        root = imported.split(".")[0]
        if root == "hybrid":
            if any(piece.endswith("_numpy") for piece in imported.split(".")):
                foreign.append(f"{name}:{line} imports the NumPy twin {imported}")
        elif root not in sys.stdlib_module_names:
            foreign.append(f"{name}:{line} imports {imported}")
    assert not foreign, "\n".join(foreign)


def test_importing_the_package_itself_imports_nothing_else() -> None:
    """`import hybrid` runs before every module of every layer, so it may depend on none of them."""
    assert [entry for entry in all_imports() if entry[0] == "" and entry[2] != "__future__.annotations"] == []


@pytest.mark.parametrize("package", sorted(ONLY_IN))
def test_packages_are_imported_only_where_they_belong(package: str) -> None:
    folders = ONLY_IN[package]
    stray = [
        f"{name}:{line} imports {imported}"
        for name, line, imported in all_imports()
        if imported.split(".")[0] == package and not any(name == f or name.startswith(f + ".") for f in folders)
    ]
    assert not stray, f"{package} belongs in {folders}:\n" + "\n".join(stray)


def test_the_reader_of_imports_sees_every_form() -> None:
    text = "import a.b\nfrom . import c\nfrom ..x import y\ndef f():\n    from hybrid.cli import main\n"
    found = {imported for _, imported in imports("graph.ir", ast.parse(text), is_package=False)}
    assert found == {"a.b", "hybrid.graph.c", "hybrid.x.y", "hybrid.cli.main"}
    assert {i for _, i in imports("graph", ast.parse("from . import ir"), is_package=True)} == {"hybrid.graph.ir"}
