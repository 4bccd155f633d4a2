"""The kernel tests once more, under SwiftShader: another compiler, subgroups of four, no shader-f16.

Two Vulkan drivers cannot be in one process, so the tests run in a second one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from conftest import swiftshader_icd

FOLDER = Path(__file__).parent


@pytest.mark.swiftshader
def test_every_f32_kernel_test_passes_under_swiftshader(tmp_path):
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(FOLDER)]
    command += ["-m", "webgpu and not acceptance", "--deselect", str(Path(__file__))]
    environment = {**os.environ, "VK_ICD_FILENAMES": str(swiftshader_icd()), "HYBRID_REQUIRE": "webgpu"}
    done = subprocess.run(command, cwd=FOLDER.parents[1], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]

    passed, skipped = [], {}
    for case in ElementTree.parse(report).iter("testcase"):
        reason = case.find("skipped")
        if reason is None:
            passed.append(case.get("name"))
        else:
            skipped[case.get("name")] = reason.get("message")
    # Nothing but f16 and products that need wider subgroups may be missing, and half of the tests are f32: a driver
    # that skips its way through is noticed.
    allowed = ("lacks shader-f16", "has subgroups of less than")
    assert {reason for reason in skipped.values() if not any(known in reason for known in allowed)} == set()
    assert all("SwiftShader" in reason for reason in skipped.values())
    assert not [name for name in passed if "mixed-f16" in name]
    assert len(passed) >= 340, f"only {len(passed)} tests passed"
