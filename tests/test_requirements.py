"""What a machine lacks is named in the summary, and fails where HYBRID_REQUIRE asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")


@pytest.fixture
def run_suite(tmp_path: Path):
    """Runs a suite of one passing SwiftShader test with this repository's conftest: (exit code, output)."""
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = swiftshader: needs it\naddopts = -ra\n", encoding="utf-8")
    (tmp_path / "test_one.py").write_text(
        "import pytest\n@pytest.mark.swiftshader\ndef test_one(): pass\n", encoding="utf-8"
    )

    def run(**environment: str) -> tuple[int, str]:
        clean = {name: value for name, value in os.environ.items() if name != "HYBRID_REQUIRE"}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"],
            cwd=tmp_path, env=clean | environment, capture_output=True, text=True,
        )
        return done.returncode, done.stdout + done.stderr

    return run


def test_a_missing_driver_is_named_in_the_summary(run_suite) -> None:
    code, output = run_suite(HYBRID_SWIFTSHADER_ICD="nowhere.json")
    assert code == 0
    assert "1 skipped" in output and "no SwiftShader driver at nowhere.json" in output


def test_a_missing_driver_that_is_required_fails(run_suite) -> None:
    code, output = run_suite(HYBRID_SWIFTSHADER_ICD="nowhere.json", HYBRID_REQUIRE="swiftshader")
    assert code == 1
    assert "HYBRID_REQUIRE names swiftshader, and no SwiftShader driver at nowhere.json" in output


def test_an_unknown_requirement_is_an_error(run_suite) -> None:
    code, output = run_suite(HYBRID_REQUIRE="swiftshadr")
    assert code != 0
    assert "HYBRID_REQUIRE names ['swiftshadr']" in output
