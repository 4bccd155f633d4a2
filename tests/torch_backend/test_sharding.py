"""DDP, FSDP2 and HSDP over real processes: the numbers of one process, with a part of its memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybrid.backends.protocol import GenerateOptions
from hybrid.backends.torch import sharding
from hybrid.backends.torch.session import TorchSession
from hybrid.backends.torch.sharding import Layout, Machines, choose_layout
from hybrid.config.size import MOST_DEVICE_BYTES
from hybrid.errors import ConfigError
from hybrid.models.initial_numpy import initial_rows
from hybrid.models.parameters import count_parameters, parameter_specs
from hybrid.training.parity.runtimes import session_arguments
from hybrid.training.parity.workload import MODELS
from torch_backend.jobs import SECONDS, job, run_jobs
from torch_backend.sharded import split_arguments, split_step, train, workload
from training.micro import entries, run, run_file

pytestmark = pytest.mark.torch

NONE, FULL, HYBRID = ({"sharding": name} for name in ("none", "full", "hybrid"))
HALF = {"model": "llama", "count": 3, "precision": "mixed-f16", "overflow_step": 2}
STEPS = {
    # Each rank has one row of each step; two ranks are a "node".
    "ddp": {"model": "looped", "count": 3, **NONE},
    "gpt2": {"model": "gpt2", "count": 3, **FULL, "recompute": True},
    "looped": {"model": "looped", "count": 3, **FULL},
    "hybrid": {"model": "looped", "count": 3, **HYBRID},
    "hybrid-gpt2": {"model": "gpt2", "count": 3, **HYBRID, "recompute": "selective"},
    "half": {**HALF, **FULL},
    "half-ddp": {**HALF, **NONE},
    "brain": {"model": "looped", "count": 1, "precision": "mixed-bf16", **HYBRID},
}
SPLITS = {
    # Eight rows in microbatches of one: by the number of ranks, how they are held.
    "two": {"none": NONE, "full": FULL, "compiled": {**FULL, "compiled": True}},
    "four": {
        "compiled": {**HYBRID, "compiled": True},
        "tight": {"sharding": "auto", "tight": True},
        "tight-hybrid": {**HYBRID, "tight": True},
    },
    "eight": {"none": NONE, "full": FULL},
}
SIZES = {"two": 2, "four": 4, "eight": 8}
LAYERS = 5
RUN = {"backend.sharding": "full", "evaluation.every": 2, "sampling.every": 2, "checkpoint.every": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Any]:
    """All processes of this file, side by side."""
    spoilt = {"split": {"do": "split", **HYBRID}}
    jobs = [
        job("sharded", 4, "spoilt", cases=spoilt, node=2, spoilt=1),
        job("sharded_run", 2, "run", count=3, assignments=[f"{key}={value}" for key, value in RUN.items()]),
        job("sharded_run", 3, "run", count=6, assignments=["backend.sharding=full"]),
    ]
    for group, splits in SPLITS.items():
        cases = {f"split-{case}": {"do": "split", **facts} for case, facts in splits.items()}
        if group == "four":
            cases |= {case: {"do": "train", **facts} for case, facts in STEPS.items()}
            cases["use"] = {"do": "use", **HYBRID}
            cases["use-tight"] = {"do": "use", **FULL, "tight": True}
            cases["peak"] = {"do": "peak", "layers": LAYERS, **FULL}
        jobs.append(job("sharded", SIZES[group], group, cases=cases, node=2 if group == "four" else 0))
    return run_jobs(folder, *jobs)


@pytest.fixture(scope="module")
def found(folder: Path, outcomes: dict[str, Any]) -> Any:
    """What a case of a group of processes gave: `found(group, case)`."""
    for group in SPLITS:
        assert set(outcomes[group]["codes"]) == {0}, outcomes[group]["errors"]
    return lambda group, case: np.load(folder / f"{group}.{case}.npz")


def alone(model: str, count: int, overflow_step: int = 0, precision: str = "f32", **settings: Any) -> dict[str, Any]:
    """What `STEPS` is compared with: one process."""
    settings.pop("sharding")
    work = workload(model, count, overflow_step=overflow_step, precision=precision)
    return train(TorchSession(work.model, **{**session_arguments(work), **settings}), work)


def difference(ours: Any, theirs: Any, prefix: str) -> float:
    """Norm of the difference over the norm, of all tensors whose names begin so."""
    names = [name for name in theirs if name.startswith(prefix)]
    a, b = (np.concatenate([np.asarray(s[name], np.float64).ravel() for name in names]) for s in (ours, theirs))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("case", STEPS)
def test_ddp_fsdp2_and_hsdp_train_as_one_process_does(found: Any, case: str) -> None:
    """Losses, norms, loss scales and skipped steps; weights and moments after the last one. The same numbers in f32; in
    half precision the same but for roundings of weights that differ by one part in 10^7."""
    facts = STEPS[case]
    ours, theirs = found("four", case), alone(**facts)
    half = facts.get("precision", "")
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5 if half else 1e-6)
    assert ours["grad_norm"][0] == pytest.approx(theirs["grad_norm"][0], rel=1e-6)
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4 if half else 1e-6)
    for told in ("overflow", "loss_scale", "optimizer_step"):
        assert ours[told].tolist() == theirs[told]
    for prefix in ("model.", "moment1/", "moment2/"):
        assert difference(ours, theirs, prefix) < (1e-3 if half else 1e-6), prefix
    parallel = {"none": "ddp", "full": "fsdp2", "hybrid": "hsdp"}[facts["sharding"]]
    assert json.loads(str(ours["described"]))["parallel"] == parallel


def test_any_split_over_ranks_and_microbatches_gives_the_gradients_of_one(found: Any) -> None:
    """1x8 = 2x4 = 4x2 = 8x1, rows with unequal numbers of targets and one rank, or microbatch, without any. Gradients
    are read off the first moments, which begin at zero."""
    theirs = split_step(TorchSession(MODELS["llama"], **split_arguments(8)), 8)
    one_by_one = split_step(TorchSession(MODELS["llama"], **split_arguments(1)), 1)
    assert difference(one_by_one, theirs, "moment1/") < 1e-6
    for group, splits in SPLITS.items():
        for case in splits:
            ours = found(group, f"split-{case}")
            described = json.loads(str(ours["described"]))
            compiled = case == "compiled"
            assert ours["loss"][0] == pytest.approx(theirs["loss"][0], rel=1e-6)
            assert ours["grad_norm"][0] == pytest.approx(theirs["grad_norm"][0], rel=1e-6)
            assert difference(ours, theirs, "moment1/") < (1e-5 if compiled else 1e-6), (group, case)
            assert described["mode"] == ("compiled" if compiled else "eager")
            assert ours["traced"] == 0  # wrapping comes after compiling, and leaves its code valid
            last = "every microbatch" if case.startswith("tight") else "last microbatch"
            assert described["sharding"]["gradientSync"] == last


def test_a_rank_holds_two_whole_layers_at_most(found: Any) -> None:
    """Beside the root's tensors, which are whole throughout; buffers of collectives counted, too."""
    peak = {name: int(found("four", "peak")[name]) for name in ("units", "layer", "rest", "left", "peak", "own")}
    assert peak["units"] == LAYERS + 1
    assert peak["layer"] + peak["rest"] < peak["peak"] <= 2 * peak["layer"] + peak["rest"]
    assert peak["left"] == 0  # nothing stays whole between steps
    assert peak["own"] == pytest.approx((LAYERS * peak["layer"] + peak["rest"]) * 4 / 4, rel=0.01)


@pytest.mark.parametrize("case", ["use", "use-tight"])
def test_a_sharded_session_evaluates_samples_and_takes_a_state(found: Any, case: str) -> None:
    ours, work = found("four", case), workload("gpt2", 1)
    assert ours["foreign"].tolist() == []  # initial weights, bit for bit
    one = TorchSession(work.model, **session_arguments(work))
    theirs = train(one, work)
    for prefix in ("model.", "moment1/", "moment2/"):
        assert difference(ours, theirs, prefix) < 1e-6
    expected = [one.evaluate(batch).loss_sum for batch in work.microbatches(1)]
    assert ours["evaluation"] == pytest.approx(expected, rel=1e-6)
    assert ours["tokens"].tolist() == list(one.generate([1, 2, 3], GenerateOptions(tokens=40, temperature=1.0)))
    assert ours["differing"].tolist() == [] and ours["step"] == 1
    assert ours["again"].tolist() == ours["before"].tolist() != ours["evaluation"].tolist()


def test_a_sample_gathers_the_weights_once_where_they_fit(found: Any) -> None:
    units = len(MODELS["gpt2"].schedule) + 1
    assert found("four", "use")["gathers"] == units
    assert found("four", "use-tight")["gathers"] == 40 * units


def test_ranks_that_compute_with_different_weights_are_stopped(outcomes: dict[str, Any]) -> None:
    """One of the two copies of HSDP differs: seen by the ranks of both."""
    assert outcomes["spoilt"]["codes"] == [1] * 4
    assert len(set(outcomes["spoilt"]["errors"])) == 1
    assert "the ranks have different weights after their first step" in outcomes["spoilt"]["errors"][0]
    assert outcomes["spoilt"]["seconds"] < SECONDS


def test_a_sharded_run_evaluates_samples_saves_and_goes_on(folder: Path, outcomes: dict[str, Any]) -> None:
    """Two ranks, then three, then one without shards, against one all the way."""
    assert set(outcomes["run"]["codes"]) == {0}, outcomes["run"]["errors"]
    described = run_file(folder)["backend"]
    assert (described["worldSize"], described["parallel"], described["sharding"]["shards"]) == (3, "fsdp2", 3)
    assert described["sharding"]["reason"] == "asked for"
    settings = ("backend.name=torch", "backend.device=cpu", "data.microbatchSize=1", "run.steps=8")
    run(folder, *settings)
    run(folder, *settings, *(f"{key}={value}" for key, value in RUN.items()), run="straight")
    for ours, theirs in zip(entries(folder), entries(folder, "straight"), strict=True):
        assert ours["total_loss"] == pytest.approx(theirs["total_loss"], rel=1e-6)
        assert ours["gradient_norm_unclipped"] == pytest.approx(theirs["gradient_norm_unclipped"], rel=1e-5)


def test_rows_of_initial_weights_are_those_of_the_whole() -> None:
    for spec in parameter_specs(MODELS["gpt2"]):
        whole = initial_rows(spec, 3, 0, spec.shape[0])
        np.testing.assert_array_equal(initial_rows(spec, 3, 7, 29), whole[7:29])


# --- the choice ---------------------------------------------------------------------------------------------------


GPT2 = MODELS["gpt2"]
STATE = 16 * count_parameters(GPT2)


def chosen(memory: float, world: int = 8, node: int = 4, wanted: str = "auto") -> Layout:
    """For devices with this share of what weights, gradients and moments take."""
    return choose_layout(wanted, Machines(world, node, int(memory * STATE)), GPT2, STATE // 10)


def test_auto_replicates_what_fits_with_room_to_spare_and_says_why() -> None:
    layout = chosen(1.6)
    assert (layout.name, layout.replicas, layout.shards, layout.sync_last) == ("none", 8, 1, True)
    assert layout.reason.startswith("it fits: ") and "70% of its memory" in layout.reason
    assert chosen(1.5).name != "none"


def test_auto_shards_within_a_node_where_there_are_several_and_else_over_all() -> None:
    hybrid, one_node, small = chosen(1.5), chosen(1.5, node=8), chosen(0.7)
    assert (hybrid.name, hybrid.replicas, hybrid.shards) == ("hybrid", 2, 4)
    assert (one_node.name, one_node.replicas, one_node.shards) == ("full", 1, 8)
    assert (small.name, small.shards) == ("full", 8)
    assert chosen(1.5, node=0).name == "full"  # nodes differ
    assert "do not fit" in hybrid.reason and "do not fit" in small.reason


def test_the_ranks_of_a_node_share_what_its_control_groups_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "machine_memory", lambda: 12)
    assert sharding._memory(torch.device("cpu"), 4) == 3
    monkeypatch.setattr(sharding, "machine_memory", lambda: None)
    assert sharding._memory(torch.device("cpu"), 2) == MOST_DEVICE_BYTES // 2  # the system does not tell


def test_whole_gradients_wait_for_the_last_microbatch_only_where_they_fit() -> None:
    assert chosen(1.5, node=8).sync_last
    assert not chosen(0.5, node=8).sync_last


def test_what_is_asked_for_is_done_and_what_cannot_be_is_refused() -> None:
    assert [chosen(0.01, wanted=name).name for name in ("none", "full", "hybrid")] == ["none", "full", "hybrid"]
    assert chosen(0.01, world=1, node=1, wanted="full").name == "none"
    with pytest.raises(ConfigError, match=r"'hybrid': 8 ranks, 8 on each of 1 node\(s\); expected two or more nodes"):
        chosen(1.0, node=8, wanted="hybrid")
    with pytest.raises(ConfigError, match=r"not the same number on each node"):
        chosen(1.0, node=0, wanted="hybrid")
    with pytest.raises(ConfigError, match=r"backend\.sharding.*hybrid"):
        chosen(1.0, wanted="hybird")
