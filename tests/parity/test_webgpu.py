"""The parity contract for the WebGPU backend, against float64, the reference backend and the hand-written torch model:
on the machine's adapter, and under SwiftShader in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from conftest import swiftshader_icd
from hybrid.training.parity import checks
from hybrid.training.parity.mutants import MUTANTS, check_mutants
from hybrid.training.parity.runtimes import SessionRuntime, float64, reference, webgpu
from hybrid.training.parity.workload import MODELS
from parity.traces import assert_all_pass, traces, workload


@pytest.fixture(scope="module")
def device_runtime() -> Iterator[SessionRuntime]:
    runtime = webgpu()
    yield runtime
    runtime.close()


@pytest.mark.webgpu
@pytest.mark.torch
@pytest.mark.parametrize("model", MODELS)
def test_ten_steps_agree_and_repeat_and_resume(device_runtime: SessionRuntime, model: str) -> None:
    work = workload(model)
    on_device = device_runtime.train(work)
    compared = traces(work, "float64", "reference", "torch") | {"webgpu": on_device}
    rows = [*checks.compare_starts(work, compared), *checks.compare_losses(work, compared, "loss")]
    rows += checks.compare_bookkeeping(work, compared)
    rows += checks.check_repeatable(work, device_runtime, on_device)
    rows.append(checks.check_splits(work, device_runtime))
    assert_all_pass(rows)


@pytest.mark.webgpu
@pytest.mark.torch
@pytest.mark.parametrize("model", MODELS)
def test_updates_agree_after_a_hundred_steps(device_runtime: SessionRuntime, model: str) -> None:
    long = replace(workload(model), steps=checks.LONG_STEPS)
    compared = traces(long, "float64", "torch") | {"webgpu": device_runtime.train(long)}
    assert_all_pass(list(checks.compare_updates(long, compared)))


@pytest.mark.webgpu
@pytest.mark.parametrize("model", MODELS)
def test_mixed_training_stays_near_f32_and_skips_an_overflowed_step(device_runtime: SessionRuntime, model: str) -> None:
    if "mixed-f16" not in device_runtime.precisions:
        pytest.skip("the adapter lacks shader-f16")
    work = workload(model)
    f32 = traces(work, "reference") | {"webgpu": device_runtime.train(work)}
    assert_all_pass(list(checks.check_mixed(replace(work, precision="mixed-f16"), [reference(), device_runtime], f32)))


@pytest.mark.webgpu
def test_every_mutant_is_noticed_on_the_device(device_runtime: SessionRuntime) -> None:
    verdicts = check_mutants(float64(), [device_runtime], models=["llama"])
    assert len(verdicts) == len(MUTANTS)
    assert not [verdict.mutant for verdict in verdicts if verdict.survived]


@pytest.mark.swiftshader
def test_the_f32_contract_holds_under_swiftshader(tmp_path: Path) -> None:
    """The tests above once more: another compiler of shaders, subgroups of four, no f16."""
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", __file__]
    command += ["-m", "webgpu and not acceptance"]
    environment = {**os.environ, "VK_ICD_FILENAMES": str(swiftshader_icd()), "HYBRID_REQUIRE": "webgpu,torch"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    cases = list(ElementTree.parse(report).iter("testcase"))
    skipped = [case for case in cases if case.find("skipped") is not None]
    assert all("mixed" in str(case.get("name")) for case in skipped)
    assert len(cases) - len(skipped) == 2 * len(MODELS) + 1
