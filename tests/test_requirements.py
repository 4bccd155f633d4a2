"""What a machine lacks is named in the summary, and ends the run where HYBRID_REQUIRE asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")
Suite = Callable[..., tuple[int, str]]


@pytest.fixture
def run_suite(tmp_path: Path) -> Suite:
    """Runs one SwiftShader test with this conftest where Chromium is not installed: (exit code, output)."""
    text = CONFTEST.read_text(encoding="utf-8") + "\nSWIFTSHADER_FOLDERS = ()\n"
    (tmp_path / "conftest.py").write_text(text, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = swiftshader: needs it\n", encoding="utf-8")
    (tmp_path / "test_one.py").write_text(
        "import pytest\n@pytest.mark.swiftshader\ndef test_one(): pass\n", encoding="utf-8"
    )

    def run(*options: str, **environment: str) -> tuple[int, str]:
        clean = {name: value for name, value in os.environ.items() if name != "HYBRID_REQUIRE"}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
            cwd=tmp_path,
            env=clean | environment,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.parametrize("options", [(), ("--numprocesses", "2")], ids=["alone", "in-two-processes"])
def test_a_missing_driver_is_named_in_the_summary(run_suite: Suite, options: tuple[str, ...]) -> None:
    code, output = run_suite(*options)
    assert code == pytest.ExitCode.OK
    assert "1 skipped" in output
    assert "1 test(s): needs swiftshader: no vk_swiftshader_icd.json" in output


def test_a_missing_driver_that_is_required_is_an_error(run_suite: Suite) -> None:
    code, output = run_suite(HYBRID_REQUIRE="swiftshader")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "HYBRID_REQUIRE names 'swiftshader', which is missing: no vk_swiftshader_icd.json" in output


def test_an_unknown_requirement_is_an_error(run_suite: Suite) -> None:
    code, output = run_suite(HYBRID_REQUIRE="swiftshadr")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "HYBRID_REQUIRE names 'swiftshadr'" in output
