"""The page as a folder of files."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest

from browser import site_fixtures
from hybrid.bridge import site
from hybrid.bridge.stories import stories
from hybrid.cli.main import main
from hybrid.config.contract import contract
from hybrid.config.problems import parse_config
from hybrid.errors import ConfigError, HybridError
from hybrid.plan.folder import read_plan


@pytest.fixture(autouse=True)
def _page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the built page, which needs Node.js."""
    page = tmp_path / "built"
    page.mkdir()
    (page / "index.html").write_text("the page")

    def resource(name: str) -> Path:
        if name == site.PAGE:
            return page
        if not (found := tmp_path / Path(name).relative_to("web/dist")).exists():
            raise HybridError(f"this installation lacks {name}")
        return found

    monkeypatch.setattr(site, "resource", resource)


def test_it_holds_page_text_and_a_plan_for_each_size_precision_and_profile(tmp_path: Path) -> None:
    out = tmp_path / "site"
    site_fixtures.write(out)
    assert (out / "index.html").read_text() == "the page"
    document = json.loads((out / "site.json").read_text())
    assert document["planners"] == {"server": None, "python": None}
    assert (out / document["text"]["file"]).stat().st_size == document["text"]["bytes"]
    [size] = document["sizes"]
    assert size["parameters"] == 21_600
    for precision, variant in size["precisions"].items():
        config = parse_config(variant["config"])
        assert contract(config) == variant["contract"]
        assert config.precision.type == precision
        for listed in variant["plans"]:
            plan = read_plan(out / listed["folder"])
            assert plan.precision == precision
            assert plan.requires == listed["requires"]
            assert ("subgroups" in plan.requires["features"]) == bool(listed["subgroupSize"])
            assert listed["memoryBytes"] == sum(sum(pages) for pages in plan.arenas.values())


def test_python_goes_along_where_it_is_built_and_wanted(tmp_path: Path) -> None:
    assert site.built_python() is None
    with pytest.raises(ConfigError, match="make pyodide"):
        site.built_python(True)
    built = tmp_path / "pyodide"
    built.mkdir()
    (built / "worker.js").write_text("the worker")
    (built / "hybrid.zip").write_bytes(b"the compiler")
    assert site.built_python() == site.built_python(True) == built
    assert site.built_python(False) is None
    out = tmp_path / "site"
    site_fixtures.write(out, python=built, server="api/plans")
    document = json.loads((out / "site.json").read_text())
    planners = document["planners"]
    assert planners["server"] == "api/plans"
    [size] = document["sizes"]
    assert [variant["plans"] for variant in size["precisions"].values()] == [[], []], "that server makes them"
    assert size["parameters"] == 21_600 and not (out / "plans").exists()
    assert planners["python"]["folder"] == "pyodide/"
    assert (out / "pyodide" / "worker.js").read_text() == "the worker"


def test_the_same_sources_write_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        site_fixtures.write(tmp_path / name)
    files = [path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file()]
    assert len(files) > 8
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file


def test_the_command_writes_nothing_into_a_folder_that_holds_something(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kept").write_text("mine")
    assert main(["export-site", str(tmp_path)]) == 2
    assert "expected a new or empty folder" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["built", "kept"]


@pytest.mark.parametrize("was_there", [True, False])
def test_a_disk_that_fills_up_leaves_nothing_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was_there: bool
) -> None:
    out = tmp_path / "site"
    if was_there:
        out.mkdir()

    reason = "No space left on device"

    def full(plan: object, folder: Path) -> None:
        raise OSError(errno.ENOSPC, reason)

    def full_at_once(page: Path, folder: Path, **_: object) -> None:
        folder.mkdir(exist_ok=True)
        raise shutil.Error([("a", "b", reason), ("c", "d", reason)])

    for module, name, broken in ((site, "write_plan", full), (shutil, "copytree", full_at_once)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, broken)
            with pytest.raises(HybridError, match=f"site: the page cannot be written there: {reason}$"):
                site_fixtures.write(out)
        assert not list(out.iterdir()) if was_there else not out.exists()
    site_fixtures.write(out)
    with pytest.raises(HybridError, match="cannot be written there: Not a directory"):
        site_fixtures.write(out / "index.html" / "site")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="expected a new or empty folder"):
        site_fixtures.write(tmp_path / "link")


def test_the_stories_are_plain_english_and_always_the_same() -> None:
    text = stories(50)
    assert text == stories(50)
    assert text != stories(50, seed=1)
    assert text.isascii()
    assert text.startswith("Once upon a time ")
    assert len(text.split("\n\n")) == 50
    assert "{" not in text
