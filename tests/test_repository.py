"""What holds for the tree as a whole: no path of a machine, nothing that unpickles, files short enough to read, folders
that say what they are for, a lock that fixes what is installed, and a wheel that carries the shaders and schemas.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = {".py", ".md", ".toml", ".wgsl", ".js", ".html", ".json", ".txt", ".lock", ".yml", ""}
LONGEST_FILE = 900  # lines


@cache
def files() -> tuple[Path, ...]:
    """What belongs to the project: what git tracks, or would track (new files count before they are committed)."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    paths = (ROOT / name for name in listed.stdout.decode().split("\0") if name)
    return tuple(sorted(path for path in paths if path.is_file()))


def sources(*suffixes: str) -> list[Path]:
    return [path for path in files() if path.suffix in suffixes]


def test_no_file_names_a_path_of_one_machine() -> None:
    path_of_a_machine = re.compile(r"/(?:work|farm|root|tmp|home/[a-z]+)/")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path in files()
        if path.suffix in TEXT and path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if path_of_a_machine.search(line)
    ]
    assert not found, "\n".join(found)


def test_no_file_names_a_package_registry() -> None:
    """Where packages come from is the machine's choice: mirrors and offline folders work without a change here."""
    registry = re.compile(r"pythonhosted\.org|//pypi\.|registry\.npmjs|deb\.debian\.org|--(?:extra-)?index-url")
    found = [
        str(path.relative_to(ROOT))
        for path in files()
        if path.suffix in TEXT and path != Path(__file__) and registry.search(path.read_text(encoding="utf-8"))
    ]
    assert not found, found


def test_the_package_never_unpickles() -> None:
    """A checkpoint comes from strangers: JSON and safetensors carry data, a pickle carries code."""
    modules_that_run_code = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    found = []
    for path in sources(".py"):
        if ROOT / "python" not in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: set[str] = set()
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").split(".")[0]}
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "torch.save"):
                names = {"pickle"}
            elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                names = set() if isinstance(node.value, ast.Constant) and node.value.value is False else {"pickle"}
            if names & modules_that_run_code:
                found.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}")
    assert not found, found


def test_files_are_short_enough_to_read() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources(".py", ".js", ".wgsl")}
    long = [f"{path.relative_to(ROOT)}: {length} lines" for path, length in lengths.items() if length > LONGEST_FILE]
    assert not long, long


def test_every_folder_of_the_package_says_what_it_is_for() -> None:
    folders = {path.parent for path in sources(".py") if ROOT / "python" / "hybrid" in [path.parent, *path.parents]}
    silent = []
    for folder in sorted(folders):
        init = folder / "__init__.py"
        text = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) if init.exists() else None
        top = folder == ROOT / "python" / "hybrid"
        if not text or not (top or "import" in text.lower() or folder.parent.name == "plan"):
            silent.append(f"{init.relative_to(ROOT)}: say what the folder is for and what it may import")
    assert not silent, silent


def test_every_requirement_is_locked() -> None:
    def canonical(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    wanted += [*extras["dev"], *extras["torch"]]
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][A-Za-z0-9.]*", pin) for pin in pins)
    locked = {canonical(pin.split("==")[0]) for pin in pins}
    missing = {canonical(re.split(r"[<>=!~\[; ]", requirement)[0]) for requirement in wanted} - locked
    assert not missing, f"{sorted(missing)}: run `make lock`"
    assert "torch==2.13.0" in pins


def test_the_wheel_carries_shaders_and_schemas(tmp_path: Path) -> None:
    """Installed from the wheel, away from any checkout, `resource` finds every file of both folders."""
    pytest.importorskip("hatchling", reason="the wheel is built with hatchling: make test installs it")
    built = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--no-build-isolation",
            "--wheel-dir",
            str(tmp_path),
            str(ROOT),
        ],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("hybrid-*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)

    shipped = [p.relative_to(ROOT) for p in files() if p.relative_to(ROOT).parts[:1] == ("shaders",)]
    shipped += [p.relative_to(ROOT) for p in files() if p.relative_to(ROOT).parts[:2] == ("bridge", "schemas")]
    assert shipped
    script = "import sys; from hybrid.resources import resource; [print(resource(name)) for name in sys.argv[1:]]"
    found = subprocess.run(
        [sys.executable, "-c", script, *map(Path.as_posix, shipped)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    for name, path in zip(shipped, map(Path, found.stdout.splitlines()), strict=True):
        assert site in path.parents
        assert path.read_bytes() == (ROOT / name).read_bytes()
