"""The parity contract for the session of a browser tab, in Chromium on SwiftShader: against float64, the reference
backend and the hand-written torch model, and against the same kernels through wgpu-py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from browser.harness import Chromium, StaticServer
from hybrid.resources import resource
from hybrid.training.parity import checks
from hybrid.training.parity.mutants import MUTANTS, check_mutants
from hybrid.training.parity.runtimes import SessionRuntime, float64, webgpu
from hybrid.training.parity.workload import MODELS
from parity.browser_runtime import browser
from parity.legs import assert_relay_equals, relay_over_ranks
from parity.traces import assert_all_pass, traces, workload

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def tab(chromium: Chromium, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionRuntime]:
    web, plans = resource("web"), tmp_path_factory.mktemp("plans")
    with StaticServer({"/runtime/": web / "runtime", "/test/": web / "test", "/plans/": plans}) as server:
        page = chromium.open(server)
        runtime = browser(page, plans, "/plans/")
        yield runtime
        runtime.close()
        page.close()


@pytest.fixture(scope="module")
def desktop() -> Iterator[SessionRuntime]:
    runtime = webgpu()
    yield runtime
    runtime.close()


@pytest.mark.webgpu
@pytest.mark.torch
@pytest.mark.parametrize("model", MODELS)
def test_ten_steps_agree_and_repeat_and_resume(tab: SessionRuntime, desktop: SessionRuntime, model: str) -> None:
    work = workload(model)
    in_tab = tab.train(work)
    compared = traces(work, "float64", "reference", "torch") | {"webgpu": desktop.train(work), "browser": in_tab}
    rows = [*checks.compare_starts(work, compared), *checks.compare_losses(work, compared, "loss")]
    rows += checks.compare_bookkeeping(work, compared)
    rows += checks.check_repeatable(work, tab, in_tab)
    rows.append(checks.check_splits(work, tab))
    assert_all_pass(rows)


@pytest.mark.webgpu
@pytest.mark.torch
@pytest.mark.parametrize("model", MODELS)
def test_updates_agree_after_a_hundred_steps(tab: SessionRuntime, desktop: SessionRuntime, model: str) -> None:
    long = replace(workload(model), steps=checks.LONG_STEPS)
    compared = traces(long, "float64", "torch") | {"webgpu": desktop.train(long), "browser": tab.train(long)}
    assert_all_pass(list(checks.compare_updates(long, compared)))


@pytest.mark.torch
def test_a_relay_over_the_tab_and_torch_on_two_ranks_and_one_equals_the_straight_run(
    tab: SessionRuntime, tmp_path: Path
) -> None:
    work = workload("llama")
    assert_relay_equals(work, relay_over_ranks(tmp_path, work, lambda: tab.make(work)), tab.train(work))


def test_every_mutant_is_noticed_in_the_tab(tab: SessionRuntime) -> None:
    verdicts = check_mutants(float64(), [tab], models=["llama"])
    assert len(verdicts) == len(MUTANTS)
    assert not [verdict.mutant for verdict in verdicts if verdict.survived]
