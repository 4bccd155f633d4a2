"""The JavaScript runtime in a real Chromium: Tint compiles every kernel, and training gives the reference's numbers."""

import numpy as np
import pytest

from browser.plan_fixtures import fixtures, write_run
from hybrid.plan.profile import DeviceProfile

pytestmark = pytest.mark.browser

MODULE = "/test/support/page.js"


@pytest.mark.parametrize(
    "pipelines", [pytest.param(False, id="wgsl"), pytest.param(True, id="pipelines", marks=pytest.mark.acceptance)]
)
def test_tint_compiles_every_kernel_of_every_plan_and_variant(page, pipelines):
    report = page.call(MODULE, "runScenario", "compileKernels", pipelines)
    assert report["refused"] == []
    assert report["compiled"] > 100
    assert report["features"] == ["subgroups"]  # SwiftShader has no f16


@pytest.mark.parametrize(("model", "place"), [("gpt2", "call_in_worker"), ("llama", "call"), ("looped", "call")])
def test_ten_steps_give_the_losses_norms_and_weights_of_the_reference(page, model, place):
    report = getattr(page, place)(MODULE, "runScenario", "trainFixture", model)
    expected = report["expected"]
    assert report["initialSha256"] == expected["initialSha256"]
    assert len(report["results"]) == 10
    for mine, reference in zip(report["results"], expected["results"], strict=True):
        assert mine["loss"] == pytest.approx(reference["loss"], rel=1e-6)
        assert mine["nll"] == pytest.approx(reference["nll"], rel=1e-6)
        assert mine["gradNorm"] == pytest.approx(reference["gradNorm"], rel=1e-5)
        for key in ("dataStep", "targetTokens", "optimizerStep", "overflow"):
            assert mine[key] == reference[key]
    for name, start in report["start"].items():
        if name.endswith("k_proj.bias"):
            continue  # softmax does not see a constant added to every key: the gradient is zero but for rounding
        update = np.subtract(report["model"][name], start)
        other = np.subtract(expected["model"][name], start)
        assert 1 - update @ other / (np.linalg.norm(update) * np.linalg.norm(other)) <= 1e-6, name
    assert report["describe"]["backend"] == "browser"
    assert report["memory"]["total"] == sum(bytes for arena, bytes in report["memory"].items() if arena != "total")


def test_the_same_bits_come_out_however_often_a_run_stops_reads_or_submits(page):
    hashes = page.call_in_worker(MODULE, "runScenario", "repeatFixture", "llama")
    assert len(hashes) == 4
    assert len(set(hashes.values())) == 1, hashes


def test_warm_steps_create_nothing_and_results_arrive_by_themselves(page):
    report = page.call_in_worker(MODULE, "runScenario", "countFixture", "llama", 100)
    before, after = report["before"], report["after"]
    assert after["buffersCreated"] == before["buffersCreated"]
    assert after["pipelinesCreated"] == before["pipelinesCreated"]
    assert after["readbacks"] - before["readbacks"] <= 26
    assert report["arrivedEarly"] + report["arrivedLate"] == 100
    assert report["arrivedEarly"] > 0


def test_every_variant_gives_the_same_bits_and_the_fastest_is_remembered(page):
    report = page.call(MODULE, "runScenario", "variantsFixture", "wide")
    assert len(report["hashes"]) > 1
    assert len(set(report["hashes"])) == 1
    assert "timing kernel variants" in report["said"][0]
    assert "timing kernel variants" not in report["said"][1]
    assert report["chosen"][0] == report["chosen"][1]


def test_evaluation_and_sampling_give_the_numbers_and_tokens_of_the_reference(page):
    report = page.call_in_worker(MODULE, "runScenario", "evaluateFixture", "llama")
    expected = report["expected"]
    assert report["evaluation"]["lossSum"] == pytest.approx(expected["evaluation"]["lossSum"], rel=1e-6)
    assert report["stateHash"] == report["undisturbed"]
    assert report["greedy"] == expected["greedy"]
    assert report["sampled"] == expected["sampled"]


def test_without_timestamps_a_synchronised_step_gives_the_times(page):
    report = page.call_in_worker(MODULE, "runScenario", "calibrateFixture", "llama")
    assert report["stateHash"] == report["usualHash"]
    measured = report["results"][1:]  # the first step may still compile, and is not measured
    assert {result["timingSource"] for result in measured} == {"calibration"}
    assert all(result["forwardMs"] > 0 and result["backwardMs"] > 0 for result in measured)


def test_a_plan_that_cannot_train_evaluates_and_generates(page):
    report = page.call(MODULE, "runScenario", "inferenceFixture")
    assert report["evaluation"]["lossSum"] == pytest.approx(report["expected"]["evaluation"]["lossSum"], rel=1e-6)
    assert report["greedy"] == report["expected"]["greedy"]
    assert len(report["refused"]) == 2


def test_a_kernel_that_does_not_compile_is_named(page):
    report = page.call(MODULE, "runScenario", "brokenFixture", "llama")
    assert report["name"] == "HybridError"
    assert "kernel 'step_finalize' does not compile" in report["message"]
    assert "line " in report["message"]


def test_a_lost_device_ends_with_its_own_error(page):
    report = page.call(MODULE, "runScenario", "failFixture", "gpt2")
    assert report["errors"]["lost"]["name"] == "DeviceLost"
    assert report["errors"]["lostExport"]["name"] == "DeviceLost"
    assert report["errors"]["vocabulary"]["name"] == "DataContractError"
    assert report["errors"]["foreign"]["name"] == "CheckpointCorrupt"


def test_the_profile_of_the_adapter_is_measured(page):
    report = page.call(MODULE, "runScenario", "profile")
    assert report["modest"]["limits"]["maxStorageBufferBindingSize"] == 128 * 2**20
    assert report["profile"]["subgroup_size"] == (4 if "subgroups" in report["profile"]["features"] else 0)
    assert report["profile"]["cpu"] is True


def test_a_plan_compiled_for_the_adapters_profile_gives_the_numbers_of_the_reference(page, plan_folder):
    found = page.call(MODULE, "runScenario", "profile")["profile"]
    profile = DeviceProfile(
        limits=found["limits"],
        features=frozenset(found["features"]),
        subgroup_size=found["subgroup_size"],
        cpu=found["cpu"],
    )
    workload = next(w for w in fixtures() if w.name == "wide")
    write_run(plan_folder / "adapted", workload, profile)
    report = page.call_in_worker(MODULE, "runScenario", "variantsFixture", "adapted")
    assert len(report["hashes"]) > 1
    assert len(set(report["hashes"])) == 1
    report = page.call_in_worker(MODULE, "runScenario", "trainFixture", "adapted", {"variants": report["chosen"][0]})
    losses = [result["loss"] for result in report["results"]]
    assert losses == pytest.approx([result["loss"] for result in report["expected"]["results"]], rel=1e-6)


@pytest.mark.parametrize("place", ["call", "call_in_worker"])
def test_small_texts_are_kept_in_the_origins_private_files(page, place):
    assert getattr(page, place)(MODULE, "storeAndRead") == [None, "short", "short"]


def test_a_page_without_webgpu_says_what_to_do(page, server):
    message = page.do(
        lambda it: it.evaluate(
            """async () => {
              const { openDevice } = await import("/runtime/device.js");
              const gpu = { requestAdapter: async () => null };
              return openDevice({ gpu }).catch((error) => `${error.name}: ${error.message}`);
            }"""
        )
    )
    assert message.startswith("NoAdapter: WebGPU found no graphics adapter.")
    assert "chrome://gpu" in message
