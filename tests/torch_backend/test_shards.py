"""Saving and loading over real processes: the bytes of one process with a share of its memory, while training goes on,
and never half a checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from checkpoint.examples import flip
from hybrid.backends.reference.session import ReferenceSession
from hybrid.backends.torch.session import TorchSession
from hybrid.backends.torch.shards import stage
from hybrid.checkpoint import finding
from hybrid.checkpoint.store import CheckpointStore
from hybrid.errors import EXIT_FAILED, EXIT_REFUSED, EXIT_STOPPED, ConfigError
from hybrid.models.parameters import count_parameters
from hybrid.training.parity.runtimes import session_arguments
from hybrid.training.parity.workload import Workload
from torch_backend.jobs import SECONDS, job, run_jobs
from torch_backend.saves import FILE_BYTES, LARGEST, MODEL, restored
from training.micro import entries, run, run_file, steps_saved

pytestmark = pytest.mark.torch

STATE_BYTES = 12 * count_parameters(MODEL)  # weights and two moments
SAVES = {"two": 2, "three-full": 3, "four-hybrid": 4}
LOADS = (("two", 3), ("three-full", 2))
SMALL_THINGS = 1_000_000  # bytes of Python objects: plans of all ranks, a batch, buffers of files
FAILURES = ("full", "writer", "reader", "stop", "step")


def settings_of(name: str) -> dict[str, Any]:
    return {"sharding": name.partition("-")[2] or "none"}


def damage(folder: Path) -> None:
    """A run of one process, one bit of whose checkpoint has changed."""
    run(folder, "backend.name=torch", "backend.device=cpu", "data.microbatchSize=1", "run.steps=2", run="damaged")
    file = finding.resolve(folder / "damaged").path / "optimizer.safetensors"
    flip(file, file.stat().st_size - 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Any]:
    jobs = [job("save_fails", 2, kind, kind=kind) for kind in FAILURES]
    for name, size in SAVES.items():
        jobs.append(job("saving", size, name, **settings_of(name)))
    for name, size in LOADS:
        jobs.append(job("loading", size, name, **settings_of(name)))
    damage(folder)
    jobs.append(job("train", 2, "damaged", count=4))
    found: dict[str, Any] = run_jobs(folder, *jobs)
    return found


@pytest.fixture
def told(folder: Path, outcomes: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """What the ranks that saved something told."""
    assert set(outcomes[name]["codes"]) == {0}, outcomes[name]["errors"]
    return [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(SAVES[name])]


@pytest.mark.parametrize("name", SAVES)
def test_what_ranks_save_together_has_the_bytes_of_what_one_saves(folder: Path, told: Any, name: str) -> None:
    """Although training went on before the first byte was written, over the same ranks."""
    together, alone = (finding.resolve(folder / run).path for run in (name, f"{name}-alone"))
    files = [{path.name: path.read_bytes() for path in checkpoint.iterdir()} for checkpoint in (together, alone)]
    assert files[0] == files[1]
    assert told[0]["under way after two more steps"]
    assert [path.name for path in (folder / name / "checkpoints").iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("name", SAVES)
def test_a_rank_holds_its_share_and_a_buffer(told: Any, name: str) -> None:
    assert sum(facts["staged"] for facts in told) == STATE_BYTES
    for facts in told:
        assert facts["staged"] < 1.02 * STATE_BYTES / len(told)
        assert facts["most"] < facts["staged"] + 2 * max(FILE_BYTES, facts["largest"]) + SMALL_THINGS


@pytest.mark.parametrize("name", SAVES)
def test_only_json_and_safetensors_are_written(told: Any, name: str) -> None:
    """Of all that a rank opened to write below the run's folder, temporary files included: never a pickle."""
    for rank, facts in enumerate(told):
        assert {Path(file).suffix for file in facts["written"]} <= {".json", ".safetensors"}
        pieces = [file for file in facts["written"] if file.startswith("shard-")]
        assert pieces and all(file.startswith(f"shard-{rank + 1:05}-") for file in pieces)
    assert {Path(file).suffix for file in told[0]["files of pieces"]} == {".safetensors"}


@pytest.mark.parametrize(("name", "size"), LOADS)
def test_another_number_of_ranks_goes_on_from_the_same_state(
    folder: Path, outcomes: dict[str, Any], name: str, size: int
) -> None:
    facts = [json.loads((folder / f"{name}.loaded-{size}.{rank}.json").read_text()) for rank in range(size)]
    assert facts[0]["hash"] == finding.resolve(folder / name).state_hash
    # Rank 0 reads a header, and then the file once, a tensor at a time; nobody else reads anything.
    assert facts[0]["opened"].count("optimizer.safetensors") == 2
    assert facts[0]["most"] < 2 * LARGEST + SMALL_THINGS < STATE_BYTES / 3
    assert all(others["opened"] == [] for others in facts[1:])


def test_a_damaged_checkpoint_ends_every_rank(folder: Path, outcomes: dict[str, Any]) -> None:
    """The bit is in the last tensor, which comes when the others have been handed out."""
    outcome = outcomes["damaged"]
    assert outcome["codes"] == [EXIT_REFUSED] * 2
    assert outcome["errors"][0] == outcome["errors"][1]
    assert "optimizer.safetensors: bytes 0 to " in outcome["errors"][0]
    assert outcome["seconds"] < SECONDS


@pytest.mark.parametrize("backend", ["torch", "reference", pytest.param("webgpu", marks=pytest.mark.webgpu)])
def test_one_process_goes_on_from_the_same_state(folder: Path, outcomes: dict[str, Any], backend: str) -> None:
    work = Workload("one", MODEL, 1)
    session: Any
    if backend == "webgpu":
        from hybrid.backends.webgpu.session import WebGPUSession

        session = WebGPUSession(MODEL, **session_arguments(work))
    elif backend == "reference":
        session = ReferenceSession(MODEL, **session_arguments(work))
    else:
        session = TorchSession(MODEL, **session_arguments(work), device="cpu", training=False)
    assert restored(session, folder / "three-full") == finding.resolve(folder / "three-full").state_hash
    session.close()


# --- saves that go wrong


def test_a_disk_that_is_full_on_one_rank_ends_all_with_one_message(folder: Path, outcomes: dict[str, Any]) -> None:
    outcome = outcomes["full"]
    message = "saving step 4 failed on rank 1: OSError: [Errno 28] No space left on device"
    assert outcome["codes"] == [EXIT_FAILED] * 2
    assert outcome["errors"] == [f"hybrid: {message}\n"] * 2
    assert outcome["seconds"] < SECONDS
    assert (run_file(folder, "full")["status"], run_file(folder, "full")["message"]) == ("failed", message)
    assert [path.name for path in (folder / "full" / "checkpoints").iterdir()] == ["step-00000002"]


@pytest.mark.parametrize(("kind", "rank"), [("writer", 1), ("reader", 0)])
def test_a_process_that_is_killed_in_a_save_leaves_the_one_before(
    folder: Path, outcomes: dict[str, Any], kind: str, rank: int
) -> None:
    """And what it had begun is no checkpoint, and is gone when the run goes on."""
    assert outcomes[kind]["codes"][rank] == -9
    assert outcomes[kind]["codes"][1 - rank] == EXIT_FAILED
    assert outcomes[kind]["seconds"] < SECONDS
    found = CheckpointStore(folder / kind).latest()
    assert found is not None and found.step == 2
    run(folder, "backend.name=torch", "backend.device=cpu", "data.microbatchSize=1", "run.steps=6", run=kind)
    assert steps_saved(folder, kind) == [2, 5, 6]
    assert sorted(path.name[:5] for path in (folder / kind / "checkpoints").iterdir()) == ["step-"] * 3
    assert [row["step"] for row in entries(folder, kind)] == [1, 2, 3, 4, 5, 6]


def test_a_stop_during_a_save_finishes_it(folder: Path, outcomes: dict[str, Any]) -> None:
    assert outcomes["stop"]["codes"] == [EXIT_STOPPED] * 2, outcomes["stop"]["errors"]
    facts = run_file(folder, "stop")
    assert facts["status"] == "stopped" and "SIGTERM" in facts["message"]
    store = CheckpointStore(folder / "stop")
    assert {status.status for status in store.list()} == {"complete"}
    assert finding.resolve(folder / "stop").step == facts["step"]
    # Each save is slower than two steps; none is left out, and (see `save_fails`) one is under way at a time.
    assert steps_saved(folder, "stop") == sorted({*range(2, facts["step"] + 1, 2), facts["step"]})


def test_an_error_on_one_rank_lets_a_save_that_is_under_way_end(folder: Path, outcomes: dict[str, Any]) -> None:
    outcome = outcomes["step"]
    assert outcome["codes"] == [EXIT_FAILED] * 2
    assert outcome["errors"][0] == outcome["errors"][1]
    assert re.fullmatch(r"hybrid: rank 1 failed in step [34]: RuntimeError: boom\n", outcome["errors"][0])
    assert outcome["seconds"] < SECONDS
    assert {status.status for status in CheckpointStore(folder / "step").list()} == {"complete"}
    assert steps_saved(folder, "step") == [2]


# --- who writes what


@pytest.fixture
def fake_ranks() -> Iterator[Any]:
    """Makes this process one of several that do not exist: collectives do nothing."""

    def become(rank: int, size: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 13])
@pytest.mark.parametrize("layout", ["plain", "full", "hybrid"])
def test_every_row_is_written_once(fake_ranks: Any, layout: str, rows: int) -> None:
    """By one of four ranks: that each have all rows, or a part of them, or (two nodes) share them two and two."""
    whole = torch.arange(rows * 3, dtype=torch.float32).reshape(rows, 3)
    found = np.full((rows, 3), -1.0)
    sizes = []
    for rank in range(4):
        fake_ranks(rank, 4)
        pieces = stage({"x": _spread(whole, layout, rank)}, rank, 4)
        for piece in pieces.values():
            assert piece.shape == (rows, 3)
            part = found[piece.first : piece.first + len(piece.rows)]
            assert (part == -1).all()
            part[:] = piece.rows
        sizes.append(sum(len(piece.rows) for piece in pieces.values()))
    assert (found == whole.numpy()).all()
    assert max(sizes) <= -(-rows // 4) + (layout == "hybrid")


def _spread(whole: torch.Tensor, layout: str, rank: int) -> torch.Tensor:
    if layout == "plain":
        return whole
    shape, placements = ((4,), [Shard(0)]) if layout == "full" else ((2, 2), [Replicate(), Shard(0)])
    mesh = init_device_mesh("cpu", shape)
    parts, index = shape[-1], rank % shape[-1]
    share = -(-len(whole) // parts)
    local = whole[min(len(whole), index * share) : (index + 1) * share]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def test_a_host_copy_is_nobody_elses(fake_ranks: Any) -> None:
    weights = torch.zeros(4, 2)
    piece = stage({"x": weights}, 0, 2)["x"]
    weights += 1
    assert (piece.rows == 0).all() and piece.rows.untyped_storage().nbytes() == piece.rows.nbytes == 16


def test_columns_are_not_written(fake_ranks: Any) -> None:
    fake_ranks(0, 2)
    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(torch.zeros(4, 1), mesh, [Shard(1)], run_check=False)
    with pytest.raises(ConfigError, match=r"tensor 'x' is placed as S.*: a checkpoint is made of whole rows"):
        stage({"x": tensor}, 0, 2)
